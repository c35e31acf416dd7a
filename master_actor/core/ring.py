"""The order of a ring that avoids edges which keep breaking."""

from __future__ import annotations

from collections.abc import Collection, Sequence

Edge = frozenset[str]


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


def _edges(order: Sequence[str]) -> list[tuple[str, str]]:
    return [(peer, order[(place + 1) % len(order)]) for place, peer in enumerate(order)]


def _moved(order: list[str], peer: str, place: int) -> list[str]:
    rest = [other for other in order if other != peer]
    return [*rest[:place], peer, *rest[place:]]
