"""Links that keep breaking: orders of the ring that avoid them, and who has to go where there is none (R4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

Edge = frozenset[str]
BREAKS_TO_EVICT = 3


class BrokenLinks:
    """Which links of a group have broken, and how often."""

    def __init__(self) -> None:
        self._breaks: Counter[Edge] = Counter()

    def note(self, edge: Edge) -> None:
        """A link broke."""
        self._breaks[edge] += 1

    def forget(self, peer_id: str) -> None:
        """A peer is gone: what broke between it and others says nothing about them."""
        for edge in [edge for edge in self._breaks if peer_id in edge]:
            del self._breaks[edge]

    def clear(self) -> None:
        """A new group: nothing is known of its links."""
        self._breaks.clear()

    def to_avoid(self) -> set[Edge]:
        """Once may be an accident; these broke again after they were mended."""
        return {edge for edge, breaks in self._breaks.items() if breaks > 1}

    def unbearable(self, edge: Edge, members: Sequence[str]) -> bool:
        """Whether one end of the link has to go: it broke too often, or no ring can do without it."""
        breaks = self._breaks[edge]
        return breaks >= BREAKS_TO_EVICT or (breaks > 1 and order_avoiding(members, self.to_avoid()) is None)

    def count_of(self, peer_id: str) -> int:
        """How many links of a peer have broken."""
        return sum(peer_id in edge for edge in self._breaks)

    def reordered(self, order: list[str]) -> list[str]:
        """The order, or one near it that avoids what broke again."""
        avoid = self.to_avoid()
        return (order_avoiding(order, avoid) or order) if broken_edges(order, avoid) else order


def broken_edges(order: Sequence[str], avoid: Collection[Edge]) -> int:
    """How many neighbours of the ring are edges to avoid."""
    return sum(frozenset(pair) in avoid for pair in _edges(order))


def order_avoiding(order: Sequence[str], avoid: Collection[Edge]) -> list[str] | None:
    """An order near the given one with no edge to avoid, or None if none was found.

    Moves one peer at a time to the place that leaves the fewest such edges. With the few broken edges of a real
    network that finds a ring wherever one exists; on dense ones it may miss one, and the caller evicts.
    """
    best = list(order)
    left = broken_edges(best, avoid)
    while left:
        ends = {peer for pair in _edges(best) if frozenset(pair) in avoid for peer in pair}
        moves = (_moved(best, peer, place) for peer in sorted(ends) for place in range(len(best)))
        candidate = min(moves, key=lambda move: broken_edges(move, avoid))
        if (fewer := broken_edges(candidate, avoid)) >= left:
            return None
        best, left = candidate, fewer
    return best


def turned(order: Sequence[str], first: str) -> tuple[str, ...]:
    """The same ring, told from this peer on."""
    place = order.index(first)
    return (*order[place:], *order[:place])


def same_ring(order: Sequence[str], other: Sequence[str]) -> bool:
    """Whether everyone has the same next neighbour in both."""
    return len(order) == len(other) and turned(order, other[0]) == tuple(other)


def _edges(order: Sequence[str]) -> list[tuple[str, str]]:
    return [(peer, order[(place + 1) % len(order)]) for place, peer in enumerate(order)]


def _moved(order: list[str], peer: str, place: int) -> list[str]:
    rest = [other for other in order if other != peer]
    return [*rest[:place], peer, *rest[place:]]
