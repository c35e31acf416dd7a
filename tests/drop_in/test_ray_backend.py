"""Ray's own `ray.util.collective` on our data plane, and our module on a backend of the user's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import ray.util.collective as theirs
import torch
from ray.util.collective.collective_group.base_collective_group import BaseGroup

import ray_pccl
import ray_pccl.util.collective as ours
from ray_pccl.testing import Faults
from tests.drop_in.workers import get, on, on_all, refused, start, values

pytestmark = pytest.mark.ray
BACKEND = "PCCL"


def _join(rank: int, size: int, name: str) -> None:
    theirs.init_collective_group(size, rank, BACKEND, name)


def _leave(rank: int, name: str) -> None:
    theirs.destroy_collective_group(name)


def _everything(rank: int, size: int, name: str) -> dict[str, Any]:
    """All that Ray's module can do for a group, with what is due; a difference is an error."""
    mine, total = float(rank + 1), float(sum(range(1, size + 1)))
    group = theirs.get_group_handle(name)
    assert isinstance(group, ours.PCCLGroup) and (theirs.get_rank(name), group.world_size) == (rank, size)
    found: dict[str, Any] = {}
    for op, due in ((theirs.types.ReduceOp.SUM, total), (theirs.types.ReduceOp.MAX, size)):
        given = torch.full((3,), mine)
        theirs.allreduce(given, name, op)
        found[f"allreduce {op.name}"] = values(given), {float(due)}
    array = np.full(3, mine)
    theirs.reduce(array, size - 1, name)
    found["reduce"] = values(array), {total if rank == size - 1 else mine}
    array = np.full(3, mine)
    theirs.broadcast(array, 1, name)
    found["broadcast"] = values(array), {2.0}
    gathered = [np.zeros(3) for _ in range(size)]
    theirs.allgather(gathered, np.full(3, mine), name)
    found["allgather"] = [values(one) for one in gathered], [{other + 1.0} for other in range(size)]
    inputs = [np.full(3, mine * 10 * place) for place in range(size)]
    theirs.reducescatter(array, inputs, name)
    found["reducescatter"] = values(array), {total * 10 * rank}
    found["inputs"] = [values(one) for one in inputs], [{mine * 10 * place} for place in range(size)]
    array = np.full(3, mine)
    if rank < 2:
        (theirs.send if rank == 0 else theirs.recv)(array, 1 - rank, name)
        found["send and recv"] = values(array), {1.0}
    theirs.barrier(name)
    return {what: held for what, (held, due) in found.items() if held != due}


@pytest.mark.parametrize("size", [2, 4])
def test_rays_own_module_runs_on_our_backend(workers: list[Any], name: str, size: int) -> None:
    for _ in range(2):  # also after it was destroyed
        on_all(workers[:size], _join, size, name)
        assert on_all(workers[:size], _everything, size, name) == [{}] * size
        on_all(workers[:size], _leave, name)


def test_a_group_that_rays_module_declares_runs_on_our_backend(workers: list[Any], name: str) -> None:
    theirs.create_collective_group(workers[:3], 3, [0, 1, 2], BACKEND, name)
    assert on_all(workers[:3], _everything, 3, name) == [{}] * 3
    on_all(workers[:3], _leave, name)


def test_avg_through_rays_module(workers: list[Any], name: str) -> None:
    def mean(rank: int) -> set[float]:
        given = np.full(3, rank + 1.0)
        theirs.allreduce(given, name, ours.types.ReduceOp.AVG)
        return values(given)

    on_all(workers[:2], _join, 2, name)
    assert on_all(workers[:2], mean) == [{1.5}, {1.5}]
    on_all(workers[:2], _leave, name)


def test_a_death_is_told_through_rays_module(ray_local: Any, name: str, faults: Faults) -> None:
    mortals = start(2)
    on_all(mortals, _join, 2, name)
    inside = mortals[0].run.remote(refused, ray_pccl.PeerLostError, theirs.barrier, name)
    faults.kill(get(mortals[1].pid.remote()))
    assert "rank 1 of 2" in get(inside)
    on(mortals[0], refused, RuntimeError, theirs.allreduce, np.ones(2), name, text="destroy_collective_group")
    ray_local.kill(mortals[0])


class Recorder(BaseGroup):
    """A backend of the user's, which notes what it is asked for."""

    @classmethod
    def backend(cls) -> str:
        return "RECORDER"

    @classmethod
    def check_backend_availability(cls) -> bool:
        return True

    def allreduce(self, tensor: Any, allreduce_options: Any = None) -> None:
        assert allreduce_options.reduceOp in theirs.types.ReduceOp
        tensor[0][:] = allreduce_options.reduceOp.value

    barrier = reduce = allgather = broadcast = reducescatter = send = recv = allreduce


class Unavailable(Recorder):
    """One whose library is missing."""

    @classmethod
    def check_backend_availability(cls) -> bool:
        return False


def test_a_backend_that_the_user_registered_does_its_own_work(workers: list[Any], name: str) -> None:
    def registered() -> tuple[bool, bool, set[float], bool]:
        ours.register_collective_backend("RECORDER", Recorder)
        ours.register_collective_backend("UNAVAILABLE", Unavailable)
        refused(RuntimeError, ours.init_collective_group, 1, 0, "unavailable", name, text="not available")
        ours.init_collective_group(1, 0, "recorder", name)
        given = np.zeros(2)
        ours.allreduce(given, name, ours.types.ReduceOp.MAX)
        kind = type(ours.get_group_handle(name))
        ours.destroy_collective_group(name)
        available = [ours.is_backend_available(backend) for backend in ("recorder", "unavailable")]
        return available[0], available[1], values(given), kind is Recorder

    assert on(workers[0], registered) == (True, False, {3.0}, True)
