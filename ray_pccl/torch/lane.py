"""The order of a process group's calls: one after another, as they were issued, behind the caller's back or not."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from ray_pccl.ring.driving import wait_patiently

_JOIN_S = 10.0
Call = Callable[[], Callable[[], None] | None]
"""Raises nothing. What it returns is to run after it, when the next one may be on already."""


class Lane:
    """Runs calls one at a time, in the order in which they were given.

    One that the caller waits for anyhow runs in the caller's own thread if nothing is before it: to hand it to
    another thread and back would take longer than a small collective. What follows a call, the user's callbacks, holds
    nobody up: they may well wait for a later call, which then runs in another thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._waiting: deque[Call] = deque()
        self._busy = False
        self._over = False
        self._idle = 0
        self._threads: list[threading.Thread] = []

    def submit(self, call: Call) -> None:
        """Has it run behind the caller's back."""
        with self._lock:
            self._waiting.append(call)
            self._summon()

    def enter(self) -> bool:
        """Whether nothing is before a call of this thread's own: then it is on until `leave()`."""
        with self._lock:
            if self._busy or self._waiting:
                return False
            self._busy = True
            return True

    def leave(self) -> None:
        """The call that is on has ended."""
        with self._lock:
            self._busy = False
            self._summon()

    def close(self) -> None:
        """Ends the threads when all that was given has run; called when nothing blocks any more."""
        deadline = time.monotonic() + _JOIN_S
        with self._lock:
            self._over = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self._waiting, _JOIN_S)
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _summon(self) -> None:
        """Sees that a thread takes the next call, if it may begin. The lock is held."""
        if self._busy or not self._waiting:
            return
        if self._idle:
            self._condition.notify()
        else:
            thread = threading.Thread(target=self._run, name=f"ray_pccl-{self._name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self) -> None:
        wait_patiently()  # beside a backward pass, as a rule
        while (call := self._next()) is not None:
            follow_up = call()
            del call  # it holds the user's tensors
            self.leave()
            if follow_up is not None:
                follow_up()
                del follow_up

    def _next(self) -> Call | None:
        with self._lock:
            while self._busy or not self._waiting:
                if self._over and not self._waiting:
                    self._threads.remove(threading.current_thread())
                    return None
                self._idle += 1
                self._condition.wait()
                self._idle -= 1
            self._busy = True
            call = self._waiting.popleft()
            if self._over:
                self._condition.notify_all()
            return call
