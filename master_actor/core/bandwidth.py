"""What the master knows of the network: bandwidth from host to host, and how old each figure is."""

from __future__ import annotations

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

    def observed(self, source: str, target: str, rate: float, at: float) -> bool:
        """A busy link carried so much. Returns whether the edge has fallen, and is unknown from now on.

        What is not known stays unknown, since the traffic may have been less than the edge can carry; but what was
        seen is compared with an older probe of which we hear only later.
        """
        known = self._known(source, target)
        if source == target or (known is not None and (not known.rate or at < known.at)):
            return False
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
        for row in self._figures.values():
            row.pop(host, None)
        self._seen = {edge: seen for edge, seen in self._seen.items() if host not in edge}

    def forget_unreachable(self, host: str) -> None:
        """A peer of this host died: what could not connect may just have been its listener."""
        for source, row in self._figures.items():
            for target in [target for target, known in row.items() if not known.rate and host in (source, target)]:
                del row[target]
