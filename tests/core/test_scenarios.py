"""The scenarios that a simpler protocol gets wrong, one by one, in the simulated world."""

from __future__ import annotations

import pytest

from master_actor.core.actions import EvictionRequested
from master_actor.core.phases import Phase
from ray_pccl.control.messages import VoteKind
from ray_pccl.peer.membership import Standing
from tests.core.simulation import SETTINGS, Peer, World

STAGES = ("probing", "solving", "linking")
"""Of `optimize_topology()`."""


def group_of(world: World, count: int) -> list[Peer]:
    peers = [world.start_peer(minimum=count, maximum=8) for _ in range(count)]
    world.advance(1.0)
    assert {peer.membership.view.epoch for peer in peers} == {1}
    return peers


def test_a_storm_of_link_reports_makes_one_epoch() -> None:
    world = World()
    peers = group_of(world, 4)
    for _ in range(10):
        for peer in peers:
            for other in peers:
                if other is not peer:
                    peer.apply(peer.membership.link_broken(other.name))
    world.advance(1.0)
    assert [peer.membership.view.epoch for peer in peers] == [2, 2, 2, 2]
    assert all(len(peer.membership.view.members) == 4 for peer in peers)


def test_reports_about_an_epoch_that_is_over_start_nothing() -> None:
    world = World()
    peers = group_of(world, 3)
    late = peers[0].membership.link_broken("p1")
    peers[1].apply(peers[1].membership.link_broken("p0"))
    world.deliver_all()
    assert peers[0].membership.view.epoch == 2
    peers[0].apply(late)
    world.advance(1.0)
    assert [peer.membership.view.epoch for peer in peers] == [2, 2, 2]


def test_of_two_masters_at_once_one_exits_and_no_epoch_is_decided_twice() -> None:
    world = World()
    peers = group_of(world, 4)
    old = world.masters[0]
    world.start_master()
    new = world.masters[1]
    for peer in peers[:2]:
        world.dial(peer, new)
    # Both lose a peer that is connected to them, and both want to decide the next epoch.
    world.kill(peers[1], seen=False)
    world.kill(peers[3], seen=False)
    world.advance(SETTINGS.register_grace_s + 1.0)
    assert new.alive and not old.alive
    world.settle()
    survivors = [peer for peer in peers if peer.member]
    assert [peer.name for peer in survivors] in (["p0"], ["p0", "p2"])
    assert {peer.membership.standing for peer in peers[:1]} == {Standing.MEMBER}


def test_a_ring_that_is_cut_off_keeps_others_from_forming_until_its_lease_is_over() -> None:
    world = World()
    ring = group_of(world, 3)
    for peer in ring:
        world.partition(peer)
    newcomers = [world.start_peer(minimum=3, maximum=8) for _ in range(3)]
    world.advance(SETTINGS.heartbeat_timeout_s + 1.0)
    master = world.master
    assert master is not None and master.core.groups["g"].phase is Phase.LEASED
    for peer in ring:  # the ring goes on meanwhile, and commits
        world.enter(peer)
    for _ in range(2):
        for peer in ring:
            world.progress(peer)
    assert len(world.outcomes) == 1
    world.advance(SETTINGS.master_lease_s + 1.0)
    assert all(peer.membership.view.epoch == 2 for peer in newcomers)
    assert all(peer.membership.ledger.frozen for peer in ring)
    for peer in ring:
        world.heal(peer)
    world.advance(2.0)
    assert {peer.membership.standing for peer in ring} == {Standing.EVICTED}


def test_one_of_a_cut_off_ring_that_comes_back_ends_the_lease_for_all() -> None:
    world = World()
    ring = group_of(world, 3)
    for peer in ring:
        world.partition(peer)
    newcomers = [world.start_peer(minimum=3, maximum=8) for _ in range(3)]
    world.advance(SETTINGS.heartbeat_timeout_s + 1.0)
    assert all(not peer.member for peer in newcomers)
    world.heal(ring[0])
    world.advance(1.0)
    assert ring[0].membership.standing is Standing.EVICTED
    assert all(peer.membership.view.epoch == 2 for peer in newcomers)


def test_a_short_freeze_costs_nothing_and_a_long_one_the_membership() -> None:
    world = World()
    peers = group_of(world, 3)
    world.stop(peers[0])
    world.advance(SETTINGS.heartbeat_timeout_s - 0.3)
    world.resume(peers[0])
    world.advance(3.0)
    assert {peer.membership.view.epoch for peer in peers} == {1}
    world.stop(peers[0])
    world.advance(SETTINGS.heartbeat_timeout_s + 0.3)
    assert [peer.membership.view.epoch for peer in peers[1:]] == [2, 2]
    world.resume(peers[0])
    world.advance(1.0)
    assert peers[0].membership.standing is Standing.EVICTED


def test_a_member_that_is_told_of_its_admission_only_by_the_next_master_is_a_member() -> None:
    world = World()
    peers = group_of(world, 2)
    late = world.start_peer(minimum=2, maximum=8)
    world.deliver_all()
    for peer in peers:
        world.vote(peer, VoteKind.UPDATE_TOPOLOGY)
    master = world.master
    assert master is not None
    while "p2" not in {member.peer_id for member in master.core.durable.groups["g"].members}:
        for link in world.links():
            world.deliver_up(link)
        for link in world.links():
            world.deliver_down(link)
        while master.pending and len(master.core.durable.groups["g"].members) == 2:
            master.carry_out()
    master.carry_out()  # the epoch is written down, and nobody is told
    world.crash_master()
    world.start_master()
    world.advance(1.0)
    assert late.member
    assert len({(peer.membership.view.epoch, peer.membership.view.members) for peer in (*peers, late)}) == 1
    assert not any(peer.calls for peer in peers)


def test_a_master_that_lost_its_journal_does_not_keep_its_peers_going_beside_the_next_one() -> None:
    world = World()
    ring = group_of(world, 2)
    assert world.master is not None
    world.master.cut_off = True
    world.start_master()
    newcomers = [world.start_peer(minimum=2, maximum=8) for _ in range(2)]
    world.advance(SETTINGS.register_grace_s + SETTINGS.master_lease_s + 3.0)
    assert all(peer.membership.view.epoch == 2 for peer in newcomers)
    assert all(peer.membership.ledger.frozen for peer in ring)


def test_who_was_given_up_is_not_encouraged_while_the_news_wait_for_the_journal() -> None:
    world = World()
    ring = group_of(world, 2)
    newcomers = [world.start_peer(minimum=2, maximum=8) for _ in range(2)]
    world.deliver_all()
    master = world.master
    assert master is not None
    master.cut_off = True
    world.add(ring[0])
    world.deliver_all()
    for peer in ring:
        master.handle(EvictionRequested(peer.name, "somebody said so"))
    world.advance(SETTINGS.register_grace_s - 1.0)
    for peer in ring:
        world.partition(peer)
    master.cut_off = False
    world.advance(SETTINGS.master_lease_s + 2.0)
    assert all(peer.membership.view.epoch == 2 for peer in newcomers)
    assert all(peer.membership.ledger.frozen for peer in ring)


def _optimizing(world: World, peers: list[Peer], until: str) -> None:
    """All are in `optimize_topology()`, which has come so far and no further."""
    for peer in peers:
        world.vote(peer, VoteKind.OPTIMIZE_TOPOLOGY)
    master = world.masters[-1]
    group = master.core.groups["g"]
    reached = {
        "probing": lambda: any(peer.probes for peer in peers),
        "solving": lambda: bool(master.searches),
        "linking": lambda: group.inquiry is not None and group.inquiry.ring is not None,
    }[until]
    for _ in range(1000):
        if reached():
            return
        for link in world.links():
            world.deliver_up(link)
        master.carry_out_all()
        if reached():
            return
        for link in world.links():
            world.deliver_down(link)
        if until != "probing":
            for peer in peers:
                peer.end_probe()
        if until == "linking":
            master.solve()
    world.fail(f"it never came to {until}")


@pytest.mark.parametrize("stage", STAGES)
def test_a_member_that_dies_while_the_ring_is_optimized_is_left_out_and_the_others_get_their_order(stage: str) -> None:
    for victim in range(4):
        world = World()
        peers = group_of(world, 4)
        _optimizing(world, peers, stage)
        world.kill(peers[victim], seen=True)
        world.settle()
        survivors = [peer for peer in peers if peer.alive]
        assert {peer.membership.view.epoch for peer in survivors} == {3}
        outcomes = [dict(peer.results)["optimize_topology/0/0"] for peer in survivors]
        assert outcomes == [True, True, True]


@pytest.mark.parametrize("stage", STAGES)
def test_a_master_that_dies_while_the_ring_is_optimized_is_followed_by_one_that_goes_on(stage: str) -> None:
    world = World()
    peers = group_of(world, 4)
    _optimizing(world, peers, stage)
    world.crash_master()
    world.start_master()
    world.settle()
    assert [dict(peer.results)["optimize_topology/0/0"] for peer in peers] == [True] * 4
    rings = [[member.peer_id for member in peer.membership.view.members] for peer in peers]
    assert rings == [["p0", "p3", "p2", "p1"]] * 4


@pytest.mark.parametrize("stage", STAGES)
def test_a_link_that_breaks_while_the_ring_is_optimized_costs_an_epoch_and_nothing_else(stage: str) -> None:
    world = World()
    peers = group_of(world, 4)
    _optimizing(world, peers, stage)
    world.break_link(peers[0], peers[1])
    world.settle()
    assert all(peer.member for peer in peers)
    assert [dict(peer.results)["optimize_topology/0/0"] for peer in peers] == [True] * 4
