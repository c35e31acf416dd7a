"""Rounds: Ask, Answer, Decide; evictions, broken links, leases, restarts (R1, R4, R5, R7)."""

from __future__ import annotations

from typing import Any

import pytest

from master_actor.core.actions import Append, Received, Send, SentinelGone, SentinelSaid
from master_actor.core.phases import Phase
from master_actor.core.records import GroupEmptied
from ray_pccl.control.messages import (
    Answer,
    Ask,
    Decide,
    Evicted,
    Farewell,
    Leave,
    LinkBroken,
    OperationReport,
    OperationState,
    Outcome,
    Poll,
    ProcessState,
    Registered,
    Seen,
    Verdict,
    VoteCount,
)
from tests.core.driven import (
    EXITING,
    SETTINGS,
    TOPOLOGY,
    DrivenMaster,
    asked,
    evicted,
    joining,
    new_epoch,
    of,
    registering,
)

NO_ANSWER = "it did not answer the master within 5 s"
CLOSED = "its connection to the master closed"


def _silent(master: DrivenMaster, *peers: str) -> None:
    """The peers go silent: no beat comes any more, and no sentinel says why."""
    master.beating -= set(peers)


# ------------------------------------------------------------------------------------------------- ask and decide


def test_a_death_is_asked_about_answered_and_decided() -> None:
    master = DrivenMaster().formed("a", "b", "c")
    assert master.dies("b") == [evicted("b", EXITING), *asked("a", "c")]
    assert master.answer("a") == []
    assert master.answer("c") == new_epoch(2, "a", "c", admitted_in=1, lost=(("b", EXITING),), limits=(3, None))
    assert master.group().phase is Phase.STEADY


def test_a_goodbye_is_a_death_with_its_own_reason() -> None:
    master = DrivenMaster().formed("a", "b")
    assert master.say("b", Leave()) == asked("a")
    assert master.answer("a") == new_epoch(2, "a", admitted_in=1, lost=(("b", "it left"),))


def test_a_closed_connection_is_a_death() -> None:
    master = DrivenMaster().formed("a", "b")
    assert master.hangs_up("b") == asked("a")
    assert master.answer("a") == new_epoch(2, "a", admitted_in=1, lost=(("b", CLOSED),))


def test_the_survivors_answers_become_one_outcome_an_operation() -> None:
    master = DrivenMaster().formed("a", "b", "c", max_world_size=3, min_world_size=2)
    master.dies("c")
    prepared = OperationReport(0, 4, OperationState.PREPARED, 1)
    running = OperationReport(1, 0, OperationState.RUNNING, 1)
    master.answer("a", 1, prepared, running)
    assert master.answer("b", 1, prepared) == new_epoch(
        2,
        "a",
        "b",
        admitted_in=1,
        lost=(("c", EXITING),),
        outcomes=(Outcome(0, 4, Verdict.COMMIT, 1), Outcome(1, 0, Verdict.ABORT, 1)),
        limits=(2, 3),
    )


def test_what_is_in_flight_below_the_minimum_fails_for_all() -> None:
    master = DrivenMaster().formed("a", "b")
    master.dies("b")
    (_, decision) = master.answer("a", 1, OperationReport(0, 4, OperationState.RUNNING, 1))
    (outcome,) = decision.message.outcomes
    assert (outcome.verdict, outcome.failure.error) == (Verdict.CONSUME, "TooFewPeersError")


def test_a_second_death_while_asking_shrinks_the_set_that_is_waited_for() -> None:
    master = DrivenMaster().formed("a", "b", "c", "d")
    master.dies("d")
    assert master.answer("a") == []
    assert master.dies("b") == [evicted("b", EXITING)]
    lost = (("d", EXITING), ("b", EXITING))
    assert master.answer("c") == new_epoch(2, "a", "c", admitted_in=1, lost=lost, limits=(4, None))


def test_the_death_of_the_last_one_waited_for_decides() -> None:
    master = DrivenMaster().formed("a", "b", "c")
    master.dies("c")
    master.answer("a")
    lost = (("c", EXITING), ("b", EXITING))
    expected = new_epoch(2, "a", admitted_in=1, lost=lost, limits=(3, None))
    assert master.dies("b") == [evicted("b", EXITING), *expected]


def test_a_death_of_one_that_has_answered_does_not_count_its_answer() -> None:
    master = DrivenMaster().formed("a", "b", "c")
    master.dies("c")
    master.answer("b", 1, OperationReport(0, 0, OperationState.RUNNING, 1))
    master.dies("b")
    lost = (("c", EXITING), ("b", EXITING))
    assert master.answer("a") == new_epoch(2, "a", admitted_in=1, lost=lost, limits=(3, None))


def test_who_does_not_answer_in_time_is_evicted() -> None:
    master = DrivenMaster().formed("a", "b", "c")
    master.at(1.0)
    master.dies("c")
    master.answer("a")
    assert master.at(5.9) == []
    lost = (("c", EXITING), ("b", NO_ANSWER))
    expected = new_epoch(2, "a", admitted_in=1, lost=lost, limits=(3, None))
    assert master.at(6.0) == [evicted("b", NO_ANSWER), *expected]


def test_a_late_answer_of_an_evicted_peer_changes_nothing() -> None:
    master = DrivenMaster().formed("a", "b", "c")
    master.dies("c")
    master.answer("a")
    master.at(5.0)
    assert master.answer("b") == []


@pytest.mark.parametrize("stale", [(1, 0), (1, 2), (0, 1), (2, 1)])
def test_an_answer_to_another_round_does_not_count(stale: tuple[int, int]) -> None:
    master = DrivenMaster().formed("a", "b")
    master.dies("b")
    assert master.say("a", Answer(stale, 1, ())) == []
    assert master.group().phase is Phase.ASKING


def test_an_answer_counts_once() -> None:
    master = DrivenMaster().formed("a", "b", "c")
    master.dies("c")
    assert master.answer("a") == [] == master.answer("a")
    assert len(master.answer("b")) == 3
    assert master.answer("b") == []


def test_rounds_are_numbered_through() -> None:
    master = DrivenMaster().formed("a", "b", "c")
    master.dies("c")
    master.answer("a")
    master.answer("b")
    assert master.dies("b") == [evicted("b", EXITING), *asked("a", number=2)]


def test_an_eviction_asked_for_from_outside_is_a_death() -> None:
    master = DrivenMaster().formed("a", "b")
    assert master.evict("b", "too slow") == [evicted("b", "too slow"), *asked("a")]


@pytest.mark.parametrize("stranger", ["nobody", "b"])
def test_losing_a_peer_that_is_not_there_does_nothing(stranger: str) -> None:
    master = DrivenMaster().formed("a", "b")
    master.dies("b")
    assert master.evict(stranger) == []


# ----------------------------------------------------------------------------------------------------------- links


def _relinked(master: DrivenMaster, *peers: str, number: int, epoch: int) -> list:
    """All peers answer the round."""
    actions: list = []
    for peer_id in peers:
        actions += master.answer(peer_id, number, epoch=epoch)
    return actions


def test_a_broken_link_is_a_round_with_the_same_members() -> None:
    master = DrivenMaster().formed("a", "b", "c", "d")
    assert master.say("a", LinkBroken(1, "b")) == asked("a", "b", "c", "d")
    expected = new_epoch(2, "a", "b", "c", "d", admitted_in=1, limits=(4, None))
    assert _relinked(master, "a", "b", "c", "d", number=1, epoch=1) == expected


def test_a_storm_of_reports_makes_one_round_and_one_break() -> None:
    master = DrivenMaster().formed("a", "b", "c", "d")
    assert master.say("a", LinkBroken(1, "b")) == asked("a", "b", "c", "d")
    for peer_id, other in (("b", "a"), ("a", "b"), ("c", "d"), ("d", "c"), ("a", "d")) * 20:
        assert master.say(peer_id, LinkBroken(1, other)) == []
    actions = _relinked(master, "a", "b", "c", "d", number=1, epoch=1)
    assert actions == new_epoch(2, "a", "b", "c", "d", admitted_in=1, limits=(4, None))
    for peer_id, other in (
        ("b", "a"),
        ("a", "b"),
        ("c", "d"),
    ) * 20:  # what each shut-down socket says about the old epoch
        assert master.say(peer_id, LinkBroken(1, other)) == []


@pytest.mark.parametrize(
    ("reporter", "epoch", "other"), [("a", 2, "b"), ("a", 0, "b"), ("a", 1, "a"), ("a", 1, "x"), ("x", 1, "a")]
)
def test_reports_about_other_epochs_or_about_no_member_are_ignored(reporter: str, epoch: int, other: str) -> None:
    master = DrivenMaster().formed("a", "b")
    master.join("x")
    assert master.say(reporter, LinkBroken(epoch, other)) == []


def test_an_edge_that_breaks_twice_is_avoided_where_a_ring_exists() -> None:
    master = DrivenMaster().formed("a", "b", "c", "d")
    for epoch in (1, 2):
        master.say("a", LinkBroken(epoch, "b"))
        actions = _relinked(master, "a", "b", "c", "d", number=epoch, epoch=epoch)
    order = [member.peer_id for member in actions[0].record.members]
    assert sorted(order) == ["a", "b", "c", "d"]
    neighbours = {frozenset((peer, order[(place + 1) % 4])) for place, peer in enumerate(order)}
    assert frozenset("ab") not in neighbours


def test_an_edge_without_which_there_is_no_ring_costs_one_end_at_its_second_break() -> None:
    master = DrivenMaster().formed("a", "b", "c")
    master.say("b", LinkBroken(1, "a"))
    _relinked(master, "a", "b", "c", number=1, epoch=1)
    assert master.say("a", LinkBroken(2, "b")) == asked("a", "b", "c", number=2)
    reason = "its link to peer a keeps breaking"
    assert _all_answer(master, "a", "b", "c", epoch=2)[0] == evicted("b", reason)
    assert [member.peer_id for member in master.group().durable.members] == ["a", "c"]


def test_a_link_that_breaks_because_its_other_end_dies_costs_nobody_else_the_place() -> None:
    master = DrivenMaster().formed("a", "b", "c")
    master.say("b", LinkBroken(1, "a"))
    _relinked(master, "a", "b", "c", number=1, epoch=1)
    master.say("a", LinkBroken(2, "b"))  # faster than the word that it is the other that dies
    master.answer("b", 2)
    master.dies("a")
    master.answer("c", 2)
    assert [member.peer_id for member in master.group().durable.members] == ["b", "c"]
    assert master.group()._links.count_of("b") == 0, "what broke with the dead says nothing of the living"


def _all_answer(master: DrivenMaster, *peers: str, epoch: int) -> list[Any]:
    """What the last answer of a round brings about."""
    return [master.answer(peer, epoch) for peer in peers][-1]


@pytest.mark.parametrize(("earlier", "later"), [("a", "b"), ("b", "c"), ("d", "e"), ("a", "e")])
def test_an_edge_that_breaks_three_times_costs_the_later_joiner(earlier: str, later: str) -> None:
    master = DrivenMaster().formed("a", "b", "c", "d", "e")
    for epoch in (1, 2):
        master.say(later, LinkBroken(epoch, earlier))
        _relinked(master, "a", "b", "c", "d", "e", number=epoch, epoch=epoch)
    master.say(earlier, LinkBroken(3, later))
    actions = [a for a in _all_answer(master, "a", "b", "c", "d", "e", epoch=3) if isinstance(a, Send)]
    assert [action.peer_id for action in actions if isinstance(action.message, Evicted)] == [later]


def test_the_end_with_more_broken_edges_goes_even_if_it_came_first() -> None:
    master = DrivenMaster().formed("a", "b", "c")
    for epoch, other in ((1, "c"), (2, "b")):
        master.say("a", LinkBroken(epoch, other))
        _relinked(master, "a", "b", "c", number=epoch, epoch=epoch)
    master.say("b", LinkBroken(3, "a"))
    assert _all_answer(master, "a", "b", "c", epoch=3)[0] == evicted("a", "its link to peer b keeps breaking")


def test_a_member_that_comes_back_with_a_broken_link_starts_a_round() -> None:
    master = DrivenMaster().formed("a", "b")
    assert master.say("a", registering("a", 1, "a", "b", broken_links=("b",)))[1:] == asked("a", "b")


# ---------------------------------------------------------------------------------------------------------- leases


def test_when_the_last_members_were_seen_to_die_those_who_wait_form_at_once() -> None:
    master = DrivenMaster().formed("a", "b")
    master.join("c")
    master.join("d")
    master.dies("a")
    assert master.dies("b") == [evicted("b", EXITING), Append(GroupEmptied("g"))]
    assert master.at(0.5) == new_epoch(2, "c", "d")


def _leased() -> DrivenMaster:
    """Both members went silent at 10; `c` and `d` wait."""
    master = DrivenMaster().formed("a", "b")
    master.at(10.0)
    master.join("c", timeout_s=1000.0)
    master.join("d", timeout_s=1000.0)
    master.evict("a", "silent")
    assert master.evict("b", "silent") == [evicted("b", "silent")]
    assert master.group().phase is Phase.LEASED
    return master


def test_when_the_last_members_went_silent_those_who_wait_must_wait_for_their_lease() -> None:
    master = _leased()
    assert master.at(69.9) == []
    assert master.at(70.0) == [Append(GroupEmptied("g"))]
    assert master.at(70.5) == new_epoch(2, "c", "d")


def test_a_certain_death_after_all_ends_the_lease() -> None:
    master = _leased()
    assert master.dies("a") == []
    assert master.dies("b") == [Append(GroupEmptied("g"))]


def test_a_farewell_of_any_member_ends_the_lease_of_all() -> None:
    master = _leased()
    assert master.say("b", Farewell()) == [Append(GroupEmptied("g"))]


def test_a_silent_member_that_comes_back_is_told_that_it_is_out_and_its_farewell_ends_the_lease() -> None:
    master = _leased()
    assert master.say("a", registering("a", 1, "a", "b")) == [evicted("a", "silent")]
    assert master.say("a", Farewell()) == [Append(GroupEmptied("g"))]


def test_the_farewell_of_a_stranger_ends_nothing() -> None:
    master = _leased()
    assert master.say("c", Farewell()) == []
    assert master.group().phase is Phase.LEASED


def test_a_member_that_answered_before_it_went_silent_had_frozen_and_leaves_no_lease() -> None:
    master = DrivenMaster().formed("a", "b", "c")
    master.evict("c", "silent")
    master.answer("a")
    master.evict("a", "silent")
    assert master.evict("b", "silent") == [evicted("b", "silent"), Append(GroupEmptied("g"))]


def test_a_lease_is_not_forgotten_by_a_restart() -> None:
    master = _leased().restarted()  # boots at 11
    master.join("c", timeout_s=1000.0)
    master.join("d", timeout_s=1000.0)
    assert master.at(13.9) == []
    assert [action.peer_id for action in master.at(14.0)] == ["a", "b"]  # told in vain that they are out
    assert master.group().phase is Phase.LEASED
    assert master.at(73.9) == []
    assert master.at(74.0) == [Append(GroupEmptied("g"))]


# --------------------------------------------------------------------------------------------------- passive peers


def test_a_passive_peer_is_asked_only_when_it_polls() -> None:
    master = DrivenMaster()
    master.join("a", min_world_size=3)
    master.join("b", min_world_size=3, passive_timeout_s=30.0)
    master.join("c", min_world_size=3)
    master.at(0.5)
    assert master.dies("c") == [evicted("c", EXITING), *asked("a")]
    master.answer("a")
    assert master.at(20.0) == []
    assert master.say("b", Poll()) == asked("b")
    assert master.say("b", Poll()) == []
    lost = (("c", EXITING),)
    assert master.answer("b") == new_epoch(2, "a", "b", admitted_in=1, lost=lost, limits=(3, None))


def test_a_passive_peer_hears_no_news() -> None:
    master = DrivenMaster()
    master.join("a")
    master.join("b", passive_timeout_s=30.0)
    master.at(0.5)
    assert [action.peer_id for action in master.join("c")] == ["a"]


def test_a_passive_peer_that_never_polls_is_evicted_after_its_own_timeout_too() -> None:
    master = DrivenMaster()
    master.join("a")
    master.join("b", passive_timeout_s=30.0)
    master.at(0.5)
    master.say("a", Leave())
    assert master.at(35.4) == []
    assert master.at(35.5)[0] == evicted("b", NO_ANSWER)


def test_a_poll_without_news_is_answered_by_nothing() -> None:
    assert DrivenMaster().formed("a", "b").say("a", Poll()) == []


# -------------------------------------------------------------------------------------------------------- restarts


def test_after_a_restart_the_epoch_stays_when_all_members_agree() -> None:
    master = DrivenMaster().formed("a", "b").restarted()
    assert master.group().phase is Phase.RETURNING
    votes = {"update_topology": VoteCount(1, True)}
    assert master.say("a", registering("a", 1, "a", "b")) == [Send("a", Registered(votes))]
    assert master.say("b", registering("b", 1, "a", "b")) == [Send("b", Registered(votes))]
    assert master.group().phase is Phase.STEADY
    assert master.at(100.0) == []


@pytest.mark.parametrize(
    "back",
    [
        registering("b", 1, "a", "b", frozen=True),
        registering("b", 0, "a", "b"),
        registering("b", 1, "b", "a"),
        registering("b", 1, "a", "b", broken_links=("a",)),
    ],
    ids=["frozen", "behind", "differs", "broken link"],
)
def test_after_a_restart_a_round_follows_if_any_member_is_frozen_behind_or_differs(back) -> None:
    master = DrivenMaster().formed("a", "b").restarted()
    master.say("a", registering("a", 1, "a", "b"))
    actions = master.say("b", back)
    assert [action for action in actions if isinstance(action.message, Ask)] == asked("a", "b", boot=2)
    master.answer("a")
    assert master.answer("b") == new_epoch(2, "a", "b", admitted_in=1)


def test_after_a_restart_who_does_not_come_back_within_the_grace_is_dead() -> None:
    master = DrivenMaster().formed("a", "b").restarted()
    master.say("a", registering("a", 1, "a", "b"))
    grace = master.now + SETTINGS.register_grace_s
    assert master.at(grace - 0.01) == []
    reason = "it did not come back within 3 s of the master's restart"
    assert master.at(grace) == [evicted("b", reason), *asked("a", boot=2)]
    assert master.answer("a") == new_epoch(2, "a", admitted_in=1, lost=(("b", reason),))


def test_after_a_restart_a_death_that_was_seen_needs_no_grace() -> None:
    master = DrivenMaster().formed("a", "b").restarted()
    master.say("a", registering("a", 1, "a", "b"))
    assert master.dies("b") == [evicted("b", EXITING), *asked("a", boot=2)]


def test_after_a_restart_with_all_members_seen_dead_the_group_is_empty() -> None:
    master = DrivenMaster().formed("a", "b").restarted()
    master.dies("a")
    assert master.dies("b") == [evicted("b", EXITING), Append(GroupEmptied("g"))]


def test_newcomers_wait_while_members_come_back() -> None:
    master = DrivenMaster().formed("a", "b").restarted()
    for peer_id in "cd":
        master.say(peer_id, joining(peer_id))
    assert master.group().phase is Phase.RETURNING
    assert len(master.group().room) == 2


def test_an_evicted_peer_that_registers_is_told_why_it_is_out() -> None:
    master = DrivenMaster().formed("a", "b")
    master.evict("b", "too slow")
    assert master.say("b", registering("b", 1, "a", "b")) == [evicted("b", "too slow")]
    master.answer("a")
    assert master.say("b", registering("b", 1, "a", "b")) == [evicted("b", "too slow")]
    (action,) = master.say("c", registering("c", 1, "a", "c"))  # nobody remembers this one
    assert action.peer_id == "c" and isinstance(action.message, Evicted) and "'g'" in action.message.reason


def test_a_peer_of_a_group_that_is_gone_is_told_that_it_is_out() -> None:
    (action,) = DrivenMaster().say("a", registering("a", 7, "a", "b"))
    assert isinstance(action.message, Evicted)


def test_a_member_that_reconnects_and_is_asked_is_asked_again() -> None:
    master = DrivenMaster().formed("a", "b", "c")
    master.dies("c")
    assert master.say("a", registering("a", 1, "a", "b", "c"))[1:] == asked("a")
    master.answer("a")
    assert [type(action.message) for action in master.say("a", registering("a", 1, "a", "b", "c", frozen=True))] == [
        Registered
    ]


def test_a_member_that_missed_the_decision_on_its_old_connection_gets_another_round() -> None:
    master = DrivenMaster().formed("a", "b", "c")
    master.dies("c")
    master.answer("a")
    master.answer("b")
    actions = master.say("b", registering("b", 1, "a", "b", "c", frozen=True))
    assert actions == [Send("b", Registered({})), *asked("a", "b", number=2)]


def test_what_a_master_decided_but_did_not_tell_is_caught_up_with() -> None:
    master = DrivenMaster().formed("a", "b", "c")
    master.dies("c")
    master.answer("a")
    master.answer("b")  # written down, then the master dies before it tells anyone
    again = master.restarted()
    again.say("a", registering("a", 1, "a", "b", "c", frozen=True))
    assert again.say("b", registering("b", 1, "a", "b", "c", frozen=True))[1:] == asked("a", "b", boot=2)
    again.answer("a")
    lost = (("c", "it was lost while the master restarted"),)
    assert again.answer("b") == new_epoch(3, "a", "b", admitted_in=1, lost=lost, limits=(3, None))


# ------------------------------------------------------------------------------------------- silence, end to end


def test_a_silent_host_is_dead_after_the_heartbeat_timeout_and_its_peers_may_still_run() -> None:
    master = DrivenMaster()
    master.join("a", host="h1")
    master.join("b", host="h2")
    for host, peer_id in (("h1", "a"), ("h2", "b")):
        master.handle(SentinelSaid(host, Seen(peer_id, ProcessState.RUNNING)))
    master.at(0.4)
    master.at(0.8)
    _silent(master, "b")
    for now in (1.2, 1.6):
        assert master.at(now) == []
        master.handle(SentinelSaid("h1", None))
    (told, ask) = master.at(1.8)
    assert told.peer_id == "b" and "h2" in told.message.reason
    assert ask == asked("a")[0]
    assert "b" in master.group().leases


def test_a_sentinel_that_goes_takes_nobody_with_it() -> None:
    master = DrivenMaster().formed("a", "b")
    master.handle(SentinelSaid("h", Seen("a", ProcessState.RUNNING)))
    assert master.handle(SentinelGone("h")) == []
    assert master.at(0.4) == []


def test_who_is_in_the_epoch_before_is_told_only_what_changed_and_who_is_not_everything() -> None:
    master = DrivenMaster().formed("a", "b", "c")
    master.join("d", min_world_size=3)
    for peer_id in "abc":
        master.vote(peer_id, TOPOLOGY, 1)
    master.answer("a")
    master.answer("b")
    told = {
        action.peer_id: action.message
        for action in master.master.handle(Received("c", Answer((1, 1), 1, ())), master.now)
        if isinstance(action, Send) and isinstance(action.message, Decide)
    }
    assert {peer_id: (decide.base, decide.members, decide.removed) for peer_id, decide in told.items()} == {
        **dict.fromkeys("abc", (1, of("d"), ())),
        "d": (0, of("a", "b", "c", "d"), ()),
    }


def test_a_member_that_is_behind_is_told_everything() -> None:
    master = DrivenMaster().formed("a", "b", "c")
    master.dies("c")
    master.answer("a", epoch=0)
    told = {
        action.peer_id: action.message
        for action in master.master.handle(Received("b", Answer((1, 1), 1, ())), master.now)
        if isinstance(action, Send) and isinstance(action.message, Decide)
    }
    assert (told["a"].base, told["a"].members, told["a"].removed) == (0, of("a", "b"), ())
    assert (told["b"].base, told["b"].members, told["b"].removed) == (1, (), ("c",))
