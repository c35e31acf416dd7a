"""The entrance of the core: many groups behind it, none in another's way, nothing kept that is over."""

from __future__ import annotations

import pytest

from master_actor.core.actions import Append, Send, SentinelSaid, StopRequested
from master_actor.core.phases import InvalidTransition, Phase, PhaseLog
from master_actor.core.records import Booted
from ray_pccl.control.messages import (
    Answer,
    Leave,
    LinkBroken,
    Poll,
    ProcessState,
    Seen,
    Stopped,
    StoreOp,
    StoreRequest,
    Withdraw,
)
from tests.core.driven import TOPOLOGY, DrivenMaster, asked, evicted


def _two_groups() -> DrivenMaster:
    return DrivenMaster().formed("a", "b").formed("x", "y", group="h")


def test_the_boot_is_written_down_before_anything_else() -> None:
    master = DrivenMaster(boot=7)
    assert master.actions == [Append(Booted(7, "nonce", "master", "127.0.0.1", 48148, b"key"))]
    assert master.master.durable.identity.boot == 7


def test_a_death_in_one_group_disturbs_no_other() -> None:
    master = _two_groups()
    master.vote("x", TOPOLOGY, 1)
    actions = master.dies("b")
    assert {action.peer_id for action in actions} == {"a", "b"}
    assert master.group("h").phase is Phase.STEADY
    assert len(master.vote("y", TOPOLOGY, 1)) == 3
    assert master.group("g").phase is Phase.ASKING


def test_two_groups_may_be_asked_at_the_same_time_and_rounds_do_not_mix() -> None:
    master = _two_groups()
    assert master.dies("b")[1:] == asked("a", number=1)
    assert master.dies("y")[1:] == asked("x", number=2)
    assert master.say("a", Answer((1, 2), 1, ())) == []
    assert {action.peer_id for action in master.answer("x", 2)[1:]} == {"x"}
    assert {action.peer_id for action in master.answer("a", 1)[1:]} == {"a"}


def test_each_group_has_a_store_of_its_own() -> None:
    master = _two_groups()
    master.say("a", StoreRequest(0, 0, StoreOp.SET, ("k",), (b"of g",)))
    (action,) = master.say("x", StoreRequest(0, 0, StoreOp.CHECK, ("k",)))
    assert action.message.flag is False


def test_epochs_of_groups_count_for_themselves() -> None:
    master = _two_groups()
    master.dies("b")
    master.answer("a")
    assert (master.group("g").durable.epoch, master.group("h").durable.epoch) == (2, 1)


def test_a_stop_is_told_to_everyone() -> None:
    master = _two_groups()
    master.join("c")
    stopped = [Send(peer_id, Stopped("for the night")) for peer_id in ("a", "b", "x", "y", "c")]
    assert master.handle(StopRequested("for the night")) == stopped


@pytest.mark.parametrize("message", [Leave(), LinkBroken(1, "b"), Poll(), Withdraw(TOPOLOGY), Answer((1, 1), 1, ())])
def test_a_peer_that_never_joined_is_not_listened_to(message) -> None:
    assert DrivenMaster().formed("a", "b").say("stranger", message) == []


def test_what_is_over_is_forgotten() -> None:
    master = DrivenMaster().formed("a", "b")
    for place in range(100):
        peer_id, group = f"p{place}", f"group {place}"
        master.join(peer_id, group=group)
        master.say(peer_id, Leave())
        master.hangs_up(peer_id)
    master.at(10.0)
    assert set(master.master.groups) == set(master.master.durable.groups) == {"g"}
    assert set(master.master._group_of) == set(master.master.liveness.peers) == {"a", "b"}


def test_passive_peers_that_did_not_get_in_are_forgotten_too() -> None:
    master = DrivenMaster().formed("a", "b", max_world_size=2)
    for place, given in enumerate(({"timeout_s": 1.0}, {}, {"min_world_size": 9})):  # too late, gone, refused
        master.join(f"p{place}", passive_timeout_s=30.0, **({"max_world_size": 2} | given))
    master.hangs_up("p1")
    master.at(1.0)
    assert master.group()._passive == {}


def test_a_group_that_had_an_epoch_is_remembered_by_its_number_alone() -> None:
    master = DrivenMaster().formed("a", "b")
    for peer_id in "ab":
        master.say(peer_id, Leave())
        master.hangs_up(peer_id)
    master.at(10.0)
    durable = master.master.durable.groups["g"]
    assert (durable.epoch, durable.members, durable.votes, durable.store) == (1, (), {}, {})


def test_a_lost_peer_is_remembered_until_its_lease_is_over() -> None:
    master = DrivenMaster().formed("a", "b")
    for peer_id in "ab":
        master.handle(SentinelSaid("h", Seen(peer_id, ProcessState.RUNNING)))
        master.evict(peer_id, "silent")
        master.hangs_up(peer_id)
    master.at(10.0)
    assert master.group().phase is Phase.LEASED
    master.dies("a")
    assert len(master.dies("b")) == 1


def test_an_eviction_is_told_once() -> None:
    master = DrivenMaster().formed("a", "b")
    assert master.evict("b", "too slow")[0] == evicted("b", "too slow")
    assert master.evict("b", "too slow") == [] == master.hangs_up("b")


def test_a_change_of_phase_that_is_not_in_the_table_tells_the_whole_story() -> None:
    log = PhaseLog("g", Phase.EMPTY)
    log.enter(Phase.FORMING, 1.0)
    with pytest.raises(InvalidTransition) as caught:
        log.enter(Phase.STEADY, 2.0)
    assert "'g'" in str(caught.value) and "a first joiner" in str(caught.value)
    assert log.phase is Phase.FORMING


def test_who_is_in_a_group_and_what_its_store_holds_is_told_to_who_asks() -> None:
    master = _two_groups()
    master.join("late")
    set_both = StoreRequest(1, 0, StoreOp.SET, ("public/a", "own/b"), (b"1", b"2"))
    master.say("a", set_both)
    master.dies("b")
    mine, other = master.master.describe("public/")
    assert (mine.group, mine.epoch, mine.members, mine.waiting) == ("g", 1, ("a",), ("late",))
    assert mine.entries == {"public/a": b"1"}
    assert (other.group, other.members, other.entries) == ("h", ("x", "y"), {})
