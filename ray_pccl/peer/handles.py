"""What an `_async` call returns, and the threads that run such calls."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from enum import Enum

from ray_pccl.descriptors import ReduceInfo
from ray_pccl.errors import (
    CollectiveMismatchError,
    OperationTimeoutError,
    PeerEvictedError,
    PeerLostError,
    TooFewPeersError,
)
from ray_pccl.settings import check_timeout


class Status(Enum):
    """How an operation ended, for who would rather look than catch."""

    SUCCESS = "success"
    """It has committed."""
    RUNNING = "running"
    """It has not ended within the time that `wait` was given, and goes on."""
    PEER_LOST = "peer lost"
    """`PeerLostError`."""
    MISMATCH = "mismatch"
    """`CollectiveMismatchError`."""
    TIMEOUT = "timeout"
    """`OperationTimeoutError`."""
    TOO_FEW_PEERS = "too few peers"
    """`TooFewPeersError`."""
    EVICTED = "evicted"
    """`PeerEvictedError`."""
    ERROR = "error"
    """Any other; `Handle.exception` has it."""


_STATUS_OF = {
    PeerLostError: Status.PEER_LOST,
    CollectiveMismatchError: Status.MISMATCH,
    OperationTimeoutError: Status.TIMEOUT,
    TooFewPeersError: Status.TOO_FEW_PEERS,
    PeerEvictedError: Status.EVICTED,
}


class Handle:
    """An operation in flight. Dropping it, or not waiting for it, changes nothing for anyone."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._info: ReduceInfo | None = None
        self._error: BaseException | None = None

    def wait(self, timeout: float | None = None) -> tuple[bool, Status, ReduceInfo | None]:
        """Waits for the end: whether it succeeded, how it ended, and what it moved. Raises nothing of its own.

        With a `timeout` in seconds that runs out, the operation goes on: (False, Status.RUNNING, None).
        """
        if not self._ended.wait(None if timeout is None else check_timeout(timeout, "wait()")):
            return False, Status.RUNNING, None
        if self._error is not None:
            return False, _STATUS_OF.get(type(self._error), Status.ERROR), None  # type: ignore[arg-type]
        return True, Status.SUCCESS, self._info

    def done(self) -> bool:
        """Whether it has ended."""
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> ReduceInfo:
        """Waits for the end and returns what it moved, or raises why it failed; `TimeoutError` if it goes on."""
        if not self._ended.wait(None if timeout is None else check_timeout(timeout, "result()")):
            raise TimeoutError(f"the operation has not ended within {timeout:g} s; it goes on")
        if self._error is not None:
            raise self._error
        assert self._info is not None
        return self._info

    def exception(self) -> BaseException | None:
        """Why it failed, if it has ended and failed."""
        return self._error

    def run(self, function: Callable[[], ReduceInfo]) -> None:
        """Runs the operation, and keeps what it returns or raises."""
        try:
            self._info = function()
        except BaseException as error:
            self._error = error
        self._ended.set()


class Workers:
    """Daemon threads that run calls behind their caller's back; as many as there are calls, kept for the next ones."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._busy = 0
        self._closed = False

    def submit(self, function: Callable[[], None]) -> None:
        """Runs a function, which raises nothing, as soon as a thread is free, and one always is.

        After `close()` it runs in the caller's thread: what is under way then has failed, and blocks nobody.
        """
        with self._lock:
            closed = self._closed
            if not closed:
                self._busy += 1
                if self._busy > self._threads:
                    self._threads += 1
                    threading.Thread(target=self._run, name="ray_pccl-operation", daemon=True).start()
                self._work.put(function)  # before the ends that close() puts there
        if closed:
            function()

    def close(self) -> None:
        """Ends the threads once they are through."""
        with self._lock:
            self._closed = True
            for _ in range(self._threads):
                self._work.put(None)
            self._threads = 0

    def _run(self) -> None:
        while (function := self._work.get()) is not None:
            function()
            del function  # it may hold the user's tensors
            with self._lock:
                self._busy -= 1
