"""What the master knows of the network: bandwidth from host to host, and how old each figure is."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

FALLEN = 0.5
"""An edge that carries less than this part of what was measured has changed: nothing is known of it any more."""


@dataclass(slots=True)
class Figure:
    """Bytes per second; 0 where no connection could be made."""

    rate: float
    reference: float
    """The last probe, or the best seen since: what observations are compared with, and rings are ordered by."""
    at: float


@dataclass(frozen=True, slots=True)
class Sight:
    """What an edge was last seen to carry, while nothing is known of it."""

    rate: float
    at: float


class Bandwidth:
    """The figures of one group. Within a host there is no limit, and nothing to know."""

    def __init__(self) -> None:
        self._figures: dict[str, dict[str, Figure]] = {}
        """By source, then by target."""
        self._seen: dict[tuple[str, str], Sight] = {}
        """Of unknown edges. An edge that fell is one: a probe from before then, told again, must not raise it."""
        self._useless: dict[str, set[str]] = {}
        """Edges that could not connect, by source: those of which the rate is 0."""
        self._packed: dict[str, bytes] = {}
        """What `packed` made of a row, until that changes."""
        self._packed_for: tuple[str, ...] = ()

    def _known(self, source: str, target: str) -> Figure | None:
        row = self._figures.get(source)
        return None if row is None else row.get(target)

    def probed(self, source: str, target: str, rate: float, at: float) -> None:
        """An edge was measured at this time; an older word on it is ignored, and one from before it fell as well."""
        known = self._known(source, target)
        if source == target or (known is not None and known.at > at):
            return
        seen = self._seen.get((source, target))
        if seen is not None and seen.at >= at:
            if not rate or seen.rate < FALLEN * rate:
                return
            figure = Figure(seen.rate, max(seen.rate, rate), seen.at)
        else:
            figure = Figure(rate, rate, at)
        self._seen.pop((source, target), None)
        self._figures.setdefault(source, {})[target] = figure
        self._packed.pop(source, None)
        useless = self._useless.setdefault(source, set())
        if rate:
            useless.discard(target)
        else:
            useless.add(target)

    def observed(self, source: str, target: str, rate: float, at: float) -> bool:
        """A busy link carried so much. Returns whether the edge has fallen, and is unknown from now on.

        What is not known stays unknown, since the traffic may have been less than the edge can carry; but what was
        seen is compared with an older probe of which we hear only later.
        """
        known = self._known(source, target)
        if source == target or (known is not None and (not known.rate or at < known.at)):
            return False
        self._packed.pop(source, None)
        if known is not None and rate >= FALLEN * known.reference:
            known.rate, known.reference, known.at = rate, max(rate, known.reference), at
            return False
        seen = self._seen.get((source, target))
        if seen is None or seen.at <= at:
            self._seen[source, target] = Sight(rate, at)
        if known is not None:
            del self._figures[source][target]
        return known is not None

    def lacks(self, source: str, target: str) -> bool:
        """Whether the edge has to be probed: it is unknown, or could not connect when it was tried."""
        known = self._known(source, target)
        return source != target and (known is None or not known.rate)

    def lacking(self, hosts: Sequence[str]) -> dict[str, list[str]]:
        """All edges between these hosts that `lacks` is true of: by source, in the order of the hosts."""
        everyone = set(hosts)
        edges: dict[str, list[str]] = {}
        for source in hosts:
            gap = everyone.difference(self._figures.get(source, {}))
            gap |= self._useless.get(source, set()) & everyone
            gap.discard(source)
            edges[source] = [target for target in hosts if target in gap] if gap else []
        return edges

    def references(self, source: str, hosts: Sequence[str]) -> list[float]:
        """What `reference` says of the edges from a host to each of these; nan where nothing is known."""
        known = self._figures.get(source, {}).get
        rates = [math.nan if (figure := known(target)) is None else figure.reference for target in hosts]
        rates[hosts.index(source)] = math.inf
        return rates

    def packed(self, hosts: Sequence[str]) -> bytes:
        """What `rate` says of the edges from each host to each, as 32-bit floats; nan where nothing is known.

        Rows that have not changed since the last time cost nothing: with many hosts, it is asked for often.
        """
        if self._packed_for != tuple(hosts):
            self._packed_for = tuple(hosts)
            self._packed.clear()
        for place, source in enumerate(hosts):
            if source not in self._packed:
                known = self._figures.get(source, {}).get
                row = array("f", [math.nan if (figure := known(to)) is None else figure.rate for to in hosts])
                row[place] = math.inf
                self._packed[source] = row.tobytes()
        return b"".join(map(self._packed.__getitem__, hosts))

    def rate(self, source: str, target: str) -> float | None:
        """Bytes per second from host to host, if they are known: what was measured or seen last."""
        if source == target:
            return float("inf")
        known = self._known(source, target)
        return None if known is None else known.rate

    def reference(self, source: str, target: str) -> float | None:
        """Bytes per second that the edge is good for: what it was last probed at, or the best that was seen since.

        Rings are ordered by this. One connection carries a little less than the several of a probe, and only edges of
        the ring are ever seen: by what was seen last, the edges in use would always look worse than all others.
        """
        if source == target:
            return float("inf")
        known = self._known(source, target)
        return None if known is None else known.reference

    def measured_at(self, source: str, target: str) -> float | None:
        """When the edge was measured last."""
        known = self._known(source, target)
        return None if known is None else known.at

    def forget(self, host: str) -> None:
        """Nothing is known any more about the edges of a host."""
        self._figures.pop(host, None)
        self._useless.pop(host, None)
        for row in self._figures.values():
            row.pop(host, None)
        for targets in self._useless.values():
            targets.discard(host)
        self._seen = {edge: seen for edge, seen in self._seen.items() if host not in edge}
        self._packed.clear()

    def forget_unreachable(self, host: str) -> None:
        """A peer of this host died: what could not connect may just have been its listener."""
        for source, targets in self._useless.items():
            for target in [target for target in targets if host in (source, target)]:
                del self._figures[source][target]
                targets.discard(target)
                self._packed.pop(source, None)
