"""The master dies at every single point of a life that has everything in it, once and twice."""

from __future__ import annotations

from functools import cache

import pytest

from ray_pccl.control.messages import Question, VoteKind
from tests.core.simulation import World


def life(world: World) -> None:
    """A group forms, works, admits, is reordered, loses, is left and closed; a dead master is started again."""
    peers = [world.start_peer(minimum=2, maximum=4) for _ in range(3)]
    _go_on(world, 1.0)
    for peer in peers:
        world.enter(peer)
        world.add(peer)
    _go_on(world)
    _work(world)
    peers.append(world.start_peer(minimum=2, maximum=4))
    _go_on(world)
    for kind in (VoteKind.PEERS_PENDING, VoteKind.UPDATE_TOPOLOGY, VoteKind.OPTIMIZE_TOPOLOGY):
        for peer in peers:
            world.vote(peer, kind)
        _go_on(world)
    for peer in peers:
        world.enter(peer)
    for peer in (peers[0], peers[1], peers[3]):
        world.progress(peer)
    world.kill(peers[1], seen=True)
    _go_on(world)
    _work(world)
    world.break_link(peers[0], peers[2])
    _go_on(world)
    world.leave(peers[2])
    _go_on(world)
    world.query(peers[0], Question.SET_CLOSED)
    _go_on(world)
    for peer in peers:
        world.vote(peer, VoteKind.PEERS_PENDING)
    _go_on(world)


def _go_on(world: World, seconds: float = 0.4) -> None:
    world.deliver_all()
    while world.master is None:
        world.start_master()
        world.advance(seconds)
    world.advance(seconds)


def _work(world: World) -> None:
    for _ in range(2):
        for peer in world.peers.values():
            world.progress(peer)


def lived(crash_at: set[int]) -> World:
    world = World(crash_at=crash_at)
    life(world)
    world.settle()
    return world


@cache
def points() -> int:
    return lived(set()).crash_points


def test_the_life_without_a_crash_has_every_kind_of_action_in_it() -> None:
    world = lived(set())
    assert world.boots == 1
    assert len(world.outcomes) == 3  # two of the life, one to see that it can go on
    assert world.peers["p0"].membership.view.epoch >= 4
    assert points() >= 100


def test_a_master_that_crashes_at_any_point_breaks_nothing() -> None:
    for point in range(1, points() + 1):
        assert lived({point}).boots == 2, f"crash point {point} was not reached"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_a_master_that_crashes_at_any_two_points_breaks_nothing(part: int) -> None:
    """The second crash hits the restarted master anywhere in its recovery, and later ones on a coarser grid."""
    for first in range(1 + part, points() + 1, 4):
        for distance in (*range(1, 40), 50, 70, 90):
            lived({first, first + distance})
