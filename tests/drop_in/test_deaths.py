"""A rank is killed: every other one is told, in the call that it is in and in each later one, and none hangs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray

import ray_pccl
import ray_pccl.util.collective as col
from ray_pccl.testing import Faults, eventually
from tests.drop_in.workers import (
    NOTICED,
    destroy,
    get,
    group_of,
    initialise,
    on,
    on_all,
    rank_and_size,
    refused,
    start,
    summed,
)

pytestmark = pytest.mark.ray
SOON_S = 5.0


@pytest.fixture
def victim(ray_local: Any) -> Iterator[Any]:
    """An actor that may be killed."""
    [actor] = start(1)
    yield actor
    ray.kill(actor)


def _kill(worker: Any, faults: Faults) -> None:
    faults.kill(get(worker.pid.remote()))


def _calls(rank: int, name: str) -> dict[str, Any]:
    """Every operation, as two ranks of three would call it."""
    given, three, other = np.ones(4), [np.ones(4) for _ in range(3)], 1 - rank
    return {
        "allreduce": lambda: col.allreduce(given, name),
        "reduce": lambda: col.reduce(given, 0, name),
        "broadcast": lambda: col.broadcast(given, 1, name),
        "allgather": lambda: col.allgather(three, given, name),
        "reducescatter": lambda: col.reducescatter(given, three, name),
        "barrier": lambda: col.barrier(name),
        "send or recv": lambda: col.send(given, other, name) if rank == 0 else col.recv(given, other, name),
        "recv from the dead": lambda: col.recv(given, 2, name),
    }


def _enter(rank: int, name: str, what: str) -> tuple[str, float]:
    """What the survivor's call says, and when."""
    text = refused(ray_pccl.PeerLostError, _calls(rank, name)[what])
    return text, time.monotonic()


def _is_inside(name: str) -> bool:
    """Whether an operation has begun; if it has not when the victim dies, the test is of the next one."""
    running = col.get_group_handle(name)._world._comm._running
    return bool(running is not None and running.entered)


def _every_call_is_refused_at_once(rank: int, name: str) -> float:
    started = time.monotonic()
    for call in _calls(rank, name).values():
        for kind in (RuntimeError, ray_pccl.PeerLostError):
            refused(kind, call, text=f"destroy_collective_group({name!r})")
    return time.monotonic() - started


@pytest.mark.parametrize("what", ["allreduce", "allgather", "recv from the dead"])
def test_who_is_in_a_call_when_a_rank_is_killed_is_told_at_once(
    workers: list[Any], victim: Any, name: str, what: str, faults: Faults
) -> None:
    survivors = workers[:2]
    on_all([*survivors, victim], initialise, 3, name)
    inside = [worker.run.remote(_enter, rank, name, what) for rank, worker in enumerate(survivors)]
    for worker in survivors:
        eventually(lambda worker=worker: on(worker, _is_inside, name))

    _kill(victim, faults)
    killed = time.monotonic()

    for text, when in get(inside):
        assert any(f"rank 2 of 3: {how}" in text for how in NOTICED), text
        assert when - killed < SOON_S
    for seconds in on_all(survivors, _every_call_is_refused_at_once, name):
        assert seconds < SOON_S
    assert get([worker.run.remote(rank_and_size, name) for worker in survivors]) == [(0, 3), (1, 3)]
    for worker in survivors:
        on(worker, destroy, name)


def test_a_group_that_lost_a_rank_while_nobody_called_is_refused_and_initialised_again(
    workers: list[Any], victim: Any, name: str, faults: Faults
) -> None:
    members = [workers[0], victim, workers[1]]
    on_all(members, initialise, 3, name)
    assert on_all(members, summed, name) == [6.0] * 3

    _kill(victim, faults)

    survivors = workers[:2]
    for worker in survivors:  # the very next call, whether or not the news has come
        on(worker, refused, ray_pccl.PeerLostError, summed, 0, name, text="rank 1 of 3")
    for worker in survivors:
        on(worker, destroy, name)
    with group_of(survivors, name) as group:
        assert on_all(group, summed, name) == [3.0, 3.0]
    with group_of([workers[1], workers[3], workers[0]], name) as group:
        assert on_all(group, summed, name) == [6.0] * 3


def test_an_actor_that_is_killed_while_it_waits_for_others_may_be_replaced(
    workers: list[Any], victim: Any, name: str, faults: Faults
) -> None:
    waiting = victim.run.remote(initialise, 1, 2, name)
    _kill(victim, faults)
    with pytest.raises(ray.exceptions.RayActorError):
        get(waiting)
    with group_of(workers[:2], name) as group:
        assert on_all(group, summed, name) == [3.0, 3.0]


def test_groups_without_the_dead_go_on(workers: list[Any], victim: Any, name: str, faults: Faults) -> None:
    with group_of(workers[:2], f"{name}-two") as pair:
        on_all([*pair, victim], initialise, 3, f"{name}-three")
        _kill(victim, faults)
        on_all(pair, _every_call_is_refused_at_once, f"{name}-three")
        assert on_all(pair, summed, f"{name}-two") == [3.0, 3.0]
        for worker in pair:
            on(worker, destroy, f"{name}-three")
