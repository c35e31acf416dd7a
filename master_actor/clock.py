"""Time as the master's decisions see it: it stands still while the master itself was held up.

A process that was not scheduled, or whose journal took long to answer, has not listened: what it did not hear meanwhile
is nobody's fault. So no deadline of the core runs in that time, and the core need not know of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

ABSENCE_S = 0.25
"""Between two looks at the clock, far more often than this while the master runs, so much means that it did not."""
WRITE_S = 0.05
"""What a journal write may take before the clock waits for it."""


class MasterClock:
    """A monotonic clock that leaves out the master's own absences."""

    def __init__(self, source: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._looked = source()
        self._lost = 0.0
        self._stands_at: float | None = None

    def read(self) -> float:
        """The time now."""
        raw = self._source()
        if raw - self._looked > ABSENCE_S:
            self._lost += raw - self._looked
        self._looked = raw
        now = raw - self._lost
        return now if self._stands_at is None else min(now, self._stands_at)

    def hold(self) -> None:
        """Something has begun that the master waits for: a moment later the clock stands still."""
        self._stands_at = self.read() + WRITE_S

    def release(self) -> None:
        """It has ended: the clock goes on from where it stood."""
        stood_at, self._stands_at = self._stands_at, None
        if stood_at is not None:
            over = self.read() - stood_at
            self._lost += max(0.0, over)
