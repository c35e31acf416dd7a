"""What open pages are sent: one encoding a tick for all, and a whole one for who comes or has fallen behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ray_pccl.reports import GroupReport, MasterReport, to_json

Report = Callable[[int], MasterReport]
"""A report with the happenings after this number."""


@dataclass(frozen=True, slots=True)
class Update:
    """One message of a stream."""

    tick: int
    last: int
    """The number of the last happening that it, or one before it, tells."""
    data: bytes


class Feed:
    """Turns reports into messages. Called once a tick, whatever the number of pages.

    A report of 1,000 members is 200 KB, most of it figures of members. What only grows, happenings and the history of
    throughput, is told once: an `Update` of the next tick goes on where the one before ended.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._tick = 0
        self._last = 0
        self._sampled: dict[str, float] = {}
        self._update: Update | None = None
        self._whole: dict[int, Update] = {}

    def advance(self) -> Update:
        """Makes the next tick, and what tells a page that has the tick before all that is new since."""
        report = self._report(self._last)
        self._tick += 1
        self._last = _last_of(report, self._last)
        self._whole.clear()
        groups = tuple(self._newest_of(group) for group in report.groups)
        self._sampled = {group.name: group.history[-1].at for group in report.groups if group.history}
        data = to_json(msgspec.structs.replace(report, groups=groups))
        self._update = Update(self._tick, self._last, data)
        return self._update

    def whole(self, since: int) -> Update:
        """All there is to tell, with the happenings after this number; it lets a page go on with the next tick."""
        if self._update is None:
            self.advance()
        if (known := self._whole.get(since)) is None:
            report = self._report(since)
            # What happened since the tick is in here, and will be in the next tick's update once more: pages tell
            # happenings apart by their number.
            known = self._whole[since] = Update(self._tick, _last_of(report, since), to_json(report))
        return known

    def _newest_of(self, group: GroupReport) -> GroupReport:
        told = self._sampled.get(group.name)
        if told is None:
            return group
        return msgspec.structs.replace(group, history=tuple(sample for sample in group.history if sample.at > told))


def _last_of(report: MasterReport, otherwise: int) -> int:
    return report.happenings[-1].number if report.happenings else otherwise
