"""The order of calls: what one caller asks a group for, every member does one after another, as it was asked.

An actor with one thread does so by itself. One with threads or an event loop may begin calls in any order; here they
wait for their turn. So all members are in the same call, whoever is how far with the others.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from ray_pccl.driver.errors import ActorLostError


class Lane:
    """The calls of one caller, by number."""

    def __init__(self) -> None:
        self._next: int | None = None
        self._first = 0
        """Calls before this one, as far as they are not here, never come."""
        self._arrived: set[int] = set()
        self._departed: set[int] = set()
        """Calls that ended before their turn."""
        self._changed = threading.Condition()

    def arrive(self, number: int, first: int) -> None:
        """A call is here, and may still have to wait for its value. Calls before `first` never come here.

        That may grow: a caller that took this actor for lost, and finds it a member all the same, begins anew with it.
        """
        with self._changed:
            self._first = max(self._first, first)
            if self._next is None:
                self._next = first
            if number >= self._next:
                self._arrived.add(number)
            self._go_on()

    def depart(self, number: int) -> None:
        """A call that arrived is over, whether it had its turn or not: nobody waits for it any more."""
        with self._changed:
            self._arrived.discard(number)
            self._pass(number)

    def _pass(self, number: int) -> None:
        if self._next is not None and number >= self._next:
            self._departed.add(number)
            self._go_on()

    def _go_on(self) -> None:
        """Passes over what has ended, and what never comes."""
        while self._next is not None and (
            self._next in self._departed or (self._next < self._first and self._next not in self._arrived)
        ):
            self._departed.discard(self._next)
            self._next += 1
        self._changed.notify_all()

    @contextlib.contextmanager
    def turn(self, number: int, patience: float) -> Iterator[None]:
        """Waits for the calls before this one, and lets the next one in at the end.

        Those that do not even arrive within `patience` seconds, which their caller must have lost, are passed over.
        """
        self._await(number, patience)
        try:
            yield
        finally:
            self.depart(number)

    def _await(self, number: int, patience: float) -> None:
        with self._changed:
            waiting_for, ends = self._next, time.monotonic() + patience
            while self._next is not None and self._next < number:
                if self._next != waiting_for or self._next in self._arrived:
                    waiting_for, ends = self._next, time.monotonic() + patience
                self._changed.wait(max(0.0, ends - time.monotonic()))
                if time.monotonic() >= ends and self._next == waiting_for and self._next not in self._arrived:
                    self._pass(waiting_for)
            if self._next != number:
                raise ActorLostError("this call came too late: the group has gone on without it")
