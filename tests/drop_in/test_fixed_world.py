"""Ranks stay what they were, also where the master has put the members into another order."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from ray_pccl import (
    Communicator,
    MasterStoppedError,
    PCCLError,
    PeerEvictedError,
    PeerLostError,
    ReduceOp,
    TooFewPeersError,
)
from ray_pccl.descriptors import ReduceInfo
from ray_pccl.testing import PeerGroup, PeerStarter
from ray_pccl.util.collective.tensors import first_elements, writable
from ray_pccl.util.collective.world import FixedWorld

SIZE = 3
RANKS = (2, 0, 1)
"""The rank of each member, by its place in the epoch."""


@pytest.fixture
def peers(peer_group: PeerStarter) -> PeerGroup:
    """Peers in the order of their places."""
    group = peer_group(0, min_world_size=SIZE, max_world_size=SIZE)
    for place in range(SIZE):
        group.add(rank=place)
    for peer in group:
        peer.result_of(peer.joined, 60, "connect()")
    return group


def _world(comm: Communicator) -> tuple[int, FixedWorld]:
    """A world in which the communicator's rank is not the one that the user asked for."""
    members = [""] * SIZE
    for place, rank in enumerate(RANKS):
        members[rank] = comm.members[place]
    return RANKS[comm.rank], FixedWorld(comm, tuple(members), "g", 20.0)


def _operate(comm: Communicator) -> dict[str, Any]:
    rank, world = _world(comm)
    found: dict[str, Any] = {"rank": rank}
    for root in range(SIZE):
        array = np.full(2, rank + 1.0)
        world.broadcast(array, root)
        found[f"broadcast {root}"] = array[0]
        array = np.full(2, 10.0**rank)
        world.reduce(array, root, ReduceOp.SUM)
        found[f"reduce {root}"] = array[0]
    outputs = [np.zeros(2) for _ in range(SIZE)]
    world.all_gather(outputs, np.full(2, rank + 1.0))
    found["all_gather"] = [output[0] for output in outputs]
    array = np.zeros(2)
    world.reduce_scatter(array, [np.full(2, 10.0 * place + rank) for place in range(SIZE)], ReduceOp.SUM)
    found["reduce_scatter"] = array[0]
    array = np.full(2, rank + 1.0)
    if rank == 0:
        world.send(array, 2)
    elif rank == 2:
        world.recv(array, 0)
    found["send and recv"] = array[0]
    return found


def test_roots_lists_and_messages_go_by_the_ranks_that_were_asked_for(peers: PeerGroup) -> None:
    started = [peer.run_async(_operate) for peer in peers]
    found = {held["rank"]: held for held in (future.result(60) for future in started)}
    assert sorted(found) == [0, 1, 2]
    for rank, held in found.items():
        for root in range(SIZE):
            assert held[f"broadcast {root}"] == root + 1
            assert held[f"reduce {root}"] == (111 if rank == root else 10**rank)
        assert held["all_gather"] == [1, 2, 3]
        assert held["reduce_scatter"] == 3 * 10 * rank + 3
        assert held["send and recv"] == (1 if rank == 2 else rank + 1)


class _Rearranged:
    """A communicator whose members are put into another order at the moment of a call."""

    peer_id, epoch, members = "a", 1, ("a", "b")

    def _late(self, *_: Any, **__: Any) -> ReduceInfo:
        return ReduceInfo(0, 0, 2, ("b", "a"))

    all_reduce = barrier = broadcast = reduce = reduce_scatter = recv = _late


def test_a_result_of_another_order_than_the_one_that_was_meant_is_an_error_on_all() -> None:
    comm: Any = _Rearranged()
    world = FixedWorld(comm, ("a", "b"), "g", 1.0)
    given = np.ones(2)
    world.all_reduce(given, ReduceOp.SUM)
    world.barrier()
    calls: list[Any] = [
        lambda: world.broadcast(given, 0),
        lambda: world.reduce(given, 0, ReduceOp.SUM),
        lambda: world.reduce_scatter(given, [given, given], ReduceOp.SUM),
        lambda: world.recv(given, 1),
    ]
    for call in calls:
        with pytest.raises(PCCLError, match="put into another order") as caught:
            call()
        assert isinstance(caught.value, RuntimeError)


class _Ending:
    """A communicator whose operation fails, when a member has gone or has not."""

    peer_id, epoch = "a", 1

    def __init__(self, error: PCCLError, left: tuple[str, ...]) -> None:
        self.members: tuple[str, ...] = ("a", "b")
        self._error, self._left = error, left

    def barrier(self, **_: Any) -> None:
        self.members = self._left
        raise self._error


@pytest.mark.parametrize(
    ("error", "left"),
    [
        (PeerLostError("b was lost", peers=("b",), reason="it exits"), ("a", "b")),
        (PeerLostError("b was lost", peers=("b",), reason="it exits"), ("a",)),
        (TooFewPeersError("it was gone before"), ("a",)),
    ],
)
def test_a_lost_rank_is_told_in_the_call_and_in_each_later_one(error: PCCLError, left: tuple[str, ...]) -> None:
    comm: Any = _Ending(error, left)
    world = FixedWorld(comm, ("a", "b"), "g", 1.0)
    for _ in range(2):
        with pytest.raises(PeerLostError, match=r"rank 1 of 2.*destroy_collective_group\('g'\)") as caught:
            world.barrier()
        assert isinstance(caught.value, RuntimeError) and caught.value.peers == ("b",)
        comm.members = ("a", "b")  # what was lost once does not come back


@pytest.mark.parametrize("error", [PeerEvictedError("evicted", reason="it was silent"), MasterStoppedError("stopped")])
def test_one_who_is_out_of_the_group_is_told_what_to_do(error: PCCLError) -> None:
    comm: Any = _Ending(error, ("a", "b"))
    world = FixedWorld(comm, ("a", "b"), "g", 1.0)
    with pytest.raises(type(error), match=r"destroy_collective_group\('g'\)") as caught:
        world.barrier()
    assert isinstance(caught.value, RuntimeError) and caught.value.details == error.details


def test_a_read_only_array_is_written_in_its_own_memory_with_a_warning() -> None:
    array = np.frombuffer(bytearray(8 * 3), dtype=np.float64)
    array.flags.writeable = False
    with pytest.warns(UserWarning, match=r"pass a \.copy\(\)"):
        writable(array[::2])[:] = 7
    assert array.tolist() == [7, 0, 7] and not array.flags.writeable


def test_what_can_be_written_is_left_as_it_is_and_so_is_a_mapped_file(tmp_path: Any) -> None:
    path = tmp_path / "mapped"
    path.write_bytes(bytes(64))
    mapped = np.memmap(path, np.float64, "r")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for array in (np.ones(3), mapped, np.asarray(mapped)[1:], mapped.view(np.ndarray)):
            assert writable(array) is array


def test_the_first_elements_share_the_memory() -> None:
    array = np.zeros((2, 3))
    first_elements(array, 4)[:] = 1
    assert array.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert first_elements(array, 0) is array
