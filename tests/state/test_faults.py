"""Peers and masters die in a sync, at its worst moments: the right state on all survivors, or theirs as it was."""

from __future__ import annotations

import pytest

from ray_pccl.testing import Faults, PeerProcess, eventually
from tests.state.conftest import OVER_BOTH, PATIENCE_S, Crew, agree, all_failed, all_sync, give, start_sync
from tests.state.programs import MIB, Content, Outcome, hold, interrupted, strike, sync, sync_unreadable, values

BIG = 64 * MIB


def _old_and_new(crew, sources: int, receivers: int = 1) -> tuple[list[PeerProcess], list[PeerProcess], str]:
    """Members that hold a large state, newcomers that hold another one, and the digest that all are to hold."""
    group: Crew = crew(sources)
    digest, *_ = give(group.peers, [Content(seed=1, nbytes=BIG)] * sources)
    agree(all_sync(group.peers))
    group.admit(receivers)
    give(group.peers[sources:], [Content(seed=2, nbytes=BIG)] * receivers)
    return group.peers[:sources], group.peers[sources:], digest


def _sync(old: list[PeerProcess], new: list[PeerProcess], victim: PeerProcess) -> list[Outcome]:
    """All synchronise; what came of it for all but the victim."""
    peers = [*old, *new]
    started = [peer.run_async(sync, "ENFORCE_POPULAR", 1 if peer in old else 0) for peer in peers]
    return [future.result(PATIENCE_S) for peer, future in zip(peers, started, strict=True) if peer is not victim]


def _goes_on(peers: list[PeerProcess]) -> None:
    """The next sync of those who are left moves nothing."""
    outcomes = all_sync(peers, step=1)
    agree(outcomes)
    assert [outcome.info.rx_bytes for outcome in outcomes] == [0] * len(peers)


@OVER_BOTH
@pytest.mark.parametrize("nth", [1, 2])
def test_the_rest_of_a_dead_sources_pieces_comes_from_another(crew, transport, nth) -> None:
    (first, victim), (newcomer,), digest = _old_and_new(crew, 2)
    victim.run(strike, "state_sending", nth, "kill")
    outcomes = _sync([first, victim], [newcomer], victim)
    assert not victim.alive, "it has not come to the point where it was to die"
    assert agree(outcomes) == digest
    assert outcomes[1].info.rx_bytes == BIG + 56
    _goes_on([first, newcomer])


@OVER_BOTH
def test_when_the_last_that_held_it_dies_all_keep_their_states_and_can_begin_anew(crew, transport) -> None:
    (victim,), newcomers, _ = _old_and_new(crew, 1, receivers=2)
    victim.run(strike, "state_sending", 2, "kill")
    outcomes = _sync([victim], newcomers, victim)
    all_failed(outcomes, "NoUpToDatePeerError")
    assert all(victim.peer_id in outcome.text for outcome in outcomes)
    fresh = [peer.run(hold, Content(seed=3 + place, revision=700)) for place, peer in enumerate(newcomers)]
    assert agree(all_sync(newcomers)) == fresh[0], "a first sync: any revision; of a tie, the lowest rank"
    _goes_on(newcomers)


@OVER_BOTH
def test_what_may_differ_comes_from_one_source_whole_and_if_that_dies_from_the_next(crew, transport) -> None:
    group: Crew = crew(3)
    contents = [Content(seed=1, loose=loose, loose_bytes=BIG) for loose in (10.0, 20.0, 20.0)]
    give(group.peers, contents)
    assert [outcome.info.rx_bytes for outcome in all_sync(group.peers)] == [0, 0, 0]
    (newcomer,) = group.admit()
    newcomer.run(hold, Content(seed=1, loose=30.0, loose_bytes=BIG))
    victim, second, third = old = group.peers[:3]
    victim.run(strike, "state_sending", 3, "kill")
    outcomes = _sync(old, [newcomer], victim)
    assert not victim.alive and [outcome.error for outcome in outcomes] == [""] * 3
    assert [peer.run(values, "own") for peer in (second, third, newcomer)] == [[20.0]] * 3
    assert outcomes[2].info.updated == ("own",) and outcomes[2].info.rx_bytes >= BIG
    _goes_on([second, third, newcomer])


@OVER_BOTH
@pytest.mark.parametrize("point", ["state_arrived", "state_committing"])
def test_a_receiver_that_dies_disturbs_nobody(crew, transport, point) -> None:
    old, (victim, other), digest = _old_and_new(crew, 2, receivers=2)
    victim.run(strike, point, 1, "kill")
    outcomes = _sync(old, [victim, other], victim)
    eventually(lambda: not victim.alive, 10, "the receiver is dead")
    assert agree(outcomes) == digest
    _goes_on([*old, other])


@pytest.mark.parametrize("nth", [1, 2])
def test_who_dies_in_a_round_is_in_the_next_one_no_more(crew, nth) -> None:
    (first, victim), (newcomer,), digest = _old_and_new(crew, 2)
    victim.run(strike, "state_round", nth, "kill")
    assert agree(_sync([first, victim], [newcomer], victim)) == digest
    _goes_on([first, newcomer])


@pytest.mark.slow
@OVER_BOTH
def test_a_source_that_freezes_holds_up_nobody_for_longer_than_it_takes_to_evict_it(crew, transport, faults) -> None:
    (first, victim), (newcomer,), digest = _old_and_new(crew, 2)
    victim.run(strike, "state_sending", 2, "stop")
    outcomes = _sync([first, victim], [newcomer], victim)
    assert agree(outcomes) == digest
    assert max(outcome.seconds for outcome in outcomes) < 15
    _goes_on([first, newcomer])
    faults.resume(victim)
    eventually(lambda: victim.alive, 1, "it lives, and is a member no more")


@OVER_BOTH
def test_a_sync_needs_no_master(crew, transport, faults: Faults) -> None:
    old, new, digest = _old_and_new(crew, 2)
    faults.kill_master(restart=False)
    outcomes = _sync(old, new, None)
    assert agree(outcomes) == digest
    _goes_on([*old, *new])
    faults.start_master()
    _goes_on([*old, *new])
    assert {peer.epoch for peer in [*old, *new]} == {2}


def test_a_source_and_the_master_die_and_the_sync_ends_when_the_master_is_back(crew, faults: Faults) -> None:
    (first, victim), (newcomer,), digest = _old_and_new(crew, 2)
    victim.run(strike, "state_sending", 2, "kill")
    faults.kill_master(restart=False)
    started = start_sync([first, victim], step=1) + start_sync([newcomer])
    eventually(lambda: not victim.alive, 10, "the source is dead")
    faults.start_master()
    assert agree([started[0].result(PATIENCE_S), started[2].result(PATIENCE_S)]) == digest


@OVER_BOTH
def test_a_state_that_is_changed_while_it_is_sent_is_an_error_on_all(crew, transport) -> None:
    (source,), (newcomer,), _ = _old_and_new(crew, 1)
    source.run(strike, "state_sending", 2, "change")
    cheat, honest = _sync([source], [newcomer], None)
    assert [cheat.error, honest.error] == ["SharedStateMismatchError"] * 2
    assert honest.after == honest.before and honest.details["tensor"] == "weights"
    assert source.peer_id in honest.text and newcomer.peer_id in honest.text


@OVER_BOTH
def test_of_two_sources_the_one_that_tells_the_truth_is_enough(crew, transport) -> None:
    (first, liar), (newcomer,), digest = _old_and_new(crew, 2)
    liar.run(strike, "state_sending", 2, "change")
    outcomes = _sync([first, liar], [newcomer], None)
    assert [outcome.error for outcome in outcomes] == [""] * 3
    assert outcomes[0].after == outcomes[2].after == digest


@pytest.mark.parametrize("nth", [1, 2])
def test_who_is_interrupted_takes_nobody_with_it_into_a_long_wait(crew, nth) -> None:
    old, (newcomer,), _ = _old_and_new(crew, 2)
    newcomer.run(strike, "state_round", nth, "interrupt")
    started = [peer.run_async(sync, "ENFORCE_POPULAR", 1) for peer in old]
    assert newcomer.run(interrupted) == "KeyboardInterrupt"
    outcomes = [future.result(PATIENCE_S) for future in started]
    all_failed(outcomes, "PCCLError")
    assert all(newcomer.peer_id in outcome.text and outcome.seconds < 10 for outcome in outcomes)
    newcomer.run(strike, "nowhere", 1, "")
    agree(all_sync([*old, newcomer]))


def test_a_group_that_falls_below_its_minimum_waits_for_newcomers_and_heals_them_in_the_same_sync(crew) -> None:
    group: Crew = crew(2, min_world_size=2)
    survivor, victim = group.peers
    digest, _ = give(group.peers, [Content(seed=1, nbytes=BIG), Content(seed=2, nbytes=BIG)])
    victim.run(strike, "state_arrived", 2, "kill")
    waiting = survivor.run_async(sync, "ENFORCE_POPULAR", 5)
    victim.run_async(sync)
    eventually(lambda: not victim.alive, 10, "the receiver is dead")
    (newcomer,) = group._group.add()
    newcomer.joined.result(PATIENCE_S)
    newcomer.run(hold, Content(seed=3, nbytes=BIG))
    outcomes = [newcomer.run(sync), waiting.result(PATIENCE_S)]
    assert agree(outcomes) == digest and outcomes[0].revision == 5
    _goes_on([survivor, newcomer])


def test_a_member_that_can_not_read_its_state_keeps_nobody_waiting(crew) -> None:
    peers = crew(3).peers
    give(peers, [Content(seed=1)] * 3)
    agree(all_sync(peers))

    programs = [sync_unreadable, sync, sync]
    started = [peer.run_async(run, "ENFORCE_POPULAR", 1) for peer, run in zip(peers, programs, strict=True)]
    mine, *others = [future.result(PATIENCE_S) for future in started]

    assert mine.error == "MemoryError"
    assert all(outcome.error == "PCCLError" and peers[0].peer_id in outcome.text for outcome in others), others
    assert all(outcome.seconds < 5 for outcome in others), "they have not waited for a timeout"
    agree(all_sync(peers))
