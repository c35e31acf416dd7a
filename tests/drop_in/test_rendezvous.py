"""How ranks find each other, without Ray: generations do not mix, and a death on the way is told."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

from ray_pccl import Communicator, Endpoint, PeerLostError, ReduceOp, RendezvousTimeoutError, TooFewPeersError
from ray_pccl.testing import Faults, PeerStarter, eventually
from ray_pccl.util.collective import rendezvous
from ray_pccl.util.collective.rendezvous import meet
from ray_pccl.util.collective.world import FixedWorld
from tests.drop_in.workers import NOTICED

PATIENCE_S = 30.0
GENERATIONS = 12


@pytest.fixture(autouse=True)
def without_ray(master: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Communicators use the test's master."""
    monkeypatch.setattr(rendezvous, "Communicator", partial(Communicator, master=master))
    monkeypatch.setattr(rendezvous, "start_master", lambda: None)
    monkeypatch.setattr(rendezvous, "_base_name", lambda name: name)


def _in_threads(functions: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(functions)) as pool:
        started: list[Future[Any]] = [pool.submit(function) for function in functions]
        return [done.result(PATIENCE_S) for done in started]


def test_ranks_that_come_and_go_at_their_own_pace_always_meet_their_own_generation() -> None:
    sizes = random.Random(7).choices([2, 3], k=GENERATIONS)

    def live(me: int) -> list[tuple[str, ...]]:
        seen = []
        for generation, size in enumerate(sizes):
            if me >= size:
                continue
            rank = (me + generation) % size
            comm, members = meet("g", size, rank)
            seen.append(members)
            assert members[rank] == comm.peer_id and len(members) == size
            given = np.full(3, float((generation + 1) * (me + 1)))
            FixedWorld(comm, members, "g", PATIENCE_S).all_reduce(given, ReduceOp.SUM)
            assert set(given.tolist()) == {(generation + 1) * sum(range(1, size + 1))}
            comm.close()  # others may not have got this far
        return seen

    first, second, third = _in_threads([partial(live, me) for me in range(3)])
    assert first == second and len(first) == GENERATIONS
    assert third == [members for members in first if len(members) == 3]
    everyone = [peer_id for members in first for peer_id in members]
    assert len(set(everyone)) == len(everyone), "no generation has a member of another"


def test_one_who_dies_on_the_way_to_the_group_is_told_to_the_others_at_once(
    peer_group: PeerStarter, faults: Faults
) -> None:
    lobby = peer_group(0, peer_group="g/lobby of 2", min_world_size=2, max_world_size=2)
    [victim] = lobby.add(rank=1)
    with ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(meet, "g", 2, 0)
        victim.joined.result(PATIENCE_S)  # it is in the lobby, and will never get further
        faults.kill(victim)
        with pytest.raises(PeerLostError, match="died while collective group 'g' was being initialised") as caught:
            meeting.result(PATIENCE_S)
    assert caught.value.peers == (victim.peer_id,) and caught.value.reason in NOTICED[:2]


def test_one_who_leaves_the_lobby_without_coming_is_waited_for_in_vain_until_the_deadline(
    peer_group: PeerStarter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_PCCL_JOIN_TIMEOUT_S", "2")
    lobby = peer_group(0, peer_group="g/lobby of 2", min_world_size=2, max_world_size=2)
    [other] = lobby.add(rank=1)
    with ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(meet, "g", 2, 0)
        other.joined.result(PATIENCE_S)
        other.call("close")
        with pytest.raises(RendezvousTimeoutError, match="needs 2 peers: 1 waiting"):
            meeting.result(PATIENCE_S)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("ray_pccl-events")]


def test_a_group_without_a_rank_does_not_wait_for_another_in_its_place() -> None:
    (comm, _), (other, _) = _in_threads([partial(meet, "g", 2, rank) for rank in range(2)])
    other.close()
    eventually(lambda: comm.world_size == 1)
    started = time.monotonic()
    with pytest.raises(TooFewPeersError):
        comm.barrier()
    assert time.monotonic() - started < 5
    world = FixedWorld(comm, (comm.peer_id, other.peer_id), "g", PATIENCE_S)
    with pytest.raises(PeerLostError, match="rank 1 of 2"):
        world.barrier()
    comm.close()
