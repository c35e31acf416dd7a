"""What Ray's metrics show of us: counters, gauges and histograms, from every peer and from the master.

Ray puts its own labels to each (node, worker), and ``ray_`` before the name; counters end in ``_total``. So
``pccl_operations`` is ``ray_pccl_operations_total`` at Prometheus. `docs/guides/observing.md` lists them all.

Nothing is recorded on the path of a collective: what was counted since the last time is handed over every
`EXPORT_EVERY_S`, by threads that we have anyway. Without Ray in the process nothing happens.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from collections import Counter as Count
from typing import Any

from ray_pccl.peer.statistics import BOUNDS_S, Recorder
from ray_pccl.reports import Happening, HappeningKind, MasterReport

log = logging.getLogger("ray_pccl.metrics")

EXPORT_EVERY_S = 2.0
MOST_OBSERVATIONS = 1000
"""More latencies of a kind in one stretch are thinned out evenly: the histogram keeps its shape, counters are exact."""
_SECONDS = [
    1e-5,
    2e-5,
    5e-5,
    1e-4,
    2e-4,
    5e-4,
    1e-3,
    2e-3,
    5e-3,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
    60.0,
]

_COUNTERS = {
    "pccl_operations": ("Collectives and messages that committed.", ("group", "kind")),
    "pccl_bytes": ("Bytes of their tensors: of the output, or of the input where a peer gets none.", ("group",)),
    "pccl_aborts": ("Attempts that a death ended.", ("group",)),
    "pccl_retries": ("Attempts after the first.", ("group",)),
    "pccl_failures": ("Calls that raised.", ("group",)),
    "pccl_epochs": ("Epochs that this peer has seen begin.", ("group",)),
    "pccl_recoveries": ("Epochs after a death that this peer has seen begin.", ("group",)),
    "pccl_master_epochs": ("Epochs that the master has begun.", ("group",)),
    "pccl_master_recoveries": ("Epochs after a death.", ("group",)),
    "pccl_master_losses": ("Members that died or were evicted.", ("group",)),
    "pccl_master_evictions": ("Members put out whose process may still have been running.", ("group",)),
}
_GAUGES = {
    "pccl_in_flight": ("Collectives that have not returned yet.", ("group",)),
    "pccl_epoch": ("The epoch that this peer is in.", ("group",)),
    "pccl_world_size": ("The members of that epoch.", ("group",)),
    "pccl_store_bytes": ("Bytes of tensors that this process keeps for ObjectRefs.", ()),
    "pccl_master_boot": ("How often the master was started on its journal.", ()),
    "pccl_master_members": ("Members of a group.", ("group",)),
    "pccl_master_waiting": ("Peers that wait for admission.", ("group",)),
}
_HISTOGRAMS = {
    "pccl_operation_seconds": ("From a call to its return.", ("group", "kind")),
    "pccl_recovery_seconds": ("From a peer's freeze until it holds the next epoch.", ("group",)),
    "pccl_master_recovery_seconds": ("From the notice of a death until all survivors were told.", ("group",)),
}
NAMES = (*_COUNTERS, *_GAUGES, *_HISTOGRAMS)

_made: dict[str, Any] = {}


def ray_is_here() -> bool:
    """Whether Ray runs in this process. Never imports it."""
    is_initialized = getattr(sys.modules.get("ray"), "is_initialized", None)  # it may be in mid-import
    return is_initialized is not None and bool(is_initialized())


def _metric(name: str) -> Any:
    """The metric of this name, made when it is first needed."""
    if name not in _made:
        from ray.util import metrics

        for kind, table in ((metrics.Counter, _COUNTERS), (metrics.Gauge, _GAUGES)):
            if name in table:
                about, tags = table[name]
                _made[name] = kind(name, description=about, tag_keys=tags)
        if name in _HISTOGRAMS:
            about, tags = _HISTOGRAMS[name]
            _made[name] = metrics.Histogram(name, description=about, boundaries=_SECONDS, tag_keys=tags)
    return _made[name]


def _add(name: str, amount: float, **tags: str) -> None:
    if amount > 0:
        _metric(name).inc(amount, tags=tags)


def _set(name: str, value: float, **tags: str) -> None:
    _metric(name).set(value, tags=tags)


def thinned(counts: list[int]) -> list[int]:
    """As many as may be handed over at once, in the same proportions; what was rare stays."""
    total = sum(counts)
    if total <= MOST_OBSERVATIONS:
        return counts
    return [max(1, round(count * MOST_OBSERVATIONS / total)) if count else 0 for count in counts]


def middle(bucket: int) -> float:
    """A time inside a bucket of `BOUNDS_S`."""
    if bucket == 0:
        return BOUNDS_S[0]
    if bucket == len(BOUNDS_S):
        return BOUNDS_S[-1] * 2
    return math.sqrt(BOUNDS_S[bucket - 1] * BOUNDS_S[bucket])


class PeerMetrics:
    """Hands over what one communicator has counted."""

    def __init__(self, group: str, recorder: Recorder) -> None:
        self._group = group
        self._recorder = recorder
        self._told: Count[str] = Count()
        self._told_buckets: dict[str, list[int]] = {}

    def export(self, epoch: int, world_size: int) -> None:
        """Hands over what has come since the last time; in epoch 0, that there is nothing any more.

        Raises nothing: an onlooker must not disturb.
        """
        if not ray_is_here():
            return
        from ray_pccl.driver import internals

        with contextlib.suppress(internals.RayGoneError):
            try:
                with internals.in_background():
                    self._export(epoch, world_size)
            except internals.RayGoneError:
                raise
            except Exception:
                log.exception("metrics of group %r could not be handed to Ray", self._group)

    def _export(self, epoch: int, world_size: int) -> None:
        recorder, group = self._recorder, self._group
        for name in ("bytes", "aborts", "retries", "failures", "epochs"):
            self._grow(name, getattr(recorder, name))
        recovered = recorder.recoveries - self._told["recoveries"]
        self._grow("recoveries", recorder.recoveries)
        if recovered > 0 and recorder.last_recovery_ms is not None:
            _metric("pccl_recovery_seconds").observe(recorder.last_recovery_ms / 1000, tags={"group": group})
        for kind, durations in list(recorder.durations.items()):
            before = self._told_buckets.get(kind, [0] * len(durations.buckets))
            now = list(durations.buckets)
            fresh = [after - earlier for after, earlier in zip(now, before, strict=True)]
            self._told_buckets[kind] = now
            _add("pccl_operations", sum(fresh), group=group, kind=kind)
            for bucket, count in enumerate(thinned(fresh)):
                for _ in range(count):
                    _metric("pccl_operation_seconds").observe(middle(bucket), tags={"group": group, "kind": kind})
        _set("pccl_in_flight", len(recorder.running()) if epoch else 0, group=group)
        _set("pccl_epoch", epoch, group=group)
        _set("pccl_world_size", world_size, group=group)
        _set("pccl_store_bytes", recorder.store_bytes())

    def _grow(self, name: str, total: int) -> None:
        _add(f"pccl_{name}", total - self._told[name], group=self._group)
        self._told[name] = total


class MasterMetrics:
    """Hands over what a master reports; in the actor, so Ray is there."""

    def __init__(self) -> None:
        self.since = 0
        """The number of the last happening that was counted."""
        self._evictions: Count[str] = Count()

    def export(self, report: MasterReport) -> None:
        """Hands over a report of what happened after `since`."""
        _set("pccl_master_boot", report.boot)
        for group in report.groups:
            _set("pccl_master_members", len(group.members), group=group.name)
            _set("pccl_master_waiting", len(group.waiting), group=group.name)
            _add("pccl_master_evictions", group.evictions - self._evictions[group.name], group=group.name)
            self._evictions[group.name] = group.evictions
        for name in self._evictions.keys() - {group.name for group in report.groups}:  # the master has forgotten it
            _set("pccl_master_members", 0, group=name)
            _set("pccl_master_waiting", 0, group=name)
            del self._evictions[name]
        for happening in report.happenings:
            self._count(happening)
            self.since = happening.number

    @staticmethod
    def _count(happening: Happening) -> None:
        group, kind = happening.group, happening.kind
        if kind in (HappeningKind.EPOCH, HappeningKind.RECOVERED):
            _add("pccl_master_epochs", 1, group=group)
        if kind is HappeningKind.LOST:
            _add("pccl_master_losses", 1, group=group)
        if kind is HappeningKind.RECOVERED:
            _add("pccl_master_recoveries", 1, group=group)
            if happening.took_ms is not None:
                _metric("pccl_master_recovery_seconds").observe(happening.took_ms / 1000, tags={"group": group})
