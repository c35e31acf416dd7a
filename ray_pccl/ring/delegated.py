"""One attempt whose data another library moves: all enter, rank 0 grants it, the library does it, all are prepared."""

from __future__ import annotations

import time
from collections.abc import Callable

from ray_pccl.control.messages import Failure
from ray_pccl.errors import DelegatedBackendError
from ray_pccl.ring.delegate import Delegate, Job
from ray_pccl.ring.link import Link
from ray_pccl.ring.linked import LinkedAttempt
from ray_pccl.ring.programs import Program
from ray_pccl.ring.task import Attempt, RefusedError
from ray_pccl.ring.wire import Type

LEADER = 0
"""The rank that gives the order of operations."""


class Delegated(Program):
    """Nothing moves over our links; one piece is due: that the library has done its part."""

    def __init__(self, attempt: Attempt, port: LinkedAttempt, job: Job) -> None:
        super().__init__(attempt.task, attempt.epoch, port)
        self._job = job
        self.due = 1

    def finish(self) -> None:
        """Brings the library's result to where this rank's is built."""
        if self.task.out is not None:
            self._job.deliver(self.task.out)


class DelegatedAttempt(LinkedAttempt):
    """A `LinkedAttempt` that waits for its grant, and then for the library."""

    def __init__(
        self,
        attempt: Attempt,
        job: Job,
        delegate: Delegate,
        whole: Callable[[], bool],
        call: Callable[[Callable[[], None]], None],
        flush: Callable[[Link], None],
        on_end: Callable[[LinkedAttempt], None],
    ) -> None:
        self._job = job
        self._delegate = delegate
        self._whole = whole
        self._call = call
        self._generation: int | None = None
        """Of the library's group that does it, once it was granted."""
        self._failure: Exception | None = None
        self._failed_at = 0.0
        super().__init__(attempt, flush, on_end)

    def _new_program(self) -> Program:
        return Delegated(self.attempt, self, self._job)

    def _advance(self) -> None:
        epoch = self.attempt.epoch
        leads = epoch.rank == LEADER and self._generation is None and len(self._entered) == epoch.size
        if leads and not self.ended.is_set() and not self._stopped():
            try:
                self._generation = self._delegate.grant(self._job, self._when_done)
            except Exception as error:  # no thread is to be had for the library, for instance
                self.end(error)
                return
            self._tell(Type.GRANT, self._generation.to_bytes(8, "little"))
        super()._advance()

    def granted(self, generation: int) -> None:
        """Rank 0 has heard all enter what it has entered, and so has this rank: the operation's turn has come."""
        self._entered.update(range(self.attempt.epoch.size))
        self._generation = generation
        self._delegate.granted(generation, self._job, self._when_done)

    def _when_done(self, error: Exception | None) -> None:
        self._call(lambda: self._done(error))

    def _done(self, error: Exception | None) -> None:
        if error is None:
            self._program.due = 0
            self._advance()
        elif self._failure is None:
            self._failure, self._failed_at = error, time.monotonic()

    def tick(self, now: float) -> None:
        """Ends it also when the library failed, or does not end, and nobody has died.

        Of a death the master has to tell us first.
        """
        super().tick(now)
        if self._failure is None and self._generation is not None and not self.ended.is_set() and self._program.due:
            overdue = self._delegate.overdue(self._generation, self._job, now)
            if overdue is not None:
                self._failure, self._failed_at = overdue, now
        failure = self._failure
        if failure is None or self.ended.is_set() or now < self._failed_at + self._delegate.grace_s:
            return
        if self._whole():
            epoch, backend = self.attempt.epoch, self._delegate.backend.name
            me = epoch.members[epoch.rank]
            text = (
                f"{backend} failed on peer {me}, though all members live: {failure}; the next operation gets a new "
                f"group of {backend}"
            )
            self.end(RefusedError(Failure("DelegatedBackendError", text, {"backend": backend, "peer": me})))

    def end(self, error: BaseException | None) -> None:
        """Ends it. What the library was asked to do goes on without us, in its own memory."""
        if not self.ended.is_set():
            if self._generation is None:
                self._delegate.ended(self.attempt.key, self.attempt.task.recipe)
            elif isinstance(error, DelegatedBackendError) or (
                isinstance(error, RefusedError) and error.failure.error == "DelegatedBackendError"
            ):
                self._delegate.broken(self._generation)
        super().end(error)
