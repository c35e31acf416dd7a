"""What a peer has done, counted as it goes: for `Communicator.statistics()`, the master's report, and metrics.

Counting is on the path of every collective, so it is a few additions under a lock; all that is worked out from them is
worked out when somebody asks.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

from ray_pccl.control.messages import Running, Tally

STEPS_A_DECADE = 10
BOUNDS_S = tuple(10 ** (step / STEPS_A_DECADE) for step in range(-6 * STEPS_A_DECADE, 3 * STEPS_A_DECADE + 1))
"""Where one bucket of a latency ends and the next begins: from a microsecond to 1,000 s, each 26 % above the last."""
MOST_RUNNING = 32
"""So many operations in flight are told one by one; the longest-running."""


@dataclass(frozen=True, slots=True)
class Latency:
    """How long calls of one kind took, from the call to its return, retries and waits for other members included."""

    count: int
    mean_s: float
    p50_s: float
    """Half of them took no longer; to within a bucket, 26 %."""
    p99_s: float
    max_s: float


@dataclass(frozen=True, slots=True)
class Statistics:
    """What this communicator has done since `connect()`: a snapshot."""

    operations: int
    """Collectives and messages that committed."""
    bytes: int
    """Bytes of their tensors: of the output, or of the input where a peer gets none."""
    aborts: int
    """Attempts that a death ended."""
    retries: int
    """Attempts after the first."""
    failures: int
    """Calls that raised."""
    in_flight: int
    """Collectives that have not returned yet."""
    epochs: int
    """Epochs that this peer has seen begin."""
    recoveries: int
    """Those of them that followed a death."""
    last_recovery_ms: float | None
    """The last of these: from this peer's freeze until it held the next epoch."""
    latency: dict[str, Latency]
    """By kind, such as ``all_reduce``: of calls that returned."""


@dataclass(slots=True)
class Durations:
    """A histogram that is cheap to add to."""

    count: int = 0
    total_s: float = 0.0
    max_s: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))

    def add(self, seconds: float) -> None:
        """One more."""
        self.count += 1
        self.total_s += seconds
        self.max_s = max(self.max_s, seconds)
        self.buckets[bisect_left(BOUNDS_S, seconds)] += 1

    def quantile(self, share: float) -> float:
        """What this share of all did not exceed: the end of its bucket, or the longest of all if that is less."""
        wanted, seen = share * self.count, 0
        for bound, number in zip(BOUNDS_S, self.buckets, strict=False):
            seen += number
            if seen >= wanted:
                return min(bound, self.max_s)
        return self.max_s

    def summary(self) -> Latency:
        """What users see of it."""
        return Latency(self.count, self.total_s / self.count, self.quantile(0.5), self.quantile(0.99), self.max_s)


def _nothing_kept() -> int:
    return 0


class Recorder:
    """Counts what one membership does. For any thread."""

    store_bytes: Callable[[], int] = staticmethod(_nothing_kept)
    """How much this process keeps for ObjectRefs; the driver's side puts its own function here."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may call a collective while we hold it
        self.changes = 0
        """Grows with everything that is counted."""
        self.operations = self.bytes = self.aborts = self.retries = self.failures = 0
        self.epochs = self.recoveries = 0
        self.last_recovery_ms: float | None = None
        self.durations: dict[str, Durations] = {}
        self.running: Callable[[], list[Running]] = list
        """The operations in flight, the longest-running first."""
        self._frozen_at: float | None = None

    def committed(self, kind: str, moved: int, seconds: float) -> None:
        """A call returned."""
        with self._lock:
            self.changes += 1
            self.operations += 1
            self.bytes += moved
            durations = self.durations.get(kind)
            if durations is None:
                durations = self.durations[kind] = Durations()
            durations.add(seconds)

    def aborted(self) -> None:
        """A death ended an attempt, which is tried again."""
        with self._lock:
            self.changes += 1
            self.aborts += 1
            self.retries += 1

    def failed(self) -> None:
        """A call raised."""
        with self._lock:
            self.changes += 1
            self.failures += 1

    def froze(self, now: float) -> None:
        """The master asked this peer to freeze."""
        if self._frozen_at is None:
            self._frozen_at = now

    def began(self, now: float, *, recovers: bool) -> None:
        """A new epoch began."""
        with self._lock:
            self.changes += 1
            self.epochs += 1
            if recovers:
                self.recoveries += 1
                if self._frozen_at is not None:
                    self.last_recovery_ms = 1000 * (now - self._frozen_at)
            self._frozen_at = None

    def snapshot(self) -> Statistics:
        """All of it, at one moment."""
        in_flight = len(self.running())
        with self._lock:
            return Statistics(
                self.operations,
                self.bytes,
                self.aborts,
                self.retries,
                self.failures,
                in_flight,
                self.epochs,
                self.recoveries,
                self.last_recovery_ms,
                {kind: durations.summary() for kind, durations in self.durations.items()},
            )

    def tally(self) -> Tally:
        """What the master is told."""
        running = self.running()
        return Tally(
            self.operations,
            self.bytes,
            self.aborts,
            self.retries,
            self.failures,
            len(running),
            tuple(running[:MOST_RUNNING]),
            self.store_bytes(),
        )
