"""Peers that hold different states come to hold the same: which one, and at what cost."""

from __future__ import annotations

import numpy as np

from ray_pccl.state.pieces import PIECE_BYTES
from tests.state.conftest import OVER_BOTH, Crew, agree, all_failed, all_sync, give
from tests.state.programs import MIB, Content, hold, misuse, sync, sync_and_change, sync_twice_at_once, touch, value

SEND, RECEIVE, POPULAR = "SEND_ONLY", "RECEIVE_ONLY", "ENFORCE_POPULAR"


@OVER_BOTH
def test_what_most_hold_wins_and_only_the_other_receives(crew, transport) -> None:
    peers = crew().peers
    digests = give(peers, [Content(seed=9), Content(seed=1), Content(seed=1)])
    other, *those = all_sync(peers)
    assert agree([other, *those]) == digests[1]
    assert other.info.rx_bytes == MIB + 7 * 8 and other.info.tx_bytes == 0
    assert other.info.updated == ("bias", "weights")
    assert sum(outcome.info.tx_bytes for outcome in those) == other.info.rx_bytes
    assert all(outcome.info.rx_bytes == 0 and outcome.info.updated == () for outcome in those)
    steady = all_sync(peers, step=1)
    assert agree(steady) == digests[1]
    assert [(o.info.rx_bytes, o.info.tx_bytes, o.info.revision) for o in steady] == [(0, 0, 1)] * 3


@OVER_BOTH
def test_a_newcomer_is_healed_and_never_wins_not_even_as_one_of_two(crew, transport) -> None:
    group: Crew = crew(1)
    give(group.peers, [Content(seed=1, revision=41)])
    agree(all_sync(group.peers))
    (newcomer,) = group.admit()
    newcomer.run(hold, Content(seed=2, revision=42))
    started = [group.peers[0].run_async(sync, POPULAR, 1), newcomer.run_async(sync)]
    old, new = [future.result(30) for future in started]
    agree([old, new])
    assert old.info.rx_bytes == 0 and old.after == old.before, "though both offer the revision that is due"
    assert new.info.updated == ("bias", "weights")


def test_the_revision_of_a_first_sync_begins_anywhere_and_then_grows_by_one(crew) -> None:
    peers = crew(2).peers
    digests = give(peers, [Content(seed=1, revision=5), Content(seed=2, revision=1000)])
    outcomes = all_sync(peers)
    assert agree(outcomes) == digests[1], "the highest revision of a first sync is what the others are brought up to"
    assert [outcome.info.revision for outcome in outcomes] == [1000, 1000]
    agree(all_sync(peers, step=1))
    again = all_sync(peers, step=0)
    all_failed(again, "RevisionError")
    assert all(o.details["expected"] == 1002 and set(o.details["offered"].values()) == {1001} for o in again)
    agree(all_sync(peers, step=1))


def test_a_peer_ahead_gets_an_error_the_others_go_on_and_heal_it_next_time(crew) -> None:
    first, second, third = peers = crew().peers
    give(peers, [Content(seed=1)] * 3)
    agree(all_sync(peers))
    third.run(touch, "weights", 3, 99.0)
    started = [first.run_async(sync, POPULAR, 1), second.run_async(sync, POPULAR, 1), third.run_async(sync, POPULAR, 7)]
    *those, ahead = [future.result(30) for future in started]
    agree(those)
    all_failed([ahead], "RevisionError")
    assert ahead.details["expected"] == 1 and ahead.details["offered"][third.peer_id] == 7
    assert third.peer_id in ahead.text
    started = [
        first.run_async(sync, POPULAR, 1),
        second.run_async(sync, POPULAR, 1),
        third.run_async(sync, POPULAR, -6),
    ]
    healed = [future.result(30) for future in started]
    agree(healed)
    assert healed[2].info.updated == ("weights",), "only the tensor that differs"


@OVER_BOTH
def test_only_the_pieces_that_differ_move(crew, transport) -> None:
    peers = crew().peers
    give(peers, [Content(nbytes=3 * PIECE_BYTES + 4096)] * 3)
    agree(all_sync(peers))
    peers[1].run(touch, "weights", PIECE_BYTES // 4 + 5, 1e9)
    outcomes = all_sync(peers, step=1)
    agree(outcomes)
    assert [outcome.info.rx_bytes for outcome in outcomes] == [0, PIECE_BYTES, 0]


def test_of_two_contents_that_as_many_hold_that_of_the_longest_standing_member_wins(crew) -> None:
    group = crew(2)
    give(group.peers, [Content(seed=1)] * 2)
    agree(all_sync(group.peers))
    group.admit(2)
    give(group.peers[2:], [Content(seed=3)] * 2)
    started = [peer.run_async(sync, POPULAR, 1) for peer in group.peers[:2]]
    started += [peer.run_async(sync, POPULAR, 0) for peer in group.peers[2:]]
    agree([future.result(30) for future in started])
    for peer in group.peers[2:]:
        peer.run(touch, "bias", 0, -5.0)
    assert agree(all_sync(group.peers, step=1))
    assert [peer.run(value, "bias") for peer in group.peers] == [1.0] * 4


def test_another_set_of_tensors_is_an_error_on_all_that_names_tensor_and_peers(crew) -> None:
    peers = crew().peers
    cases = {
        "extra": ({"extra": np.zeros(3)}, "no such tensor"),
        "kind": ({"kind": np.zeros(3, np.int32)}, "int32[3]"),
        "shape": ({"shape": np.zeros((1, 3))}, "float64[1, 3]"),
    }
    for name, (more, text) in cases.items():
        usual = {} if name == "extra" else {name: np.zeros(3)}
        give(peers, [Content(more=usual), Content(more=usual), Content(more=more)])
        outcomes = all_sync(peers)
        all_failed(outcomes, "SharedStateMismatchError")
        for outcome in outcomes:
            assert outcome.details["tensor"] == name and text in outcome.text
            assert all(peer.peer_id in outcome.text for peer in peers)
    give(peers, [Content(seed=1), Content(seed=1), Content(seed=1, loose=1.0)])
    all_failed(all_sync(peers), "SharedStateMismatchError")
    give(peers, [Content(seed=1)] * 3)
    agree(all_sync(peers))
    assert {peer.epoch for peer in peers} == {1}, "nobody was thrown out for a mistake"


def test_what_may_differ_stays_everyones_own_except_a_newcomers(crew) -> None:
    group = crew(2)
    give(group.peers, [Content(seed=1, loose=10.0), Content(seed=1, loose=20.0)])
    assert [outcome.info.rx_bytes for outcome in all_sync(group.peers)] == [0, 0]
    assert [peer.run(value, "own") for peer in group.peers] == [10.0, 20.0]
    group.admit()
    group.peers[2].run(hold, Content(seed=1, loose=30.0))
    started = [peer.run_async(sync, POPULAR, 1) for peer in group.peers[:2]] + [group.peers[2].run_async(sync)]
    outcomes = [future.result(30) for future in started]
    assert [outcome.info.rx_bytes for outcome in outcomes] == [0, 0, 400]
    assert outcomes[2].info.updated == ("own",)
    assert [peer.run(value, "own") for peer in group.peers] == [10.0, 20.0, 10.0]


def test_who_only_sends_decides_and_who_only_receives_does_not_count(crew) -> None:
    peers = crew().peers
    digests = give(peers, [Content(seed=1), Content(seed=2), Content(seed=2)])
    outcomes = all_sync(peers, [SEND, RECEIVE, RECEIVE])
    assert agree(outcomes) == digests[0]
    assert outcomes[0].info.rx_bytes == 0 and outcomes[1].info.tx_bytes == outcomes[2].info.tx_bytes == 0


def test_strategies_that_contradict_one_another_are_an_error_on_all(crew) -> None:
    peers = crew().peers
    give(peers, [Content(seed=1), Content(seed=2), Content(seed=2)])
    for strategies in ([SEND, SEND, RECEIVE], [POPULAR, RECEIVE, RECEIVE], [POPULAR, POPULAR, SEND]):
        outcomes = all_sync(peers, strategies)
        all_failed(outcomes, "SharedStateMismatchError")
        assert all(peers[0].peer_id in outcome.text for outcome in outcomes)
    all_failed(all_sync(peers, [RECEIVE] * 3), "NoUpToDatePeerError")
    agree(all_sync(peers))
    peers[0].run(touch, "bias", 1, 6.0)
    started = [peers[0].run_async(sync, SEND, 0), *(peer.run_async(sync, RECEIVE, 1) for peer in peers[1:])]
    all_failed([future.result(30) for future in started], "RevisionError")
    started = [peers[0].run_async(sync, SEND, 1), *(peer.run_async(sync, RECEIVE, 0) for peer in peers[1:])]
    agree([future.result(30) for future in started])


@OVER_BOTH
def test_many_newcomers_are_healed_by_many_sources_at_once(crew, transport) -> None:
    group = crew(3)
    (digest, *_) = give(group.peers, [Content(seed=1, nbytes=64 * MIB)] * 3)
    agree(all_sync(group.peers))
    group.admit(2)
    give(group.peers[3:], [Content(seed=5, nbytes=64 * MIB)] * 2)
    started = [peer.run_async(sync, POPULAR, 1) for peer in group.peers[:3]]
    started += [peer.run_async(sync) for peer in group.peers[3:]]
    outcomes = [future.result(30) for future in started]
    assert agree(outcomes) == digest
    assert [o.info.rx_bytes for o in outcomes] == [0, 0, 0, 64 * MIB + 56, 64 * MIB + 56]
    assert all(outcome.info.tx_bytes > 0 for outcome in outcomes[:3]), "all who hold it take part"


def test_a_group_of_one_and_a_state_of_nothing_agree_with_themselves(crew) -> None:
    (peer,) = crew(1).peers
    peer.run(hold, Content(revision=3))
    assert peer.run(sync).info.revision == 3
    assert peer.run(sync).error == "RevisionError"
    assert peer.run(sync, POPULAR, 1).info.revision == 4


@OVER_BOTH
def test_a_source_may_change_its_tensors_as_soon_as_its_call_has_returned(crew, transport) -> None:
    group = crew(2)
    digest, _ = give(group.peers, [Content(seed=1, nbytes=40 * MIB)] * 2)
    agree(all_sync(group.peers))
    (newcomer,) = group.admit()
    newcomer.run(hold, Content(seed=2, nbytes=40 * MIB))
    started = [peer.run_async(sync_and_change, 1) for peer in group.peers[:2]]
    assert newcomer.run(sync).after == digest
    assert [future.result(30).after for future in started] == [digest] * 2


def test_who_never_comes_is_named_when_patience_ends_and_nothing_has_changed(crew) -> None:
    peers = crew(2).peers
    give(peers, [Content(seed=1), Content(seed=2)])
    outcome = peers[0].run(sync, POPULAR, 0, 0.5)
    all_failed([outcome], "OperationTimeoutError")
    assert peers[1].peer_id in outcome.text
    assert peers[1].run(sync).error == "OperationTimeoutError", "its call would have been the same one"
    agree(all_sync(peers))


def test_calls_that_make_no_sense_are_refused_at_once(crew) -> None:
    (peer,) = crew(1).peers
    peer.run(hold, Content())
    assert "already" in peer.run(sync_twice_at_once)
    assert peer.run(misuse) == ["UsageError"] * 3
