"""The rules of the protocol, each broken once: in the real code where it has the rule, else in the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from master_actor.core import agreement
from master_actor.core import group as group_module
from master_actor.core.actions import Append
from master_actor.core.group import Group
from master_actor.core.master import Master
from ray_pccl.control.messages import Decide, OperationState, Outcome, Registered, Verdict
from ray_pccl.peer.ledger import Ledger
from ray_pccl.peer.membership import Membership
from tests.commit import links
from tests.commit.peer import Peer
from tests.commit.plan import Aim, the_master_dies_in_a_round

Patch = pytest.MonkeyPatch
Breaks = Callable[[Patch], None]
BUGS: dict[str, tuple[Breaks, Aim | None]] = {}
"""Each with the aim of the lives in which it shows soonest, if it is a rare one."""
RUNNING, PREPARED, COMMITTED = OperationState.RUNNING, OperationState.PREPARED, OperationState.COMMITTED


def bug(function: Breaks, aim: Aim | None = None) -> Breaks:
    BUGS[function.__name__] = function, aim
    return function


def bug_seen_when(aim: Aim) -> Callable[[Breaks], Breaks]:
    return lambda function: bug(function, aim)


# ---------------------------------------------------------------------------------------------- R0: who may commit


@bug
def one_commits_without_hearing_prepared_from_all(patch: Patch) -> None:
    right = links.heard_from_all

    def heard(peer: Any, key: Any, what: str, members: Any) -> bool:
        return right(peer, key, what, members[1:] if what == links.PREPARED else members)

    patch.setattr(links, "heard_from_all", heard)


@bug
def only_what_a_survivor_committed_is_committed(patch: Patch) -> None:
    right = agreement._decide

    def decide(key: Any, reports: Any, *rest: Any) -> Outcome:
        outcome = right(key, reports, *rest)
        if outcome.verdict is Verdict.COMMIT and all(report.state is not COMMITTED for report in reports):
            return msgspec.structs.replace(outcome, verdict=Verdict.ABORT)
        return outcome

    patch.setattr(agreement, "_decide", decide)


@bug
def what_any_survivor_has_prepared_is_committed(patch: Patch) -> None:
    right = agreement._decide

    def decide(key: Any, reports: Any, *rest: Any) -> Outcome:
        outcome = right(key, reports, *rest)
        if outcome.verdict is Verdict.ABORT and any(report.state is PREPARED for report in reports):
            return msgspec.structs.replace(outcome, verdict=Verdict.COMMIT)
        return outcome

    patch.setattr(agreement, "_decide", decide)


# ----------------------------------------------------------------------------------- R1, R2: freeze, answer, decide


@bug
def an_answer_does_not_freeze(patch: Patch) -> None:
    patch.setattr(Ledger, "freeze", lambda self: None)


@bug
def the_question_aborts_instead_of_the_decision(patch: Patch) -> None:
    right = Ledger.freeze

    def freeze(self: Ledger) -> None:
        right(self)
        for operation in self.operations.values():
            if operation.state is PREPARED:
                operation.state = RUNNING

    patch.setattr(Ledger, "freeze", freeze)


@bug
def a_decision_is_applied_twice(patch: Patch) -> None:
    right_take, right_decided = Peer.take, Membership._decided

    def take(self: Peer, message: Any) -> None:
        right_take(self, message)
        if isinstance(message, Decide) and message is not getattr(self, "twice", None) and self.line is not None:
            self.twice = message  # type: ignore[attr-defined]
            self.line.down.append(message)

    def decided(self: Membership, decide: Decide, now: float) -> list[Any]:
        if decide.epoch == self.view.epoch:
            self.ledger.settle(decide.outcomes, decide.epoch, restart_numbers=False)
        return right_decided(self, decide, now)

    patch.setattr(Peer, "take", take)
    patch.setattr(Membership, "_decided", decided)


@bug
def a_committed_operation_is_forgotten_when_the_next_begins(patch: Patch) -> None:
    right = Ledger.enter

    def enter(self: Ledger, tag: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        key = right(self, tag, *args, **kwargs)
        self.forget((tag, key[1] - 1))
        return key

    patch.setattr(Ledger, "enter", enter)


@bug
def finished_operations_are_not_answered_for(patch: Patch) -> None:
    right = Ledger.report
    patch.setattr(Ledger, "report", lambda self: tuple(r for r in right(self) if r.state is not COMMITTED))


# --------------------------------------------------------------------------- R3: numbers, refusals, what is consumed


@bug
def a_retry_counts_numbers_anew(patch: Patch) -> None:
    right = Ledger.settle

    def settle(self: Ledger, *args: Any, **kwargs: Any) -> None:
        right(self, *args, **kwargs)
        self._numbers.clear()

    patch.setattr(Ledger, "settle", settle)


@bug
def a_prepared_peer_refuses_alone(patch: Patch) -> None:
    right = links.heard_from_all

    def heard(peer: Any, key: Any, what: str, members: Any) -> bool:
        call = peer.calls[key]
        if what == links.PREPARED and not peer.ledger.frozen and not peer.has_failed(key) and call.is_tired():
            peer.ledger.operations[key].state = RUNNING
            links.refuse(peer, call)
        return right(peer, key, what, members) and not peer.has_failed(key)

    patch.setattr(links, "heard_from_all", heard)


@bug
def a_refusal_is_forgotten_by_who_has_not_entered(patch: Patch) -> None:
    right = Ledger.refused
    patch.setattr(Ledger, "refused", lambda self, key, *rest: key in self.operations and right(self, key, *rest))


@bug
def what_is_consumed_is_not_for_who_enters_later(patch: Patch) -> None:
    right = Ledger._apply

    def apply(self: Ledger, outcome: Outcome, epoch: int) -> None:
        if (outcome.tag, outcome.number) in self.operations:
            right(self, outcome, epoch)

    patch.setattr(Ledger, "_apply", apply)


@bug
def one_that_is_not_to_be_retried_is_retried(patch: Patch) -> None:
    right = agreement._decide

    def decide(key: Any, reports: Any, *rest: Any) -> Outcome:
        return right(key, [msgspec.structs.replace(report, retry=True) for report in reports], *rest)

    patch.setattr(agreement, "_decide", decide)


@bug
def one_whose_root_is_dead_is_retried(patch: Patch) -> None:
    patch.setattr(agreement, "_lacks_root", lambda reports, lost: False)


@bug
def too_few_survivors_try_again(patch: Patch) -> None:
    right = agreement.agree
    patch.setattr(group_module, "agree", lambda answers, lost, minimum: right(answers, lost))


# ------------------------------------------------------------------------------------- R4 to R6: links and masters


@bug
def what_was_said_in_an_older_epoch_still_counts(patch: Patch) -> None:
    patch.setattr(Peer, "is_current", lambda self, epoch: True)


@bug
def a_link_is_mended_inside_the_epoch(patch: Patch) -> None:
    patch.setattr(Group, "link_broken", lambda self, peer_id, report, now: None)


@bug
def the_journal_is_written_after_the_push(patch: Patch) -> None:
    right = Master.handle

    def handle(self: Master, event: Any, now: float) -> list[Any]:
        return sorted(right(self, event, now), key=lambda action: isinstance(action, Append))

    patch.setattr(Master, "handle", handle)


@bug
def a_restarted_master_ignores_who_is_frozen_or_behind(patch: Patch) -> None:
    right = Group._returns
    patch.setattr(Group, "_returns", lambda self, peer_id, *, agrees, now: right(self, peer_id, agrees=True, now=now))


@bug
def an_evicted_peer_is_taken_back(patch: Patch) -> None:
    right = Group.register

    def register(self: Group, register: Any, now: float) -> None:
        if self.is_member(register.peer_id):
            right(self, register, now)
        else:
            self._send(register.peer_id, Registered({}))

    patch.setattr(Group, "register", register)


@bug_seen_when(the_master_dies_in_a_round)
def the_decision_of_a_lower_boot_is_accepted(patch: Patch) -> None:
    right_dial, right_hear = Peer.dial, Peer.hear_master

    def dial(self: Peer) -> int:
        before = self.line
        dialled = right_dial(self)
        if dialled and before is not None:
            self.stale = before.down  # type: ignore[attr-defined]
        return dialled

    def hear_master(self: Peer) -> int:
        stale = getattr(self, "stale", None)
        if stale and self.alive and not self.stopped and not self._freezing and self.world.rng.random() < 0.3:
            self.take(stale.popleft())
            return 2
        return right_hear(self)

    patch.setattr(Peer, "dial", dial)
    patch.setattr(Peer, "hear_master", hear_master)
