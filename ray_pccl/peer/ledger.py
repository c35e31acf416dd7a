"""What a peer holds of each operation: the part of the commit protocol that must survive a round.

The data plane reports its progress here; a round reads it, and settles it (R0 to R3). Once frozen, nothing moves until
the decision: that is what makes an answer binding. The same happens when the lease runs out (R7), and here it is
checked at each step: a process that was stopped for longer than its lease must not take one more step before its timers
run. Threads of the data plane and the control thread meet here, so every step is taken under one lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ray_pccl.control.messages import Failure, OperationReport, OperationState, Outcome, Verdict
from ray_pccl.errors import PCCLError

Key = tuple[int, int]
_RUNNING, _PREPARED = OperationState.RUNNING, OperationState.PREPARED
_COMMITTED, _FAILED = OperationState.COMMITTED, OperationState.FAILED


class FrozenError(PCCLError):
    """The epoch is frozen: the step has to wait for the next one."""


@dataclass(slots=True)
class Operation:
    """One operation of this peer."""

    state: OperationState
    epoch: int
    retry: bool
    failure: Failure | None = None
    root: str = ""


def _always() -> bool:
    return True


def _nothing_published() -> Iterable[Key]:
    return ()


class Ledger:
    """The operations that not everyone is known to have finished, by (tag, number)."""

    def __init__(self) -> None:
        self.frozen = False
        self.lease_ends = float("inf")
        """Without a word from the master until then, nothing moves any more."""
        self.lease_missed = False
        """Frozen by the lease, which the master does not know yet."""
        self.epoch = 0
        """The epoch that was decided last."""
        self.operations: dict[Key, Operation] = {}
        self.close_boards: Callable[[], Iterable[Key]] = _nothing_published
        """What the data plane does first when the epoch freezes: nobody may count on this peer's published inputs from
        then on. It returns the operations whose inputs were all published before: these are prepared (R8)."""
        self._numbers: dict[int, int] = {}
        self._oldest: dict[int, int] = {}
        """Of each tag, the last number known to be committed here: all before it are forgotten."""
        self._lock = threading.RLock()  # a signal handler may come while we hold it

    def enter(self, tag: int, epoch: int, now: float, *, retry: bool = True, root: str = "") -> Key:
        """The peer begins the next operation of this tag. It may have been consumed before: see its state."""
        return self.begin(tag, epoch, now, retry=retry, root=root)[0]

    def begin(
        self, tag: int, epoch: int, now: float, *, retry: bool, root: str, floor: int = 0
    ) -> tuple[Key, Operation]:
        """Like `enter`, with the operation itself, whose state tells what becomes of it.

        Its number is at least `floor`: so members that were of two minds about what came before meet again there.
        """
        with self._lock:
            self._require_thawed(now)
            self._require_epoch(epoch)
            number = max(floor, self._numbers.get(tag, 0))
            self._numbers[tag] = number + 1
            key = tag, number
            operation = self.operations.get(key)
            if operation is None:
                operation = self.operations[key] = Operation(_RUNNING, epoch, retry, None, root)
            return key, operation

    def again(self, key: Key, epoch: int, now: float) -> None:
        """The peer begins an aborted operation anew, with the members of this epoch."""
        with self._lock:
            self._require_thawed(now)
            self._require_epoch(epoch)
            operation = self.operations[key]
            if operation.state is _RUNNING:
                operation.epoch = epoch

    def prepare(self, key: Key, now: float, epoch: int | None = None) -> None:
        """The peer holds its full result.

        For this, `commit` and `fail`: an attempt says which `epoch` it was made in. If the epoch was frozen and decided
        meanwhile, it is `FrozenError`: what became of the operation stands in its state.
        """
        with self._lock:
            self._current(key, now, epoch).state = _PREPARED

    def commit(self, key: Key, now: float, stands: Callable[[], bool] = _always, epoch: int | None = None) -> bool:
        """The peer heard *prepared* from all members. All of them are past those before it (R2).

        `stands` is asked last, under the lock: what it doubts does not commit, and the answer is False.
        """
        with self._lock:
            operation = self._current(key, now, epoch)
            if not stands():
                return False
            operation.state = _COMMITTED
            tag, number = key
            for past in [past for of, past in self.operations if of == tag and past < number]:
                del self.operations[tag, past]
            self._oldest[tag] = number
            return True

    def fail(self, key: Key, failure: Failure, now: float, epoch: int | None = None) -> None:
        """The operation failed for good. Only one that is not prepared may refuse alone (R3)."""
        with self._lock:
            operation = self._current(key, now, epoch)
            if operation.state is not _RUNNING:
                raise PCCLError(f"operation {key} is {operation.state.value}: it can't fail on one peer alone")
            operation.state, operation.failure = _FAILED, failure

    def refused(self, key: Key, epoch: int, failure: Failure, now: float) -> bool:
        """Another member refused the operation before it was prepared there: it can't commit anywhere any more.

        Whoever enters it later gets the same error. Returns whether that is news.
        """
        with self._lock:
            self._require_thawed(now)
            operation = self.operations.get(key)
            if operation is None:
                if key[1] < self._numbers.get(key[0], 0):
                    return False  # an old one that all are past
                self.operations[key] = Operation(_FAILED, epoch, retry=False, failure=failure)
                return True
            if operation.state in (_COMMITTED, _FAILED):
                return False
            operation.state, operation.failure = _FAILED, failure
            return True

    def forget(self, key: Key) -> None:
        """Every member is known to be past this operation (R2)."""
        with self._lock:
            self.operations.pop(key, None)

    def snapshot(self) -> dict[Key, Operation]:
        """All operations that are kept."""
        with self._lock:
            return dict(self.operations)

    def freeze(self) -> None:
        """Nothing moves any more until `settle`."""
        with self._lock:
            if self.frozen:
                return
            self.frozen = True
            for key in self.close_boards():
                operation = self.operations.get(key)
                if operation is not None and operation.state is _RUNNING:
                    operation.state = _PREPARED

    def check_lease(self, now: float) -> None:
        """Freezes if the master was not heard for too long."""
        if now >= self.lease_ends and not self.frozen:
            self.freeze()
            self.lease_missed = True

    def report(self) -> tuple[OperationReport, ...]:
        """What a frozen peer answers."""
        with self._lock:
            return tuple(
                OperationReport(tag, number, op.state, op.epoch, op.retry, op.failure, op.root)
                for (tag, number), op in sorted(self.operations.items())
            )

    def settle(self, outcomes: Iterable[Outcome], epoch: int, *, restart_numbers: bool) -> None:
        """Applies a decision as a whole, and thaws."""
        with self._lock:
            for outcome in outcomes:
                self._apply(outcome, epoch)
            if restart_numbers:
                self.operations.clear()
                self._numbers.clear()
                self._oldest.clear()
            self.epoch = epoch
            self.frozen = False
            self.lease_missed = False

    def _apply(self, outcome: Outcome, epoch: int) -> None:
        key = (outcome.tag, outcome.number)
        operation = self.operations.get(key)
        if outcome.verdict is Verdict.CONSUME:
            if operation is None:
                self.operations[key] = Operation(_FAILED, outcome.epoch, retry=False, failure=outcome.failure)
            elif operation.state is not _COMMITTED:
                operation.state, operation.failure = _FAILED, outcome.failure
                operation.epoch, operation.retry = outcome.epoch, False
        elif operation is None or operation.state in (_COMMITTED, _FAILED):
            return
        elif outcome.verdict is Verdict.COMMIT:
            if operation.state is not _PREPARED:
                raise PCCLError(
                    f"operation {key} is to commit, but this peer holds no result: it is {operation.state.value}"
                )
            operation.state = _COMMITTED
        else:
            operation.state, operation.epoch = _RUNNING, epoch

    def _current(self, key: Key, now: float, epoch: int | None) -> Operation:
        """The operation, if this epoch's attempt at it still counts."""
        self._require_thawed(now)
        operation = self.operations.get(key)
        decided = operation is None or operation.state in (_COMMITTED, _FAILED)
        if operation is None or decided or epoch not in (None, operation.epoch):
            raise FrozenError(f"operation {key} was decided, or begun anew, since epoch {epoch}")
        return operation

    def _require_epoch(self, epoch: int) -> None:
        if self.epoch > epoch:
            raise FrozenError(f"epoch {epoch} is over: {self.epoch} has begun")

    def is_past(self, key: Key) -> bool:
        """Whether a later operation of its tag has committed here, so that everyone is past it."""
        return key[1] < self._oldest.get(key[0], 0)

    def _require_thawed(self, now: float) -> None:
        self.check_lease(now)
        if self.frozen:
            raise FrozenError("the epoch is frozen until the master has decided")
