"""Groups that a driver declares, or the environment does: actors join them when they first use them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import ray

import ray_pccl.util.collective as col
from ray_pccl.testing import eventually
from tests.drop_in.workers import destroy, get, is_initialised, on, on_all, rank_and_size, refused, summed

pytestmark = pytest.mark.ray


def _destroy_all(workers: list[Any], name: str) -> None:
    get([worker.run.remote(destroy, name) for worker in workers])


def _is_declared(name: str) -> bool:
    try:
        ray.get_actor(f"info_{name}")
    except ValueError:
        return False
    return True


def test_declared_actors_join_when_they_first_use_the_group(workers: list[Any], name: str) -> None:
    col.create_collective_group(workers[:3], 3, [2, 0, 1], "gloo", name)
    assert on(workers[0], rank_and_size, name) == (-1, -1), "as in Ray, this is no use"
    assert not on(workers[0], is_initialised, name)

    assert on_all(workers[:3], summed, name) == [6.0] * 3
    assert get([worker.run.remote(rank_and_size, name) for worker in workers[:3]]) == [(2, 3), (0, 3), (1, 3)]
    on(workers[3], refused, RuntimeError, summed, 0, name, text="is not initialized in the process")
    _destroy_all(workers[:3], name)


def test_the_handle_of_a_declared_group_is_a_group_and_stays_the_same(workers: list[Any], name: str) -> None:
    def handles() -> tuple[bool, int, int, str]:
        first, second = col.get_group_handle(name), col.get_group_handle(name)
        assert isinstance(first, col.PCCLGroup)
        return first is second, first.rank, first.world_size, first.group_name

    col.create_collective_group(workers[:1], 1, [0], group_name=name)
    assert on(workers[0], handles) == (True, 0, 1, name)
    _destroy_all(workers[:1], name)


def test_destroying_ends_the_declaration_and_another_may_follow(workers: list[Any], name: str) -> None:
    for size in (2, 3, 2):
        col.create_collective_group(workers[:size], size, list(range(size)), "nccl", name)
        with pytest.raises(RuntimeError, match="Trying to initialize a group twice"):
            col.create_collective_group(workers[:size], size, list(range(size)), "nccl", name)
        assert on_all(workers[:size], summed, name) == [sum(range(1, size + 1))] * size
        _destroy_all(workers[:size], name)
        eventually(lambda: not _is_declared(name))
        on(workers[0], refused, RuntimeError, summed, 0, name, text="is not initialized in the process")


@pytest.mark.parametrize(
    ("ranks", "world_size", "text"),
    [
        ([0], 2, "'1' ranks but '2' actors"),
        ([0, 1, 2], 3, "'3' ranks but '2' actors"),
        ([0, 2], 3, "permutation"),
        ([0, 0], 2, "permutation"),
        ([-1, 0], 2, "permutation"),
        ([0, 1], 0, "greater than zero"),
        ([0, 1], -3, "greater than zero"),
        ([0, 1], 1, "greater than world_size"),
    ],
)
def test_declarations_that_make_no_sense_are_refused(
    workers: list[Any], name: str, ranks: list[int], world_size: int, text: str
) -> None:
    with pytest.raises(RuntimeError, match=text):
        col.create_collective_group(workers[:2], world_size, ranks, "gloo", name)
    assert not _is_declared(name)


def test_an_unknown_backend_can_not_be_declared(workers: list[Any], name: str) -> None:
    with pytest.raises(RuntimeError, match="Backend PIGEONS is not registered"):
        col.create_collective_group(workers[:1], 1, [0], "pigeons", name)
    assert not _is_declared(name)


def test_a_group_of_the_environment_is_joined_when_it_is_first_used(workers: list[Any], name: str) -> None:
    def with_environment(rank: int) -> tuple[float, tuple[int, int]]:
        os.environ.update(
            collective_group_name=name, collective_rank=str(rank), collective_world_size="2", collective_backend="gloo"
        )
        refused(RuntimeError, summed, rank, "of another name")
        try:
            return summed(rank, name), rank_and_size(name)
        finally:
            destroy(name)
            os.environ.pop("collective_group_name")

    assert on_all(workers[:2], with_environment) == [(3.0, (0, 2)), (3.0, (1, 2))]


def test_threads_that_first_use_a_declared_group_at_once_join_it_once(workers: list[Any], name: str) -> None:
    def handle() -> int:
        return id(col.get_group_handle(name))

    col.create_collective_group(workers[:1], 1, [0], "gloo", name)
    handles = get([workers[0].run.remote(handle) for _ in range(4)])
    assert len(set(handles)) == 1 and on(workers[0], handle) == handles[0]
    _destroy_all(workers[:1], name)
