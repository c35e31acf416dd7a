"""Groups by name: several at once, of some of the actors, wrong ones, destroyed and initialised again."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import ray

import ray_pccl
import ray_pccl.util.collective as col
from tests.drop_in.workers import (
    destroy,
    get,
    group_of,
    initialise,
    is_initialised,
    on,
    on_all,
    rank_and_size,
    refused,
    summed,
)

pytestmark = pytest.mark.ray

OTHER_JOB = """
import sys, ray
ray.init(address=sys.argv[1], namespace="another", log_to_driver=False)
from tests.drop_in.workers import group_of, on_all, start, summed
with group_of(start(2), sys.argv[2]) as group:
    assert on_all(group, summed, sys.argv[2], 100.0) == [300.0, 300.0]
"""


@pytest.mark.parametrize(
    ("name", "backend"),
    [("default", "nccl"), ("123?34!", "GLOO"), ("a/b c", "torch_gloo"), ("\N{SNOWMAN}" * 20, "PCCL")],
)
def test_any_name_and_any_backend_that_ray_knows(workers: list[Any], name: str, backend: str) -> None:
    with group_of(workers[:2], name, backend=backend) as group:
        assert on_all(group, summed, name) == [3.0, 3.0]


def test_one_actor_in_many_groups_with_another_rank_in_each(workers: list[Any], name: str) -> None:
    names = [f"{name}-{number}" for number in range(10)]
    for number, one in enumerate(names):
        members = workers[:2] if number % 2 else workers[1::-1]
        on_all(members, initialise, 2, one)
    for number, one in enumerate(names):
        ranks = get([worker.run.remote(rank_and_size, one) for worker in workers[:2]])
        assert ranks == ([(0, 2), (1, 2)] if number % 2 else [(1, 2), (0, 2)])
    for one in reversed(names):
        assert on_all(workers[:2], summed, one) == [3.0, 3.0]
        on_all(workers[:2], _destroy_at, one)


def _destroy_at(rank: int, name: str) -> None:
    destroy(name)


def test_groups_of_some_of_the_actors_do_not_see_each_other(workers: list[Any], name: str) -> None:
    even, odd = f"{name}-even", f"{name}-odd"
    with group_of(workers[::2], even), group_of(workers[1::2], odd), group_of(workers, name):
        assert on_all(workers[::2], summed, even) == [3.0, 3.0]
        assert on_all(workers[1::2], summed, odd, 10.0) == [30.0, 30.0]
        assert on_all(workers, summed, name) == [10.0] * 4
        assert on(workers[0], rank_and_size, odd) == (-1, -1)
        assert not on(workers[0], is_initialised, odd) and on(workers[2], is_initialised, even)


def test_two_groups_of_one_name_and_one_rank_each_are_alone(workers: list[Any], name: str) -> None:
    for worker in workers[:2]:
        on(worker, initialise, 0, 1, name)
    assert [on(worker, summed, 0, name, value) for worker, value in zip(workers, (5.0, 7.0), strict=False)] == [5, 7]
    for worker in workers[:2]:
        on(worker, destroy, name)


def test_a_process_that_is_in_no_group_is_told_so(workers: list[Any], name: str) -> None:
    def outside(inside: bool) -> None:
        given = [np.ones(2), np.ones(2)]
        calls: list[tuple[Any, ...]] = [
            (col.allreduce, given[0]),
            (col.reduce, given[0], 0),
            (col.broadcast, given[0], 0),
            (col.allgather, given, given[0]),
            (col.reducescatter, given[0], given),
            (col.send, given[0], 1),
            (col.recv, given[0], 1),
            (col.barrier,),
            (col.get_group_handle,),
        ]
        for call, *args in calls:
            text = f"The collective group {name!r} is not initialized in the process"
            refused(RuntimeError, call, *args, name, text=text)
        assert (col.get_rank(name), col.get_collective_group_size(name)) == (-1, -1)
        assert not col.is_group_initialized(name)
        col.destroy_collective_group(name)  # which only warns

    with group_of(workers[:2], name):
        on(workers[3], outside, False)
        assert on(workers[0], is_initialised, name)


def test_ranks_and_sizes_that_make_no_sense_are_refused_as_in_ray(workers: list[Any], name: str) -> None:
    def wrong() -> None:
        for world_size, rank in ((0, 0), (-1, 0), (2, 2), (2, -1)):
            refused(AssertionError, col.init_collective_group, world_size, rank, "gloo", name)
        for no_name in ("", None):
            refused(ValueError, col.init_collective_group, 1, 0, "gloo", no_name)
        refused(ValueError, col.init_collective_group, 1, 0, "pigeons", name, text="Backend PIGEONS not registered")
        refused(RuntimeError, col.init_collective_group, 1, 0, "gloo", name, 0, text="gloo_timeout")
        assert not col.is_group_initialized(name)

    on(workers[0], wrong)


def test_a_group_is_not_initialised_twice(workers: list[Any], name: str) -> None:
    with group_of(workers[:2], name) as group:
        for world_size, rank in ((2, 0), (1, 0)):
            text = on(group[0], refused, RuntimeError, col.init_collective_group, world_size, rank, "gloo", name)
            assert "Trying to initialize a group a second time" in text
        assert on_all(group, summed, name) == [3.0, 3.0]


def test_a_rank_that_is_asked_for_twice_is_refused(workers: list[Any], name: str) -> None:
    first = workers[0].run.remote(refused, ray_pccl.RankTakenError, initialise, 0, 2, name)
    second = workers[1].run.remote(refused, ray_pccl.RankTakenError, initialise, 0, 2, name)
    [told], [waiting] = ray.wait([first, second], timeout=20)
    assert "rank 0" in get(told)
    on(workers[2], initialise, 1, 2, name)
    with pytest.raises(AssertionError, match="raised no RankTakenError"):
        get(waiting)
    winner = workers[0] if waiting == first else workers[1]
    assert on_all([winner, workers[2]], summed, name) == [3.0, 3.0]
    for worker in (winner, workers[2]):
        on(worker, destroy, name)


def test_a_rank_that_never_comes_is_an_error_that_leaves_nothing_behind(workers: list[Any], name: str) -> None:
    def alone() -> str:
        os.environ["RAY_PCCL_JOIN_TIMEOUT_S"] = "0.5"
        try:
            for kind in (RuntimeError, TimeoutError, ray_pccl.RendezvousTimeoutError):
                text = refused(kind, initialise, 0, 2, name)
        finally:
            del os.environ["RAY_PCCL_JOIN_TIMEOUT_S"]
        assert not col.is_group_initialized(name)
        return text

    assert "needs 2 peers: 1 waiting" in on(workers[0], alone)
    with group_of(workers[:2], name) as group:
        assert on_all(group, summed, name) == [3.0, 3.0]


def test_destroyed_groups_are_gone_and_can_be_initialised_again_and_again(workers: list[Any], name: str) -> None:
    for size in (2, 2, 4, 1, 3):
        with group_of(workers[:size], name) as group:
            assert on_all(group, summed, name) == [sum(range(1, size + 1))] * size
        assert not any(get([worker.run.remote(is_initialised, name) for worker in workers]))


@pytest.mark.parametrize("size", [2, 3])
def test_one_rank_comes_again_while_another_has_not_destroyed_yet(workers: list[Any], name: str, size: int) -> None:
    on_all(workers[:2], initialise, 2, name)
    on(workers[0], destroy, name)
    ranks = [1, *range(2, size), 0]  # of the first, of newcomers, and of the second, who comes last
    early = [workers[0], *workers[2:size]]
    coming = [worker.run.remote(initialise, rank, size, name) for worker, rank in zip(early, ranks, strict=False)]

    # Who is still in the old group is not mixed with those who wait for the new one.
    text = on(workers[1], refused, ray_pccl.PeerLostError, summed, 1, name)
    assert "rank 0 of 2" in text and f"destroy_collective_group({name!r})" in text
    assert on(workers[1], rank_and_size, name) == (1, 2)
    assert ray.wait(coming, timeout=0)[0] == []

    on(workers[1], destroy, name)
    on(workers[1], initialise, 0, size, name)
    get(coming)
    members = [*early, workers[1]]
    assert get([worker.run.remote(rank_and_size, name) for worker in members]) == [(rank, size) for rank in ranks]
    assert on_all(members, summed, name) == [sum(range(1, size + 1))] * size
    for worker in members:
        on(worker, destroy, name)


def test_a_process_that_never_destroys_its_group_is_in_nobodys_way(workers: list[Any], name: str) -> None:
    on_all(workers[:2], initialise, 2, name)
    on(workers[0], destroy, name)
    with group_of([workers[0], workers[2]], name) as group:
        assert on_all(group, summed, name) == [3.0, 3.0]
        on(workers[1], refused, RuntimeError, summed, 1, name, text="is not complete any more")
        assert on_all(group, summed, name) == [3.0, 3.0]
    on(workers[1], destroy, name)


def test_a_rank_that_leaves_after_the_last_call_takes_nobodys_result_along(workers: list[Any], name: str) -> None:
    def last_call(rank: int) -> float:
        total = summed(rank, name)
        destroy(name)
        return total

    for _ in range(5):
        on_all(workers, initialise, 4, name)
        assert on_all(workers, last_call) == [10.0] * 4


def test_jobs_of_different_ray_namespaces_do_not_meet(ray_local: Any, workers: list[Any], name: str) -> None:
    waiting = workers[0].run.remote(initialise, 0, 2, name)
    address = ray_local.get_runtime_context().gcs_address
    other = subprocess.run([sys.executable, "-c", OTHER_JOB, address, name], timeout=60, check=False)
    assert other.returncode == 0

    on(workers[1], initialise, 1, 2, name)
    get(waiting)
    assert on_all(workers[:2], summed, name) == [3.0, 3.0]
    for worker in workers[:2]:
        on(worker, destroy, name)


def test_other_groups_are_initialised_and_used_while_one_waits_for_its_ranks(workers: list[Any], name: str) -> None:
    waiting = workers[0].run.remote(initialise, 0, 2, name)
    with group_of(workers[:2], f"{name}-other") as group:
        assert on_all(group, summed, f"{name}-other") == [3.0, 3.0]
        assert ray.wait([waiting], timeout=0)[0] == []
    with group_of(workers[1:2], f"{name}-another"):
        on(workers[1], initialise, 1, 2, name)
    get(waiting)
    for worker in workers[:2]:
        on(worker, destroy, name)
