"""The order of calls: what one caller asks a group for, every member does one after another, as it was asked.

An actor with one thread does so by itself. One with threads or an event loop may begin calls in any order; here they
wait for their turn. So all members pair the same calls, and one tag does for all calls of a caller.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from ray_pccl.driver.errors import ActorLostError

OPENING_S = 5.0
"""How long a call waits for the first one of its caller, which may have been overtaken."""


class Lane:
    """The calls of one caller, by number."""

    def __init__(self) -> None:
        self._next: int | None = None
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def turn(self, number: int, patience: float, skip: Callable[[], None], *, first: bool) -> Iterator[None]:
        """Waits for the calls before this one, and lets the next one in at the end.

        `first`: no earlier ones will come here. Where earlier ones never come, which their caller must have lost,
        `skip` is called once for each of them after `patience` seconds, so that other members do not wait for them.
        """
        missing = self._await(number, patience, first=first)
        try:
            for _ in range(missing):
                skip()
            yield
        finally:
            with self._changed:
                self._next = number + 1
                self._changed.notify_all()

    def _await(self, number: int, patience: float, *, first: bool) -> int:
        with self._changed:
            if first:
                self._next = number
                self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._next is not None, OPENING_S):
                raise ActorLostError("this process is not the one that its caller knows: it was restarted")
            ends = time.monotonic() + patience
            while self._next is not None and self._next < number:
                if not self._changed.wait(ends - time.monotonic()):
                    missing, self._next = number - self._next, number
                    return missing
            if self._next != number:
                raise ActorLostError("this call came too late: the group has gone on without it")
            return 0
