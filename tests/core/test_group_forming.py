"""The rendezvous of a group: minimum, last call, maximum, deadlines, refusals, and who comes late (R10, R11)."""

from __future__ import annotations

import pytest

from master_actor.core.actions import Append, ExpectationChanged, Send
from master_actor.core.phases import Phase
from master_actor.core.records import GroupClosed, GroupEmptied
from ray_pccl.control.messages import Failure, Leave, News, Query, Question, Refused, Reply, StoreOp, StoreRequest
from tests.core.driven import (
    PENDING,
    TOPOLOGY,
    DrivenMaster,
    asked,
    census,
    evicted,
    joining,
    new_epoch,
    of,
)


def _refusal(actions: list, peer_id: str) -> Failure:
    """The only refusal among the actions, which must be for this peer."""
    (found,) = [a for a in actions if isinstance(a, Send) and isinstance(a.message, Refused)]
    assert found.peer_id == peer_id
    return found.message.failure


def test_a_group_forms_when_the_last_call_after_its_minimum_has_passed() -> None:
    master = DrivenMaster()
    assert master.join("a") == []
    assert master.at(5.0) == []
    assert master.join("b") == []
    assert master.group().phase is Phase.LAST_CALL
    assert master.at(5.49) == []
    assert master.at(5.5) == new_epoch(1, "a", "b")


def test_one_more_peer_prolongs_the_last_call() -> None:
    master = DrivenMaster()
    master.join("a")
    master.join("b")
    master.at(0.4)
    assert master.join("c") == []
    assert master.at(0.6) == []
    assert master.at(0.9) == new_epoch(1, "a", "b", "c")


def test_a_group_forms_at_once_when_its_maximum_is_there() -> None:
    master = DrivenMaster()
    assert master.join("a", max_world_size=2) == []
    assert master.join("b", max_world_size=2) == new_epoch(1, "a", "b", limits=(2, 2))


def test_a_group_forms_at_once_when_all_who_are_expected_are_there() -> None:
    master = DrivenMaster()
    limits = {"min_world_size": 1, "expected": 3, "last_call_s": 5.0}
    assert master.join("a", **limits) == []
    assert master.join("b", **limits) == []
    assert master.at(4.9) == []
    assert master.join("c", **limits) == new_epoch(1, "a", "b", "c", limits=(1, None))


def test_a_group_does_not_wait_for_those_who_are_expected_beyond_its_last_call() -> None:
    master = DrivenMaster()
    limits = {"min_world_size": 1, "expected": 3, "last_call_s": 5.0}
    master.join("a", **limits)
    assert master.join("b", **limits) == []
    assert master.at(5.0) == new_epoch(1, "a", "b", limits=(1, None))


def test_a_group_forms_at_once_when_it_hears_that_nobody_else_will_come() -> None:
    master = DrivenMaster()
    limits = {"min_world_size": 2, "expected": 3, "last_call_s": 5.0}
    master.join("a", **limits)
    assert master.handle(ExpectationChanged("g", 1)) == [], "its minimum is not there"
    assert master.handle(ExpectationChanged("g", 2)) == []
    assert master.join("b", **limits) == new_epoch(1, "a", "b")
    assert master.handle(ExpectationChanged("g", 5)) == []
    assert master.handle(ExpectationChanged("no such group", 5)) == []


def test_a_group_of_one_forms_alone() -> None:
    master = DrivenMaster()
    assert master.join("a", min_world_size=1, last_call_s=0.0) == []
    assert master.at(0.0) == new_epoch(1, "a", limits=(1, None))


def test_over_the_maximum_the_rest_waits() -> None:
    master = DrivenMaster().formed("a", "b", max_world_size=2)
    assert master.join("c", max_world_size=2) == [
        Send("a", News("waiting", "c", "")),
        Send("b", News("waiting", "c", "")),
    ]
    assert master.vote("a", TOPOLOGY, 1) == []
    served = master.vote("b", TOPOLOGY, 1)
    assert [type(action.message).__name__ for action in served[1:]] == ["VoteServed", "VoteServed"]
    assert "c" in master.group().room


def test_a_trickle_of_joiners_can_not_postpone_the_deadline_of_the_first() -> None:
    master = DrivenMaster()
    master.join("p0", timeout_s=2.0, last_call_s=0.5)
    for place in range(1, 7):
        assert master.at(place * 0.3) == []
        assert master.join(f"p{place}", timeout_s=100.0, last_call_s=0.5) == []
    assert master.at(1.99) == []
    assert master.at(2.0) == new_epoch(1, *(f"p{place}" for place in range(7)))


def test_falling_below_the_minimum_cancels_the_last_call() -> None:
    master = DrivenMaster()
    master.join("a")
    master.join("b")
    assert master.say("b", Leave()) == []
    assert master.group().phase is Phase.FORMING
    assert master.at(3.0) == []
    assert master.join("c") == []
    assert master.at(3.49) == []
    assert master.at(3.5) == new_epoch(1, "a", "c")


def test_a_death_while_forming_takes_the_peer_out_and_the_rest_forms_again() -> None:
    master = DrivenMaster()
    master.join("a")
    master.join("b")
    assert master.dies("a") == [evicted("a", "its process is exiting")]
    master.join("c")
    assert master.at(0.5) == new_epoch(1, "b", "c")


def test_a_connection_that_closes_while_forming_takes_the_peer_out() -> None:
    master = DrivenMaster()
    master.join("a")
    assert master.hangs_up("a") == []  # nobody is there to be told
    assert master.group().phase is Phase.EMPTY


def test_a_join_timeout_fails_every_waiter_and_the_group_can_be_formed_afresh() -> None:
    master = DrivenMaster()
    master.join("a", min_world_size=3)
    master.at(9.0)
    master.join("b", min_world_size=3)
    assert master.at(9.99) == []
    refused = master.at(10.0)
    assert [action.peer_id for action in refused] == ["a", "b"]
    assert {action.message.failure.error for action in refused} == {"RendezvousTimeoutError"}
    assert master.group().phase is Phase.EMPTY
    # Afresh, even with other sizes.
    master.join("c", min_world_size=2)
    master.join("a", min_world_size=2)
    assert master.at(10.5) == new_epoch(1, "c", "a")


def test_a_later_joiner_with_less_time_is_refused_alone() -> None:
    master = DrivenMaster()
    master.join("a", min_world_size=3)
    master.join("b", min_world_size=3, timeout_s=1.0)
    assert _refusal(master.at(1.0), "b").error == "RendezvousTimeoutError"
    assert master.group().phase is Phase.FORMING and "a" in master.group().room


@pytest.mark.parametrize("other", [{"min_world_size": 3}, {"max_world_size": 9}])
def test_another_minimum_or_maximum_is_refused_while_forming_and_after(other: dict[str, int]) -> None:
    master = DrivenMaster()
    master.join("a")
    assert _refusal(master.join("x", **other), "x").error == "GroupMismatchError"
    master.join("b")
    assert master.at(0.5) == new_epoch(1, "a", "b")
    actions = master.join("y", **other)
    assert _refusal(actions, "y").error == "GroupMismatchError"
    assert len(actions) == 1


def test_a_rank_that_is_taken_is_refused() -> None:
    master = DrivenMaster()
    master.join("a", rank=1)
    failure = _refusal(master.join("b", rank=1), "b")
    assert (failure.error, failure.details) == ("RankTakenError", {"rank": 1, "holder": "a"})


def test_requested_ranks_are_honoured_in_the_first_epoch() -> None:
    master = DrivenMaster()
    master.join("a", min_world_size=3)
    master.join("b", min_world_size=3, rank=0)
    master.join("c", min_world_size=3, rank=1)
    assert master.at(0.5) == new_epoch(1, "b", "c", "a", limits=(3, None))


def test_survivors_keep_their_order() -> None:
    master = DrivenMaster()
    for peer_id, rank in (("a", 2), ("b", 1), ("c", 0)):
        master.join(peer_id, min_world_size=3, rank=rank)
    master.at(0.5)
    master.dies("b")
    master.answer("a")
    lost = (("b", "its process is exiting"),)
    assert master.answer("c") == new_epoch(2, "c", "a", admitted_in=1, lost=lost, limits=(3, None))


def test_a_late_joiner_waits_until_all_members_have_voted() -> None:
    master = DrivenMaster().formed("a", "b")
    assert master.join("c") == [Send("a", News("waiting", "c", "")), Send("b", News("waiting", "c", ""))]
    assert master.vote("a", TOPOLOGY, 1) == []
    assert master.vote("b", TOPOLOGY, 1) == asked("a", "b")
    assert master.answer("a") == []
    assert master.answer("b") == new_epoch(2, "a", "b", "c", topology=2)


def test_only_as_many_are_admitted_as_there_is_room_for() -> None:
    master = DrivenMaster().formed("a", "b", max_world_size=3)
    master.join("c", max_world_size=3)
    master.join("d", max_world_size=3)
    master.vote("a", TOPOLOGY, 1)
    master.vote("b", TOPOLOGY, 1)
    master.answer("a")
    assert master.answer("b") == new_epoch(2, "a", "b", "c", topology=2, limits=(2, 3))
    assert "d" in master.group().room


def test_a_late_joiner_has_a_deadline_of_its_own() -> None:
    master = DrivenMaster().formed("a", "b")
    master.join("c", timeout_s=3.0)
    assert master.at(2.9) == []
    actions = master.at(3.0)
    assert _refusal(actions, "c").error == "RendezvousTimeoutError"
    gone = News("withdrawn", "c", "its time to join ran out")
    assert actions[1:] == [Send("a", gone), Send("b", gone)]


def test_an_admission_whose_newcomer_died_meanwhile_admits_the_others() -> None:
    master = DrivenMaster().formed("a", "b")
    master.join("c")
    master.join("d")
    master.vote("a", TOPOLOGY, 1)
    master.vote("b", TOPOLOGY, 1)
    master.dies("c")
    master.answer("a")
    assert master.answer("b") == new_epoch(2, "a", "b", "d", topology=2)


def test_operation_numbers_restart_only_if_someone_is_admitted() -> None:
    # R3: `admitted_in` is what restarts them.
    master = DrivenMaster().formed("a", "b")
    master.join("c")
    master.vote("a", TOPOLOGY, 1)
    master.vote("b", TOPOLOGY, 1)
    master.dies("c")
    master.answer("a")
    actions = master.answer("b")
    assert actions[0].record.members == of("a", "b")
    assert actions[0].record.admitted_in == 1


def test_a_group_that_all_have_left_is_empty_and_forms_again_with_the_next_epoch() -> None:
    master = DrivenMaster().formed("a", "b")
    assert master.say("a", Leave()) == asked("b")
    assert master.say("b", Leave()) == [Append(GroupEmptied("g"))]
    master.join("c", min_world_size=3)
    master.join("d", min_world_size=3)
    master.join("e", min_world_size=3)
    assert master.at(0.5) == new_epoch(2, "c", "d", "e", limits=(3, None))


def test_those_who_wait_when_all_members_leave_become_a_new_round() -> None:
    master = DrivenMaster().formed("a", "b")
    master.join("c")
    master.join("d")
    master.say("a", Leave())
    assert master.say("b", Leave()) == [Append(GroupEmptied("g"))]
    assert master.group().phase is Phase.LAST_CALL
    assert master.at(0.5) == new_epoch(2, "c", "d")


def test_a_group_keeps_its_keys_only_as_long_as_it_lives() -> None:
    master = DrivenMaster().formed("a", "b")
    master.say("a", StoreRequest(0, 0, StoreOp.SET, ("k",), (b"v",)))
    master.say("a", Leave())
    master.say("b", Leave())
    master.formed("c", "d")
    assert master.say("c", StoreRequest(0, 0, StoreOp.NUM_KEYS)) == [Send("c", Reply(0, amount=0))]


def test_closing_refuses_who_waits_and_who_comes_and_the_members_go_on() -> None:
    master = DrivenMaster().formed("a", "b")
    master.join("c")
    actions = master.say("a", Query(0, Question.SET_CLOSED))
    closed = News("closed", None, "")
    assert actions[:3] == [Append(GroupClosed("g")), Send("a", closed), Send("b", closed)]
    assert _refusal(actions, "c").error == "RendezvousClosedError"
    assert actions[4:] == [Send("a", Reply(0, flag=True, amount=0))]
    assert _refusal(master.join("d"), "d").error == "RendezvousClosedError"
    master.vote("a", PENDING, 0)
    assert [type(action).__name__ for action in master.vote("b", PENDING, 0)] == ["Append", "Send", "Send"]


def test_closing_twice_is_written_once() -> None:
    master = DrivenMaster().formed("a", "b")
    master.say("a", Query(0, Question.SET_CLOSED))
    assert master.say("b", Query(0, Question.SET_CLOSED)) == [Send("b", Reply(0, flag=True, amount=0))]


def test_a_closed_group_stays_closed_when_it_is_empty_and_after_a_restart() -> None:
    master = DrivenMaster().formed("a", "b")
    master.say("a", Query(0, Question.SET_CLOSED))
    master.say("a", Leave())
    master.say("b", Leave())
    assert _refusal(master.join("c"), "c").error == "RendezvousClosedError"
    assert _refusal(master.restarted().join("c"), "c").error == "RendezvousClosedError"


def test_only_members_may_ask_and_close() -> None:
    master = DrivenMaster().formed("a", "b")
    master.join("c")
    for number, what in enumerate(Question):
        (action,) = master.say("c", Query(number, what))
        assert action.peer_id == "c" and action.message.number == number
        assert action.message.failure.error == "NotAMemberError"
    assert not master.group().durable.closed


def test_a_member_can_ask_how_many_wait() -> None:
    master = DrivenMaster().formed("a", "b")
    master.join("c")
    assert master.say("b", Query(4, Question.NUM_WAITING)) == [Send("b", Reply(4, amount=1))]


def test_a_newcomer_that_was_admitted_but_never_told_is_told_after_the_restart() -> None:
    master = DrivenMaster()
    master.join("a")
    master.join("b")
    master.at(0.5)  # the epoch is in the journal; the pushes are lost with the master
    again = master.restarted()
    (registered,) = again.say("a", joining("a"))
    assert registered.peer_id == "a" and type(registered.message).__name__ == "Registered"
    actions = again.say("b", joining("b"))
    assert actions[1:] == asked("a", "b", boot=2)
    again.answer("a", epoch=0)
    assert again.answer("b", epoch=0) == new_epoch(2, "a", "b", admitted_in=1)


def test_attributes_count_all_groups() -> None:
    master = DrivenMaster().formed("a", "b", "c")
    master.join("x", group="h", max_world_size=2)
    assert master.join("y", group="h", max_world_size=2) == new_epoch(
        1, "x", "y", group="h", limits=(2, 2), attributes=census(5, groups=2, largest=3)
    )
