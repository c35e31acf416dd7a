"""What a peer holds of each operation: the part of the commit protocol that must survive a round.

The data plane reports its progress here; a round reads it, and settles it (R0 to R3). Once frozen, nothing moves until
the decision: that is what makes an answer binding. The same happens when the lease runs out (R7), and here it is
checked at each step: a process that was stopped for longer than its lease must not take one more step before its timers
run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ray_pccl.control.messages import Failure, OperationReport, OperationState, Outcome, Verdict
from ray_pccl.errors import PCCLError

Key = tuple[int, int]


class FrozenError(PCCLError):
    """The epoch is frozen: the step has to wait for the next one."""


@dataclass(slots=True)
class Operation:
    """One operation of this peer."""

    state: OperationState
    epoch: int
    retry: bool
    failure: Failure | None = None


class Ledger:
    """The operations that not everyone is known to have finished, by (tag, number)."""

    def __init__(self) -> None:
        self.frozen = False
        self.lease_ends = float("inf")
        """Without a word from the master until then, nothing moves any more."""
        self.lease_missed = False
        """Frozen by the lease, which the master does not know yet."""
        self.operations: dict[Key, Operation] = {}
        self._numbers: dict[int, int] = {}

    def enter(self, tag: int, epoch: int, now: float, *, retry: bool = True) -> Key:
        """The peer begins the next operation of this tag. It may have been consumed before: see its state."""
        self._require_thawed(now)
        number = self._numbers.get(tag, 0)
        self._numbers[tag] = number + 1
        self.operations.setdefault((tag, number), Operation(OperationState.RUNNING, epoch, retry))
        return tag, number

    def prepare(self, key: Key, now: float) -> None:
        """The peer holds its full result."""
        self._require_thawed(now)
        self.operations[key].state = OperationState.PREPARED

    def commit(self, key: Key, now: float) -> None:
        """The peer heard *prepared* from all members."""
        self._require_thawed(now)
        self.operations[key].state = OperationState.COMMITTED

    def fail(self, key: Key, failure: Failure, now: float) -> None:
        """The operation failed for good. Only one that is not prepared may refuse alone (R3)."""
        self._require_thawed(now)
        operation = self.operations[key]
        if operation.state is not OperationState.RUNNING:
            raise PCCLError(f"operation {key} is {operation.state.value}: it can't fail on one peer alone")
        operation.state, operation.failure = OperationState.FAILED, failure

    def forget(self, key: Key) -> None:
        """Every member is known to be past this operation (R2)."""
        self.operations.pop(key, None)

    def freeze(self) -> None:
        """Nothing moves any more until `settle`."""
        self.frozen = True

    def check_lease(self, now: float) -> None:
        """Freezes if the master was not heard for too long."""
        if now >= self.lease_ends and not self.frozen:
            self.freeze()
            self.lease_missed = True

    def report(self) -> tuple[OperationReport, ...]:
        """What a frozen peer answers."""
        return tuple(
            OperationReport(tag, number, operation.state, operation.epoch, operation.retry, operation.failure)
            for (tag, number), operation in sorted(self.operations.items())
        )

    def settle(self, outcomes: Iterable[Outcome], epoch: int, *, restart_numbers: bool) -> None:
        """Applies a decision as a whole, and thaws."""
        for outcome in outcomes:
            self._apply(outcome, epoch)
        if restart_numbers:
            self.operations.clear()
            self._numbers.clear()
        self.frozen = False
        self.lease_missed = False

    def _apply(self, outcome: Outcome, epoch: int) -> None:
        key = (outcome.tag, outcome.number)
        operation = self.operations.get(key)
        if outcome.verdict is Verdict.CONSUME:
            if operation is None or operation.state is not OperationState.COMMITTED:
                self.operations[key] = Operation(
                    OperationState.FAILED, outcome.epoch, retry=False, failure=outcome.failure
                )
        elif operation is None or operation.state in (OperationState.COMMITTED, OperationState.FAILED):
            return
        elif outcome.verdict is Verdict.COMMIT:
            if operation.state is not OperationState.PREPARED:
                raise PCCLError(
                    f"operation {key} is to commit, but this peer holds no result: it is {operation.state.value}"
                )
            operation.state = OperationState.COMMITTED
        else:
            operation.state, operation.epoch = OperationState.RUNNING, epoch

    def _require_thawed(self, now: float) -> None:
        self.check_lease(now)
        if self.frozen:
            raise FrozenError("the epoch is frozen until the master has decided")
