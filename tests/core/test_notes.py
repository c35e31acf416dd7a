"""What the core notes for the timeline: each thing once, in order, with who and why."""

from __future__ import annotations

from master_actor.core.actions import Note
from master_actor.core.group import NAMED_NEWCOMERS
from ray_pccl.control.messages import Leave, LinkBroken
from ray_pccl.reports import HappeningKind
from tests.core.driven import EXITING, TOPOLOGY, DrivenMaster

K = HappeningKind


def _story(notes: list[Note]) -> list[tuple[object, ...]]:
    return [(note.kind, note.epoch, note.peer_id, note.reason, note.members) for note in notes]


def test_a_group_that_forms_names_its_members_and_its_epoch() -> None:
    master = DrivenMaster().formed("a", "b")
    assert _story(master.notes) == [
        (K.JOINED, 1, "a", "", 2),
        (K.JOINED, 1, "b", "", 2),
        (K.EPOCH, 1, None, "the group formed", 2),
    ]


def test_a_crowd_is_noted_by_its_first_and_the_number_of_the_others() -> None:
    master = DrivenMaster().formed(*(f"p{number:02}" for number in range(NAMED_NEWCOMERS + 5)))
    joined = [note for note in master.notes if note.kind is K.JOINED]
    assert len(joined) == NAMED_NEWCOMERS + 1
    assert (joined[-1].peer_id, joined[-1].reason) == (None, "5 more")


def test_a_death_and_its_recovery_are_two_notes_with_the_reason() -> None:
    master = DrivenMaster().formed("a", "b", "c")
    master.notes.clear()
    master.dies("c")
    assert _story(master.notes) == [(K.LOST, 1, "c", EXITING, 2)]
    assert master.notes[0].certain
    master.answer("a")
    master.answer("b")
    assert _story(master.notes)[1:] == [(K.RECOVERED, 2, None, "1 lost", 2)]


def test_who_is_evicted_may_still_be_running() -> None:
    master = DrivenMaster().formed("a", "b", "c")
    master.notes.clear()
    master.evict("b", "asked for")
    assert _story(master.notes) == [(K.LOST, 1, "b", "asked for", 2)]
    assert not master.notes[0].certain


def test_who_leaves_is_no_death() -> None:
    master = DrivenMaster().formed("a", "b", "c")
    master.notes.clear()
    master.say("c", Leave())
    master.answer("a")
    master.answer("b")
    assert [note.kind for note in master.notes] == [K.LEFT, K.EPOCH]
    assert master.notes[1].reason == "1 left"


def test_a_newcomer_waits_and_is_admitted() -> None:
    master = DrivenMaster().formed("a", "b")
    master.notes.clear()
    master.join("c")
    assert _story(master.notes) == [(K.WAITING, 1, "c", "", 2)]
    master.vote("a", TOPOLOGY, 1)
    master.vote("b", TOPOLOGY, 1)
    master.answer("a")
    master.answer("b")
    assert _story(master.notes)[1:] == [(K.JOINED, 2, "c", "", 3), (K.EPOCH, 2, None, "1 admitted", 3)]


def test_who_gives_up_waiting_is_noted() -> None:
    master = DrivenMaster().formed("a", "b")
    master.join("c")
    master.notes.clear()
    master.hangs_up("c")
    assert [(note.kind, note.peer_id) for note in master.notes] == [(K.WITHDRAWN, "c")]


def test_a_broken_link_makes_an_epoch_that_is_no_recovery() -> None:
    master = DrivenMaster().formed("a", "b", "c")
    master.notes.clear()
    master.say("a", LinkBroken(1, "b"))
    for peer in "abc":
        master.answer(peer)
    assert [note.kind for note in master.notes] == [K.EPOCH]
    assert master.notes[0].reason in ("linked anew", "the ring in another order")


def test_the_last_death_empties_the_group() -> None:
    master = DrivenMaster().formed("a")
    master.notes.clear()
    master.dies("a")
    assert [note.kind for note in master.notes] == [K.LOST, K.EMPTIED]
