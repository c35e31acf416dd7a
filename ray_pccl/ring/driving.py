"""Who takes the steps of operations through shared memory: the caller itself, or one thread for all that run behind.

A wait spins for a moment, giving the core away where there are more ranks than cores, and then sleeps at the bell.
"""

from __future__ import annotations

import logging
import os
import threading
import time

from ray_pccl.errors import NotConnectedError
from ray_pccl.ring.shared import SharedAttempt, SharedMemory, Steps

log = logging.getLogger("ray_pccl.ring")

SPINS = 400
YIELDS = 200
NAP_S = 0.002
"""The longest sleep: a ring that was missed costs no more."""
_CORES = len(os.sched_getaffinity(0))
_END = object()


_here = threading.local()


def wait_patiently() -> None:
    """From now on this thread's waits sleep at once: it works beside others, which compute, and need the core."""
    _here.patient = True


class Pause:
    """How to wait between two looks at memory that others write."""

    def __init__(self, shared: SharedMemory, ranks: int) -> None:
        self._shared = shared
        patient = getattr(_here, "patient", False)
        self._spins = SPINS if ranks <= _CORES and not patient else 0
        self._yields = 0 if patient else YIELDS
        self._looks = 0
        self._asleep = False
        self._seen = 0

    def progress(self) -> None:
        """Something moved: the next wait starts afresh."""
        self._looks = 0

    def __call__(self) -> None:
        """Waits for a moment. After a while it says first that it will sleep, and sleeps at the next call."""
        self._looks += 1
        if self._looks <= self._spins:
            return
        if self._looks <= self._spins + self._yields:
            os.sched_yield()
        elif not self._asleep:
            self._seen = self._shared.bell.now()
            self._shared.doze(asleep=True)
            self._asleep = True
        else:
            self._shared.bell.wait(self._seen, NAP_S)
            self.wake()

    def wake(self) -> None:
        """Is not asleep any more."""
        if self._asleep:
            self._asleep = False
            self._shared.doze(asleep=False)


def drive(shared: SharedMemory, attempt: SharedAttempt, steps: Steps) -> None:
    """Takes all steps, in this thread. Raises what they raise, or why the attempt was stopped."""
    pause = Pause(shared, attempt.epoch.size)
    moves = -1
    try:
        for _ in steps:
            check(attempt)
            if attempt.moves != moves:
                moves = attempt.moves
                pause.progress()
            pause()
    finally:
        steps.close()
        pause.wake()


def check(attempt: SharedAttempt) -> None:
    """Raises if the attempt was stopped, or has waited for too long for all to enter; what moves may take its time."""
    attempt.check()
    missing = len(attempt.places) < attempt.epoch.size - 1
    if missing and time.monotonic() >= attempt.deadline and attempt.withdraw():
        raise attempt.too_late(attempt.entered)


class Driver:
    """A thread that takes the steps of all operations handed to it."""

    def __init__(self, shared: SharedMemory) -> None:
        self._shared = shared
        self._new: list[_Ride] = []
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def drive(self, attempt: SharedAttempt, steps: Steps) -> None:
        """Has the thread take all steps, and waits for the end."""
        ride = _Ride(attempt, steps)
        with self._condition:
            if self._closed:
                raise NotConnectedError("the communicator was closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ray_pccl-driver", daemon=True)
                self._thread.start()
            self._new.append(ride)
            self._condition.notify()
        self._shared.bell.ring()
        ride.ended.wait()
        if ride.error is not None:
            raise ride.error

    def close(self) -> None:
        """Ends the thread; its attempts have been stopped before."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        if self._thread is not None:
            self._shared.bell.ring()
            self._thread.join(5.0)

    def _run(self) -> None:
        riding: list[_Ride] = []
        pause = Pause(self._shared, _CORES + 1)
        while True:
            with self._condition:
                while not riding and not self._new:
                    if self._closed:
                        return
                    self._condition.wait()
                fresh, self._new = self._new, []
            riding += fresh
            moved = bool(fresh)
            for ride in list(riding):
                before = ride.attempt.moves
                if ride.step():
                    riding.remove(ride)
                    moved = True
                moved |= ride.attempt.moves != before
            if moved:
                pause.progress()
            if riding:
                pause()
            else:
                pause.wake()


class _Ride:
    def __init__(self, attempt: SharedAttempt, steps: Steps) -> None:
        self.attempt = attempt
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self._steps = steps

    def step(self) -> bool:
        """Goes on as far as it can; whether it has ended."""
        try:
            if next(self._steps, _END) is not _END:
                check(self.attempt)
                return False
        except BaseException as error:
            self.error = error
            self._steps.close()
        self.ended.set()
        return True
