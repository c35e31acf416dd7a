"""Membership events on their way to the user's callbacks, in a thread of their own."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from ray_pccl.types import MembershipEvent

log = logging.getLogger("ray_pccl.peer")

Callback = Callable[[MembershipEvent], None]
Events = queue.SimpleQueue[MembershipEvent | None]


class EventQueue:
    """Calls callbacks in the order of events, without holding up who reports them."""

    def __init__(self) -> None:
        self._queue: Events = queue.SimpleQueue()
        self._callbacks: list[Callback] = []
        self._lock = threading.RLock()  # the collector may close us while we hold it
        self._thread: threading.Thread | None = None

    def subscribe(self, callback: Callback) -> None:
        """Calls `callback` with every event from now on."""
        with self._lock:
            self._callbacks.append(callback)

    def put(self, event: MembershipEvent) -> None:
        """Reports an event. Never blocks."""
        with self._lock:
            if not self._callbacks:
                return
            if self._thread is None:
                # A queue of its own: the thread before it may still be in a callback, with its own end before it.
                self._queue = queue.SimpleQueue()
                self._thread = threading.Thread(
                    target=self._run, args=(self._queue,), name="ray_pccl-events", daemon=True
                )
                self._thread.start()
            self._queue.put(event)

    def close(self) -> None:
        """Ends the thread once it has told all; a later event starts it anew."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._queue.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)

    def _run(self, events: Events) -> None:
        while (event := events.get()) is not None:
            for callback in list(self._callbacks):
                try:
                    callback(event)
                except BaseException:  # a SystemExit, too: this is no place to exit from
                    log.exception("a membership callback raised on %s", event)
