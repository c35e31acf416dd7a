"""Torch's side of a delegated group, alone: its tensors, its store, its end; and NCCL with a double in its place."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ray_pccl import BackendUnavailableError, Communicator, DataType, ReduceOp, SettingsError
from ray_pccl.peer.communicator import _load_backend
from ray_pccl.ring.delegate import Keys
from ray_pccl.ring.header import Header, Kind
from ray_pccl.ring.task import Epoch, Recipe
from ray_pccl.testing import eventually
from ray_pccl.torch import delegated
from ray_pccl.torch.delegated import GlooGroup, NCCLGroup, TorchBackend, TorchJob, torch_dtype
from ray_pccl.torch.delegated_keys import KeyStore, cut

CPU = torch.device("cpu")
MEMBERS = ("a", "b", "c")


def _epoch(rank: int, size: int = 2) -> Epoch:
    return Epoch(1, rank, MEMBERS[:size], size)


def _keys(size: int) -> list[Keys]:
    """Those of as many members: what one publishes, all have."""
    everyone: list[Keys] = []

    def tell(key: str, value: bytes) -> None:
        for keys in everyone:
            keys.arrived(key, value)

    everyone += [Keys(tell) for _ in range(size)]
    return everyone


@contextlib.contextmanager
def _built(size: int, timeout_s: float = 20.0) -> Iterator[list[GlooGroup]]:
    groups = [GlooGroup(_epoch(rank, size), "127.0.0.1", keys, timeout_s) for rank, keys in enumerate(_keys(size))]
    with ThreadPoolExecutor(size) as threads:
        list(threads.map(GlooGroup.build, groups))
        yield groups


# ---------------------------------------------------------------------------------------------- what can't be used


def test_nccl_without_a_device_is_refused_with_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailableError, match=r"backend='nccl' needs a CUDA device.*use backend='ring'"):
        TorchBackend("nccl")


def test_a_backend_without_torch_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray_pccl.torch.delegated")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BackendUnavailableError, match=r"backend='gloo' needs torch.*pip install 'ray-pccl\[torch\]'"):
        _load_backend("gloo")


@pytest.mark.parametrize("backend", ["GLOO", "mpi", "", None, 3])
def test_an_unknown_backend_is_refused_at_once(backend: Any) -> None:
    with pytest.raises(SettingsError, match="backend is one of 'ring', 'gloo', 'nccl', not"):
        Communicator("g", master="127.0.0.1:1#00", backend=backend)


# ------------------------------------------------------------------------------------------------- what is handed over


@pytest.mark.parametrize(
    ("op", "datatype", "expected"),
    [
        (ReduceOp.SUM, DataType.FLOAT, torch.float32),
        (ReduceOp.AVG, DataType.BFLOAT16, torch.bfloat16),
        (ReduceOp.SUM, DataType.UINT64, torch.int64),
        (ReduceOp.MAX, DataType.UINT64, None),
        (ReduceOp.MAX, DataType.FLOAT, None),
        (ReduceOp.MIN, DataType.INT32, torch.int32),
        (ReduceOp.MAX, DataType.BOOL, torch.uint8),
        (ReduceOp.SUM, DataType.INT16, None),
    ],
)
def test_only_what_torch_reduces_as_promised_is_handed_over(op: ReduceOp, datatype: DataType, expected: Any) -> None:
    header = Header(Kind.ALL_REDUCE, 4, datatype, op)
    assert torch_dtype(header) is expected
    assert TorchBackend("gloo").takes(header) is (expected is not None)


def test_barriers_and_empty_tensors_are_not_handed_over() -> None:
    gloo = TorchBackend("gloo")
    assert not gloo.takes(Header(Kind.BARRIER)) and not gloo.takes(Header(Kind.BROADCAST, 0))
    assert gloo.takes(Header(Kind.ALL_GATHER, 1, DataType.INT16)), "what is only moved may have any type"


def test_an_input_is_copied_before_the_library_sees_it() -> None:
    values = np.arange(4, dtype=np.float32)
    job = TorchJob(Recipe(Header(Kind.ALL_REDUCE, 4, DataType.FLOAT)), _epoch(0), values, CPU)
    values[:] = -1
    out = np.zeros(4, np.float32)
    job.deliver(out)
    assert out.tolist() == [0, 1, 2, 3]


# -------------------------------------------------------------------------------------------------------- its end


def test_cutting_a_group_ends_what_waits_in_it_and_no_other_connection() -> None:
    ours, theirs = socket.create_server(("127.0.0.1", 0)), None
    with ours, _built(2) as (first, _), _built(2) as others, ThreadPoolExecutor(3) as threads:
        with socket.create_connection(ours.getsockname()) as dialled:
            theirs, _address = ours.accept()
            with theirs:
                waiting = threads.submit(first.run, _job(0))
                first.abort()
                with pytest.raises(RuntimeError, match=r"closed by peer|reset by peer"):
                    waiting.result(5)
                dialled.sendall(b"still here")
                assert theirs.recv(20) == b"still here"
        jobs = [_job(rank) for rank in range(2)]
        list(threads.map(GlooGroup.run, others, jobs))
        assert [job.result.tolist() for job in jobs if job.result is not None] == [[2.0] * 8] * 2


def _job(rank: int) -> TorchJob:
    return TorchJob(Recipe(Header(Kind.ALL_REDUCE, 8, DataType.FLOAT)), _epoch(rank), np.ones(8, np.float32), CPU)


def test_the_end_of_an_epoch_ends_the_wait_for_a_member_that_never_comes() -> None:
    (keys, _) = _keys(2)
    group = GlooGroup(_epoch(0), "127.0.0.1", keys, 20.0)
    with ThreadPoolExecutor(1) as threads:
        building = threads.submit(group.build)
        eventually(lambda: bool(group._store.published), 5, "it says where it listens")
        keys.end()
        with pytest.raises(Exception, match="epoch is over"):
            building.result(5)


def test_the_store_of_a_group_waits_and_looks() -> None:
    store = KeyStore(_keys(1)[0])
    store.set("key", "value")
    assert store.get("key") == b"value" and store.check(["key"]) and not store.check(["key", "other"])
    store.wait(["key"], timedelta(seconds=1))
    with pytest.raises(TimeoutError, match="timeout"):
        store.wait(["other"], timedelta(milliseconds=10))
    assert cut(store) == 0


# ------------------------------------------------------------------------------------------- NCCL, by a double


class FakeNCCL:
    """Adds what two members give, in host memory."""

    Options = SimpleNamespace
    handling: str | None = None
    aborted = threading.Event()

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        FakeNCCL.handling = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")
        self.options = options

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        tensors[0].mul_(2)
        return SimpleNamespace(wait=lambda: None)

    def abort(self) -> None:
        self.aborted.set()


def test_nccl_runs_on_the_device_and_waits_for_it_and_its_watchdog_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: waited.append("for the stream"))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNCCL, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    group = NCCLGroup(_epoch(0), _keys(1)[0], 20.0, CPU)
    group.abort()  # before it was built: nothing to abort
    group.build()
    assert FakeNCCL.handling == "0" and "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
    job, out = _job(0), np.zeros(8, np.float32)
    group.run(job)
    job.deliver(out)
    assert out.tolist() == [2.0] * 8 and waited == ["for the stream"]
    assert group._group.options._timeout == timedelta(seconds=20)
    group.abort()
    assert FakeNCCL.aborted.is_set()


def test_the_backend_of_a_cuda_device_makes_groups_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(delegated.dist, "is_nccl_available", lambda: True)
    nccl = TorchBackend("nccl")
    assert isinstance(nccl.group(_epoch(0), "127.0.0.1", _keys(1)[0], 1.0), NCCLGroup)
    assert (nccl.name, nccl.number, nccl._device) == ("nccl", 2, torch.device("cuda:1"))
