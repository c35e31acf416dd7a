"""A peer, or the master, dies while operations wait: the right values of the survivors, or an error on all of them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import pytest

from ray_pccl import QuantizationAlgorithm
from ray_pccl.testing import Faults, PeerProcess, PeerStarter, eventually
from tests.collectives.calls import FOLLOW_WORLD, Call, Outcome, is_inside, perform
from tests.collectives.conftest import TRANSPORTS, on, survivable

OVER_BOTH = pytest.mark.parametrize("transport", TRANSPORTS)
COUNTS = (10, 100_000, 2_000_000)
Crowd = Callable[..., list[PeerProcess]]


@pytest.fixture
def crowd(peer_group: PeerStarter, transport: str) -> Crowd:
    """Makes a group, by rank, that a test takes one victim after another from."""
    return lambda size=3, **more: survivable(peer_group, transport, size, **more)


def _enter(peers: list[PeerProcess], call: Call) -> list[Future[Outcome]]:
    """Has peers enter a call, each with a power of two of its own, and returns when they are inside."""
    started = [peer.run_async(perform, replace(call, value=2**place)) for place, peer in enumerate(peers)]
    for peer in peers:
        eventually(lambda peer=peer: peer.run(is_inside, call.tag), 10, "the peer is inside")
    return started


def _ends(started: list[Future[Outcome]]) -> list[Outcome]:
    return [future.result(20) for future in started]


def _sum_of(peers: list[PeerProcess]) -> tuple[float]:
    return (float(2 ** len(peers) - 1),)


def _work_on(peers: list[PeerProcess]) -> None:
    """The survivors' next operations, of the same tag and of another."""
    for tag in (0, 1):
        outcomes = _ends([peer.run_async(perform, Call(tag=tag, value=1)) for peer in peers])
        assert [outcome.results for outcome in outcomes] == [(len(peers),)] * len(peers), outcomes


@OVER_BOTH
def test_survivors_get_the_sum_of_the_survivors(crowd: Crowd, faults: Faults) -> None:
    peers = crowd(8)
    for count in COUNTS:
        for in_place in (False, True):
            victim = peers.pop(count % len(peers))
            started = _enter(peers, Call(count=count, in_place=in_place))
            faults.kill(victim)
            for outcome in _ends(started):
                assert outcome.results == _sum_of(peers) and outcome.untouched, outcome
                assert tuple(outcome.info.contributors) == tuple(peer.peer_id for peer in peers)
                assert outcome.info.world_size == len(peers)
            _work_on(peers)


@OVER_BOTH
def test_survivors_get_the_sum_of_the_survivors_if_it_is_quantised(crowd: Crowd, faults: Faults) -> None:
    peers = crowd(5)
    for count in COUNTS:
        victim = peers.pop()
        started = _enter(peers, Call(count=count, algorithm=QuantizationAlgorithm.MIN_MAX))
        faults.kill(victim)
        assert {outcome.results for outcome in _ends(started)} == {_sum_of(peers)}, "a block of equal values is exact"
    _work_on(peers)


@OVER_BOTH
@pytest.mark.parametrize("count", [10, 2_000_000])
def test_survivors_finish_what_does_not_depend_on_the_dead(crowd: Crowd, faults: Faults, count: int) -> None:
    peers = crowd(5)
    for kind in ("reduce", "broadcast", "barrier"):
        victim = peers.pop(0)
        started = _enter(peers, Call(kind=kind, count=count, root=1))
        faults.kill(victim)
        outcomes = _ends(started)
        assert not any(outcome.error for outcome in outcomes), outcomes
        results = [outcome.results for outcome in outcomes]
        others = len(peers) - 1
        wanted = {"reduce": [_sum_of(peers), *[()] * others], "broadcast": [(1.0,)] * (others + 1)}
        assert results == wanted.get(kind, [()] * (others + 1)), "the root is the same peer, though its rank changed"
        assert peers[0].rank == 0 and outcomes[0].info.world_size == len(peers)
        _work_on(peers)


@OVER_BOTH
@pytest.mark.parametrize("behind", [False, True])
def test_without_retry_all_survivors_learn_who_died_and_keep_their_input(
    crowd: Crowd, faults: Faults, behind: bool
) -> None:
    peers = crowd(8)
    for count in COUNTS:
        for in_place in (False, True):
            victim = peers.pop()
            started = _enter(peers, Call(count=count, retry=False, behind=behind, in_place=in_place))
            faults.kill(victim)
            _all_lost(_ends(started), victim)
            _work_on(peers)


def _all_lost(outcomes: list[Outcome], victim: PeerProcess) -> None:
    for outcome in outcomes:
        assert outcome.error == "PeerLostError" and tuple(outcome.details["peers"]) == (victim.peer_id,), outcome
        assert victim.peer_id in outcome.text and outcome.details["reason"]
        assert outcome.untouched


@OVER_BOTH
@pytest.mark.parametrize("count", [10, 500_000])
def test_what_follows_the_world_raises_on_all_survivors(crowd: Crowd, faults: Faults, count: int) -> None:
    peers = crowd(7)
    for kind in FOLLOW_WORLD:
        victim = peers.pop()
        started = _enter(peers, Call(kind=kind, count=count))
        faults.kill(victim)
        _all_lost(_ends(started), victim)
        _work_on(peers)


@OVER_BOTH
def test_what_needs_a_root_that_died_raises_on_all_survivors(crowd: Crowd, faults: Faults) -> None:
    peers = crowd(6)
    for kind in ("reduce", "broadcast"):
        for count in (10, 500_000):
            victim = peers.pop()
            started = _enter(peers, Call(kind=kind, count=count, root=len(peers)))
            faults.kill(victim)
            _all_lost(_ends(started), victim)
            _work_on(peers)


@OVER_BOTH
def test_one_that_enters_after_the_death_is_told_as_the_others_were(crowd: Crowd, faults: Faults) -> None:
    first, second, victim = crowd()
    started = _enter([first], Call(retry=False))
    faults.kill(victim)
    assert _ends(started)[0].error == "PeerLostError"
    late = second.run(perform, Call(retry=False))
    assert late.error == "PeerLostError" and victim.peer_id in late.text, "its number was consumed"
    _work_on([first, second])


@OVER_BOTH
def test_survivors_get_the_values_of_many_in_flight(crowd: Crowd, faults: Faults) -> None:
    *survivors, victim = crowd()
    calls = [Call(count=COUNTS[tag % 3] // 4, tag=tag, behind=bool(tag % 2)) for tag in range(12)]
    started = [future for call in calls for future in _enter(survivors, call)]
    faults.kill(victim)
    assert {outcome.results for outcome in _ends(started)} == {(3.0,)}
    _work_on(survivors)


@OVER_BOTH
def test_the_last_survivor_gets_its_own_values(crowd: Crowd, faults: Faults) -> None:
    survivor, *victims = crowd()
    started = _enter([survivor], Call(count=100_000))
    for victim in victims:
        faults.kill(victim)
    (outcome,) = _ends(started)
    assert outcome.results == (1.0,) and outcome.info.world_size == 1
    _work_on([survivor])


@OVER_BOTH
def test_a_group_that_falls_below_its_minimum_fails_what_is_in_flight(crowd: Crowd, faults: Faults) -> None:
    survivor, victim = crowd(2, min_world_size=2)
    started = _enter([survivor], Call()) + _enter([survivor], Call(tag=1, retry=False))
    faults.kill(victim)
    retried, once = _ends(started)
    assert retried.error == "TooFewPeersError" and retried.untouched, retried
    assert once.error in ("TooFewPeersError", "PeerLostError") and once.untouched, once


@OVER_BOTH
def test_the_next_calls_of_a_group_below_its_minimum_wait_for_newcomers(
    peer_group: PeerStarter, faults: Faults, transport: str
) -> None:
    group = peer_group(2, environment=on(transport), min_world_size=2)
    survivor, victim = group
    faults.kill(victim)
    survivor.wait_epoch(2)
    waiting = [survivor.run_async(perform, Call(tag=tag, value=1)) for tag in range(3)]
    (newcomer,) = group.add()
    newcomer.result_of(newcomer.joined, 20, "connect()")
    joined = [newcomer.run_async(perform, Call(tag=tag, value=2)) for tag in range(3)]
    assert {outcome.results for outcome in _ends(waiting + joined)} == {(3.0,)}


@OVER_BOTH
def test_operations_go_on_while_the_master_is_dead(crowd: Crowd, faults: Faults) -> None:
    peers = crowd()
    _work_on(peers)
    started = _enter(peers[:2], Call(count=2_000_000, tag=5))
    faults.kill_master(restart=False)
    started.append(peers[2].run_async(perform, Call(count=2_000_000, tag=5, value=4)))
    assert {outcome.results for outcome in _ends(started)} == {(7.0,)}
    for _ in range(5):
        _work_on(peers)
    faults.start_master()
    _work_on(peers)
    assert {peer.epoch for peer in peers} == {1}


@OVER_BOTH
def test_an_operation_that_loses_a_peer_waits_for_the_masters_return(crowd: Crowd, faults: Faults) -> None:
    *survivors, victim = crowd()
    started = _enter(survivors, Call(count=100_000))
    faults.kill_master(restart=False)
    faults.kill(victim)
    assert not any(future.done() for future in started)
    faults.start_master()
    assert {outcome.results for outcome in _ends(started)} == {(3.0,)}
    _work_on(survivors)
