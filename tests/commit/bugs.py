"""The rules of the protocol, each broken once: patched into the real code where it has the rule, else into the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from tests.commit import boards, links
from tests.commit.peer import Peer

Patch = pytest.MonkeyPatch
BUGS: dict[str, Callable[[Patch], None]] = {}
RUNNING, PREPARED, COMMITTED = OperationState.RUNNING, OperationState.PREPARED, OperationState.COMMITTED


def bug(function: Callable[[Patch], None]) -> Callable[[Patch], None]:
    BUGS[function.__name__] = function
    return function


def nothing(*_: Any) -> Iterator[bool]:
    """A look that is not taken."""
    yield from ()


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
            return Outcome(*key, Verdict.ABORT, outcome.epoch)
        return outcome

    patch.setattr(agreement, "_decide", decide)


@bug
def what_any_survivor_has_prepared_is_committed(patch: Patch) -> None:
    right = agreement._decide

    def decide(key: Any, reports: Any, *rest: Any) -> Outcome:
        outcome = right(key, reports, *rest)
        if outcome.verdict is Verdict.ABORT and any(report.state is PREPARED for report in reports):
            return Outcome(*key, Verdict.COMMIT, outcome.epoch)
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
        if isinstance(message, Decide) and message.outcomes and self.line is not None and not hasattr(self, "twice"):
            self.twice = True  # type: ignore[attr-defined]
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


@bug
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


# ------------------------------------------------------------------------------------------------ R8: shared memory


@bug
def closing_comes_after_looking(patch: Patch) -> None:
    def close(peer: Peer) -> list[tuple[int, int]]:
        whole = boards.look(peer)
        peer.world.meanwhile()
        peer.memory.closed = peer.epoch
        return whole

    patch.setattr(boards, "close", close)


@bug
def nobody_looks_again_whether_someone_has_closed(patch: Patch) -> None:
    patch.setattr(boards, "nobody_closed", nothing)


@bug
def nobody_looks_again_whether_someone_has_withdrawn(patch: Patch) -> None:
    def nobody_withdrew(*_: Any) -> Iterator[bool]:
        yield True
        return True

    patch.setattr(boards, "nobody_withdrew", nobody_withdrew)


@bug
def the_epoch_of_a_flag_is_ignored(patch: Patch) -> None:
    def is_published(memory: boards.Memory, key: Any, flag: boards.Flag) -> bool:
        found = memory.slot(key).flag
        return found is not None and found.number == key[1] and not found.withdrawn

    patch.setattr(boards, "is_published", is_published)


@bug
def a_slot_is_overwritten_one_operation_early(patch: Patch) -> None:
    patch.setattr(boards, "slot_is_free", lambda memory, key: memory.begun[key[0]] >= key[1] - boards.SLOTS)


@bug
def a_slot_is_free_only_when_the_next_input_was_published(patch: Patch) -> None:
    """Not wrong, but it hangs: what was refused early was never published."""

    def slot_is_free(memory: boards.Memory, key: Any) -> bool:
        found = memory.slot((key[0], key[1] - 1)).flag
        return key[1] < boards.SLOTS or (found is not None and found.number >= key[1] - 1)

    patch.setattr(boards, "slot_is_free", slot_is_free)


@bug
def a_flag_stays_while_the_data_change(patch: Patch) -> None:
    def publish(peer: Peer, key: Any, flag: boards.Flag) -> Iterator[bool]:
        slot = peer.memory.slot(key)
        slot.data = key
        peer.world.moment("writing", peer)
        yield True
        slot.flag = flag
        yield True

    patch.setattr(boards, "publish", publish)


@bug
def a_flag_comes_before_its_data(patch: Patch) -> None:
    def publish(peer: Peer, key: Any, flag: boards.Flag) -> Iterator[bool]:
        slot = peer.memory.slot(key)
        slot.flag = flag
        yield True
        slot.data = key
        yield True

    patch.setattr(boards, "publish", publish)


@bug
def who_recomputes_does_not_look_whether_the_others_went_on(patch: Patch) -> None:
    patch.setattr(boards, "nobody_went_on", nothing)


@bug
def one_refuses_without_withdrawing(patch: Patch) -> None:
    def withdraw(peer: Any, call: Any, memories: Any, flag: Any) -> Iterator[bool]:
        if any(boards.published_nothing(memory, call.key, flag.epoch) for memory in memories):
            return not peer.ledger.frozen and links.refuse(peer, call)
        yield True
        return False

    patch.setattr(boards, "withdraw", withdraw)


@bug
def two_that_withdraw_take_each_other_for_a_reason(patch: Patch) -> None:
    def published_nothing(memory: boards.Memory, key: Any, epoch: int) -> bool:
        return not boards.was_published(memory, key, epoch) or bool(memory.slot(key).flag.withdrawn)  # type: ignore[union-attr]

    right = boards.withdraw

    def withdraw(peer: Any, call: Any, memories: Any, flag: Any) -> Iterator[bool]:
        others = [memory for memory in memories if memory is not peer.memory]
        return right(peer, call, others, flag)

    patch.setattr(boards, "published_nothing", published_nothing)
    patch.setattr(boards, "withdraw", withdraw)


@bug
def what_is_withdrawn_counts_as_missing_for_who_freezes(patch: Patch) -> None:
    def look(peer: Peer) -> list[tuple[int, int]]:
        withdrawn = [key for key in right(peer) if any(m.slot(key).flag.withdrawn for m in peer.memories())]  # type: ignore[union-attr]
        return [key for key in right(peer) if key not in withdrawn]

    right = boards.look
    patch.setattr(boards, "look", look)
