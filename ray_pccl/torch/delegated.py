"""Gloo and NCCL as the library that moves the data of a group: torch's process groups, one for each epoch.

`ray_pccl.ring.delegate` says when they are built, asked and aborted. All of their memory is the library's own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ray_pccl.descriptors import DataType, ReduceOp
from ray_pccl.errors import BackendUnavailableError
from ray_pccl.ring.delegate import Keys, TorchGroup
from ray_pccl.ring.header import BACKENDS, Header, Kind
from ray_pccl.ring.kernels import storage_dtype
from ray_pccl.ring.task import Array, Epoch, Recipe
from ray_pccl.torch.delegated_keys import KeyStore, cut

_CONNECT_TIMEOUT_S = 5.0
"""How long Gloo waits for a member's connection. It tries five times; but once the epoch is over, not again."""
_REDUCING = (Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER)
_TORCH_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.AVG: dist.ReduceOp.SUM,  # we divide: by the contributors, in the same way everywhere
    ReduceOp.PROD: dist.ReduceOp.PRODUCT,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.MIN: dist.ReduceOp.MIN,
}
_REDUCIBLE = {
    DataType.FLOAT: torch.float32,
    DataType.DOUBLE: torch.float64,
    DataType.FLOAT16: torch.float16,
    DataType.BFLOAT16: torch.bfloat16,
    DataType.INT8: torch.int8,
    DataType.UINT8: torch.uint8,
    DataType.BOOL: torch.uint8,
    DataType.INT32: torch.int32,
    DataType.INT64: torch.int64,
}
_WRAPPING = {DataType.UINT32: torch.int32, DataType.UINT64: torch.int64}
"""Sums and products of these have the bits of the signed ones; the larger of two has not."""


def torch_dtype(header: Header) -> torch.dtype | None:
    """The type in which torch reduces such an operation, or None if it can't, or not as `ReduceOp` promises."""
    if header.op in (ReduceOp.MAX, ReduceOp.MIN):
        # Of a NaN and a number Gloo takes either, whichever comes first.
        return None if header.datatype.is_floating else _REDUCIBLE.get(header.datatype)
    return _REDUCIBLE.get(header.datatype) or _WRAPPING.get(header.datatype)


class TorchJob:
    """One operation in tensors of its own: `given` is this rank's input, `result` its output, either may be None."""

    def __init__(self, recipe: Recipe, epoch: Epoch, send: Array | None, device: torch.device) -> None:
        header = self.header = recipe.header
        self._recipe = recipe
        self._size = epoch.size
        kind, count, size = header.kind, header.count, epoch.size
        is_root = header.root == epoch.rank
        sends = kind not in (Kind.BROADCAST, Kind.SCATTER) or is_root
        keeps = kind not in (Kind.REDUCE, Kind.GATHER) or is_root
        long_input = kind in (Kind.REDUCE_SCATTER, Kind.SCATTER, Kind.ALL_TO_ALL)
        long_output = kind in (Kind.ALL_GATHER, Kind.GATHER, Kind.ALL_TO_ALL)
        self.given: torch.Tensor | None = None
        self.result: torch.Tensor | None = None
        if sends:
            self.given = self._tensor(count * size if long_input else count, send, device)
        if kind in (Kind.ALL_REDUCE, Kind.REDUCE, Kind.BROADCAST):  # these work in place
            self.given = self.given if self.given is not None else self._tensor(count, None, device)
            self.result = self.given
        elif keeps:
            self.result = self._tensor(count * size if long_output else count, None, device)

    def _tensor(self, count: int, values: Array | None, device: torch.device) -> torch.Tensor:
        array: Array = np.empty(count, storage_dtype(self.header.datatype))
        if values is not None:
            np.copyto(array, values)
        tensor = torch.from_numpy(array.view(np.uint8))
        dtype = torch_dtype(self.header) if self.header.kind in _REDUCING else None
        return (tensor if dtype is None else tensor.view(dtype)).to(device)

    @property
    def operation(self) -> Any:
        """What torch combines with."""
        return _TORCH_OPS[self.header.op]

    def deliver(self, out: Array) -> None:
        """Copies the result out, and divides it where that is due."""
        assert self.result is not None
        array = self.result.view(torch.uint8).cpu().numpy().view(out.dtype)
        np.copyto(out, array)
        if self._recipe.average is not None:
            self._recipe.average(out, self._size)

    def launch(self, group: Any, timeout: timedelta) -> Any:
        """Starts it in a process group; the work that is returned ends with it."""
        given, result, root = self.given, self.result, self.header.root
        kind = self.header.kind
        options = _options(kind, timeout)
        if kind in _REDUCING:
            options.reduceOp = self.operation
        if kind in (Kind.REDUCE, Kind.BROADCAST, Kind.GATHER, Kind.SCATTER):
            options.rootRank = root
        if kind is Kind.REDUCE or kind is Kind.BROADCAST:
            options.rootTensor = 0
        match kind:
            case Kind.ALL_REDUCE:
                return group.allreduce([given], options)
            case Kind.REDUCE:
                return group.reduce([given], options)
            case Kind.BROADCAST:
                return group.broadcast([given], options)
            case Kind.ALL_GATHER:
                return group._allgather_base(result, given, options)
            case Kind.REDUCE_SCATTER:
                return group._reduce_scatter_base(result, given, options)
            case Kind.ALL_TO_ALL:
                return group.alltoall_base(result, given, [], [], options)
            case Kind.GATHER:
                return group.gather([] if result is None else [self._parts(result)], [given], options)
        return group.scatter([result], [] if given is None else [self._parts(given)], options)

    def _parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return list(tensor.chunk(self._size))


def _options(kind: Kind, timeout: timedelta) -> Any:
    known: dict[Kind, Any] = {
        Kind.ALL_REDUCE: dist.AllreduceOptions,
        Kind.REDUCE: dist.ReduceOptions,
        Kind.BROADCAST: dist.BroadcastOptions,
        Kind.ALL_GATHER: c10d.AllgatherOptions,
        Kind.REDUCE_SCATTER: dist.ReduceScatterOptions,
        Kind.ALL_TO_ALL: dist.AllToAllOptions,
        Kind.GATHER: dist.GatherOptions,
        Kind.SCATTER: dist.ScatterOptions,
    }
    options = known[kind]()
    options.timeout = timeout
    return options


class GlooGroup:
    """A group of Gloo, over TCP, on the address at which this host's peers are reached."""

    def __init__(self, epoch: Epoch, host: str, keys: Keys, timeout_s: float) -> None:
        self._epoch = epoch
        self._host = host
        self._store = KeyStore(keys)
        self._timeout = timedelta(seconds=timeout_s)
        self._group: Any = None

    def build(self) -> None:
        """Connects to all members."""
        gloo: Any = dist.ProcessGroupGloo  # whose options its type stubs do not have
        options = gloo._Options()
        options._timeout = timedelta(seconds=_CONNECT_TIMEOUT_S)
        options._threads = 1
        options._devices = [gloo.create_device(hostname=self._host, lazy_init=False)]
        self._group = gloo(self._store, self._epoch.rank, self._epoch.size, options)

    def run(self, job: TorchJob) -> None:
        """Does an operation."""
        job.launch(self._group, self._timeout).wait()

    def abort(self) -> None:
        """Cuts its connections: what waits for them ends at once, here and at the other ends."""
        cut(self._store)


class NCCLGroup:
    """A group of NCCL, on this process's current CUDA device."""

    def __init__(self, epoch: Epoch, keys: Keys, timeout_s: float, device: torch.device) -> None:
        self._epoch = epoch
        self._store = KeyStore(keys)
        self._timeout = timedelta(seconds=timeout_s)
        self._device = device
        self._group: Any = None
        self._aborted = False

    def build(self) -> None:
        """Makes the group; NCCL connects with its first operation."""
        with _without_watchdog():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            self._group = dist.ProcessGroupNCCL(self._store, self._epoch.rank, self._epoch.size, options)

    def run(self, job: TorchJob) -> None:
        """Does an operation: the device has finished it when this returns."""
        with torch.cuda.device(self._device):
            job.launch(self._group, self._timeout).wait()
            torch.cuda.current_stream().synchronize()

    def abort(self) -> None:
        """Aborts its communicators: kernels that wait for a member end."""
        if self._group is not None and not self._aborted:
            self._group.abort()
            self._aborted = True  # else it is tried again


@contextlib.contextmanager
def _without_watchdog() -> Iterator[None]:
    """NCCL's watchdog ends the process when a peer has died: that is ours to survive."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class TorchBackend:
    """Gloo or NCCL, as `ray_pccl.ring.delegate` wants it."""

    def __init__(self, name: str) -> None:
        available = dist.is_available() and (dist.is_gloo_available() if name == "gloo" else dist.is_nccl_available())
        if not available or (name == "nccl" and not torch.cuda.is_available()):
            missing = "a CUDA device, and a torch that was built with NCCL" if name == "nccl" else "a torch with Gloo"
            raise BackendUnavailableError(
                f"backend={name!r} needs {missing}, which this process (torch {torch.__version__}) has not: use "
                "backend='ring', ray_pccl's own, which takes tensors on all devices"
            )
        self.name = name
        self.number = BACKENDS.index(name)
        self._device = torch.device("cpu" if name == "gloo" else f"cuda:{torch.cuda.current_device()}")

    def takes(self, header: Header) -> bool:
        """All but barriers and empty tensors, and reductions that torch does not do, or not as `ReduceOp` says."""
        if header.kind is Kind.BARRIER or not header.count:
            return False
        return header.kind not in _REDUCING or torch_dtype(header) is not None

    def job(self, recipe: Recipe, epoch: Epoch, send: Array | None) -> TorchJob:
        """A copy of the input, and room for the result, on the backend's device."""
        return TorchJob(recipe, epoch, send, self._device)

    def group(self, epoch: Epoch, host: str, keys: Keys, timeout_s: float) -> TorchGroup:
        """A process group that is still to be built."""
        if self.name == "gloo":
            return GlooGroup(epoch, host, keys, timeout_s)
        return NCCLGroup(epoch, keys, timeout_s, self._device)
