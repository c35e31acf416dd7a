"""The calls in which all members meet: they are numbered, survive, time out by name, and admit (R10, R12)."""

from __future__ import annotations

from master_actor.core.actions import Append, Send
from master_actor.core.phases import Phase
from master_actor.core.records import VoteCounted
from ray_pccl.control.messages import (
    Failure,
    LinkBroken,
    OpenVote,
    OperationReport,
    OperationState,
    Registered,
    VoteCount,
    VoteFailed,
    VoteKind,
    VoteServed,
    Withdraw,
)
from tests.core.driven import (
    EXITING,
    MINIMUM,
    PENDING,
    TOPOLOGY,
    DrivenMaster,
    asked,
    evicted,
    new_epoch,
    registering,
)


def _served(kind: VoteKind, served: int, value: bool, *peers: str) -> list:
    count = VoteCount(served, value)
    return [Append(VoteCounted("g", kind, count)), *(Send(peer_id, VoteServed(kind, count)) for peer_id in peers)]


def _failure(actions: list, kind: VoteKind, *peers: str) -> Failure:
    """The failure that exactly these peers got."""
    assert [action.peer_id for action in actions] == list(peers)
    assert {action.message.kind for action in actions if isinstance(action.message, VoteFailed)} == {kind}
    (failure,) = {action.message.failure.text: action.message.failure for action in actions}.values()
    return failure


def test_with_nobody_waiting_a_vote_of_all_is_served_and_nothing_changes() -> None:
    master = DrivenMaster().formed("a", "b")
    assert master.vote("a", TOPOLOGY, 1) == []
    assert master.vote("b", TOPOLOGY, 1) == _served(TOPOLOGY, 2, False, "a", "b")
    assert master.group().durable.epoch == 1


def test_all_members_get_the_same_answer_to_whether_peers_are_pending() -> None:
    master = DrivenMaster().formed("a", "b")
    master.vote("a", PENDING, 0)
    assert master.vote("b", PENDING, 0) == _served(PENDING, 1, False, "a", "b")
    master.join("c")
    master.vote("b", PENDING, 1)
    assert master.vote("a", PENDING, 1) == _served(PENDING, 2, True, "b", "a")


def test_a_vote_that_was_served_is_answered_with_the_same_answer_again() -> None:
    master = DrivenMaster().formed("a", "b")
    master.vote("a", PENDING, 0)
    master.vote("b", PENDING, 0)
    master.join("c")  # the answer would be another one now
    assert master.vote("b", PENDING, 0) == [Send("b", VoteServed(PENDING, VoteCount(1, False)))]


def test_a_served_vote_is_repeated_to_a_member_that_comes_back_after_a_restart() -> None:
    master = DrivenMaster().formed("a", "b")
    master.vote("a", PENDING, 0)
    master.vote("b", PENDING, 0)  # served and written down; only `a` is told before the master dies
    again = master.restarted()
    again.say("a", registering("a", 1, "a", "b"))
    open_vote = OpenVote(PENDING, 0, 50.0)
    votes = {"update_topology": VoteCount(1, True), "are_peers_pending": VoteCount(1, False)}
    assert again.say("b", registering("b", 1, "a", "b", votes=(open_vote,))) == [Send("b", Registered(votes))]
    # It is settled: `b` is not in the call any more.
    assert again.vote("a", PENDING, 1) == []


def test_open_votes_are_counted_again_after_a_restart() -> None:
    master = DrivenMaster().formed("a", "b")
    master.vote("a", TOPOLOGY, 1)
    again = master.restarted()
    again.say("a", registering("a", 1, "a", "b", votes=(OpenVote(TOPOLOGY, 1, 50.0),)))
    again.say("b", registering("b", 1, "a", "b"))
    assert again.vote("b", TOPOLOGY, 1) == _served(TOPOLOGY, 2, False, "a", "b")


def test_a_member_that_comes_back_without_its_vote_has_given_it_up() -> None:
    # Its `Withdraw` was lost with the old connection; `Register` says what is open now.
    master = DrivenMaster().formed("a", "b")
    master.vote("a", TOPOLOGY, 1)
    master.say("a", registering("a", 1, "a", "b"))
    assert master.vote("b", TOPOLOGY, 1) == []


def test_votes_survive_a_recovery() -> None:
    master = DrivenMaster().formed("a", "b", "c")
    master.join("d", min_world_size=3)
    master.vote("a", TOPOLOGY, 1)
    master.dies("c")
    master.answer("a")
    lost = (("c", EXITING),)
    recovered = new_epoch(2, "a", "b", admitted_in=1, lost=lost, limits=(3, None))
    assert master.answer("b") == recovered
    assert master.vote("b", TOPOLOGY, 1) == asked("a", "b", number=2)
    master.answer("a", 2)
    assert master.answer("b", 2) == new_epoch(3, "a", "b", "d", topology=2, limits=(3, None))


def test_a_death_during_an_admission_admits_nobody_until_the_survivors_are_asked_again() -> None:
    master = DrivenMaster().formed("a", "b", "c")
    master.join("d", min_world_size=3)
    for peer_id in "abc":
        master.vote(peer_id, TOPOLOGY, 1)
    assert master.dies("c") == [evicted("c", EXITING)]
    master.answer("a")
    recovered = new_epoch(2, "a", "b", admitted_in=1, lost=(("c", EXITING),), limits=(3, None))
    assert master.answer("b") == [*recovered, *asked("a", "b", number=2)]
    master.answer("a", 2, epoch=2)
    assert master.answer("b", 2, epoch=2) == new_epoch(3, "a", "b", "d", topology=2, limits=(3, None))


def test_the_death_of_the_only_one_who_had_not_voted_serves_the_vote() -> None:
    master = DrivenMaster().formed("a", "b")
    master.vote("a", TOPOLOGY, 1)
    master.dies("b")
    recovered = new_epoch(2, "a", admitted_in=1, lost=(("b", EXITING),))
    assert master.answer("a") == [*recovered, *_served(TOPOLOGY, 2, False, "a")]


def test_votes_are_not_counted_while_a_round_is_under_way() -> None:
    master = DrivenMaster().formed("a", "b")
    master.say("a", LinkBroken(1, "b"))
    assert master.vote("a", PENDING, 0) == [] == master.vote("b", PENDING, 0)
    master.answer("a")
    actions = master.answer("b")
    assert actions[-3:] == _served(PENDING, 1, False, "a", "b")


def test_members_stuck_in_different_calls_are_told_who_is_in_which() -> None:
    master = DrivenMaster().formed("a", "b", "c")
    master.vote("a", TOPOLOGY, 1, timeout_s=7.0)
    master.vote("b", PENDING, 0, timeout_s=9.0)
    assert master.at(6.9) == []
    failure = _failure(master.at(7.0), TOPOLOGY, "a")
    assert failure.error == "OperationTimeoutError"
    assert failure.details["calls"] == {
        "a": "update_topology",
        "b": "are_peers_pending",
        "c": "no call known to the master",
    }
    assert all(part in failure.text for part in ("a (rank 0): update_topology", "b (rank 1): are_peers_pending", "'g'"))
    assert _failure(master.at(9.0), PENDING, "b").error == "OperationTimeoutError"


def test_one_who_runs_out_of_time_ends_the_call_for_all_who_are_in_it() -> None:
    master = DrivenMaster().formed("a", "b", "c")
    master.vote("a", TOPOLOGY, 1, timeout_s=7.0)
    master.vote("b", TOPOLOGY, 1, timeout_s=50.0)
    assert _failure(master.at(7.0), TOPOLOGY, "a", "b").error == "OperationTimeoutError"
    assert master.vote("c", TOPOLOGY, 1) == []  # nobody is in the call any more


def test_the_deadline_of_a_dead_voter_is_nobody_elses() -> None:
    master = DrivenMaster().formed("a", "b", "c")
    master.vote("c", TOPOLOGY, 1, timeout_s=1.0)
    master.vote("a", TOPOLOGY, 1, timeout_s=100.0)
    master.dies("c")
    master.answer("a")
    master.answer("b")
    assert master.at(2.0) == []
    assert master.vote("b", TOPOLOGY, 1) == _served(TOPOLOGY, 2, False, "a", "b")


def test_a_stuck_vote_evicts_nobody_and_may_be_cast_again() -> None:
    master = DrivenMaster().formed("a", "b")
    master.vote("a", TOPOLOGY, 1, timeout_s=7.0)
    master.at(7.0)
    master.vote("a", TOPOLOGY, 1)
    assert master.vote("b", TOPOLOGY, 1) == _served(TOPOLOGY, 2, False, "a", "b")


def test_a_vote_that_was_withdrawn_does_not_count() -> None:
    master = DrivenMaster().formed("a", "b")
    master.vote("a", TOPOLOGY, 1)
    assert master.say("a", Withdraw(TOPOLOGY)) == []
    assert master.vote("b", TOPOLOGY, 1) == []


def test_who_waits_or_was_evicted_has_no_vote() -> None:
    master = DrivenMaster().formed("a", "b")
    master.join("c")
    master.evict("b")
    for stranger in ("c", "b"):
        (action,) = master.vote(stranger, TOPOLOGY, 1)
        assert action.peer_id == stranger and action.message.failure.error == "NotAMemberError"


def _below_minimum() -> DrivenMaster:
    """A group of two that has lost one."""
    master = DrivenMaster().formed("a", "b", "c")
    master.dies("c")
    master.answer("a")
    master.answer("b")
    return master


def test_a_group_below_its_minimum_admits_newcomers_as_soon_as_they_are_enough() -> None:
    master = _below_minimum()
    assert master.vote("a", MINIMUM, 0) == [] == master.vote("b", MINIMUM, 0)
    actions = master.join("d", min_world_size=3)
    assert actions[-2:] == asked("a", "b", number=2)
    master.answer("a", 2, epoch=2)
    assert master.answer("b", 2, epoch=2) == new_epoch(3, "a", "b", "d", topology=2, limits=(3, None))
    assert master.at(500.0) == []  # the wait is over, not overdue


def test_a_newcomer_is_not_admitted_before_all_members_wait_or_vote() -> None:
    master = _below_minimum()
    master.vote("a", MINIMUM, 0)
    assert all(type(action.message).__name__ != "Ask" for action in master.join("d", min_world_size=3))
    assert master.vote("b", TOPOLOGY, 1) == asked("a", "b", number=2)


def test_too_few_newcomers_do_not_end_the_wait_for_the_minimum() -> None:
    master = DrivenMaster().formed("a", "b", "c", "d")
    for peer_id in "cd":
        master.dies(peer_id)
    master.answer("a")
    master.answer("b")
    master.vote("a", MINIMUM, 0, timeout_s=9.0)
    master.vote("b", MINIMUM, 0, timeout_s=9.0)
    assert not any(type(action.message).__name__ == "Ask" for action in master.join("e", min_world_size=4))
    failure = _failure(master.at(9.0), MINIMUM, "a", "b")
    assert failure.error == "TooFewPeersError"
    assert all(part in failure.text for part in ("2 members", "needs 4", "'g'"))


def test_the_minimum_that_is_there_already_is_served_at_once() -> None:
    master = DrivenMaster().formed("a", "b")
    assert master.vote("a", MINIMUM, 0) == [Send("a", VoteServed(MINIMUM, VoteCount()))]


def test_a_vote_that_is_cast_after_the_admitting_epoch_is_new() -> None:
    master = DrivenMaster().formed("a", "b")
    master.join("c")
    master.vote("a", TOPOLOGY, 1)
    master.vote("b", TOPOLOGY, 1)
    master.answer("a")
    master.answer("b")
    for peer_id in "ab":
        assert master.vote(peer_id, TOPOLOGY, 2) == []
    assert master.vote("c", TOPOLOGY, 2) == _served(TOPOLOGY, 3, False, "a", "b", "c")


def test_a_vote_with_an_operation_in_flight_is_refused_and_starts_no_storm() -> None:
    master = DrivenMaster().formed("a", "b")
    master.join("c", min_world_size=2)
    for peer_id in "ab":
        master.vote(peer_id, TOPOLOGY, 1)
    master.answer("a")
    actions = master.answer("b", 1, OperationReport(7, 0, OperationState.RUNNING, 1))
    [failed] = [action.message for action in actions if isinstance(action, Send) and action.peer_id == "b"][:1]
    assert isinstance(failed, VoteFailed) and failed.failure.error == "UsageError" and "7/0" in failed.failure.text
    assert master.group().phase is Phase.STEADY
    assert [member.peer_id for member in master.group().durable.members] == ["a", "b"]
    assert master.at(1.0) == []
