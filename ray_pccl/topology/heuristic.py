"""A good order of many nodes: thresholds, tried by halves, until no faster slowest edge is found in time.

The edges that are at least as fast as a threshold form a graph, and a ring of that graph is an order that is nowhere
slower. What every ring needs gives an upper bound to begin with; where an order reaches it, it is the best there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ray_pccl.topology.chains import Contradiction
from ray_pccl.topology.covers import cover, rows_of, strongly_connected
from ray_pccl.topology.walking import find_ring

FIRST_LIMIT = 2000
"""Moves that the first try of a threshold may take; each further round allows four times as many."""
ROUNDS = 6


@dataclass(slots=True)
class Found:
    """The best order so far."""

    order: list[int]
    slowest: float
    """0: a ring without unusable edges was not found."""
    bound: float
    """No order has a faster slowest edge than this."""

    @property
    def optimal(self) -> bool:
        """Whether there is no better one, as far as the slowest edge goes."""
        return self.slowest >= self.bound


def search_order(
    bandwidth: NDArray[np.float64], start: Sequence[int], rng: np.random.Generator, expired: Callable[[], bool]
) -> Found:
    """The order with the fastest slowest edge that can be found until `expired`; never one slower than `start`."""
    found = Found(list(start), slowest_edge(bandwidth, start), _narrowest(bandwidth))
    levels = np.unique(bandwidth[(bandwidth > found.slowest) & (bandwidth <= found.bound)])
    _lower_bound(bandwidth, found, levels, expired)
    limit = FIRST_LIMIT
    for _ in range(ROUNDS):
        _by_halves(bandwidth, found, levels, limit, rng, expired)
        if found.optimal or expired():
            break
        limit *= 4
    return found


def slowest_edge(bandwidth: NDArray[np.float64], order: Sequence[int]) -> float:
    """Of the ring in that order."""
    return float(bandwidth[np.asarray(order), np.roll(order, -1)].min())


def greedy_order(bandwidth: NDArray[np.float64], first: int = 0) -> list[int]:
    """From each node to the one that it reaches fastest among those that are left."""
    order, left = [first], bandwidth.copy()
    for _ in range(len(bandwidth) - 1):
        left[:, order[-1]] = -1.0
        order.append(int(left[order[-1]].argmax()))
    return order


def _narrowest(bandwidth: NDArray[np.float64]) -> float:
    """The best edge into or out of the node that has no better one."""
    return float(min(bandwidth.max(axis=0).min(), bandwidth.max(axis=1).min()))


def _lower_bound(
    bandwidth: NDArray[np.float64], found: Found, levels: NDArray[np.float64], expired: Callable[[], bool]
) -> None:
    """Finds the fastest threshold whose graph is connected and has a cover by cycles."""
    low, high = 0, len(levels)  # those below `low` pass, those from `high` on do not
    preferred = np.roll(found.order, -1)[np.argsort(found.order)].tolist()
    while low < high and not expired():
        # The fastest first: it often passes, and then all is done.
        middle = high - 1 if high == len(levels) else (low + high) // 2
        usable = bandwidth >= levels[middle]
        rows = rows_of(usable)
        covered = cover(rows, preferred)
        if covered.complete and strongly_connected(rows, rows_of(usable.T)):
            low, preferred = middle + 1, covered.following
        else:
            high = middle
    if high < len(levels):
        found.bound = float(levels[high - 1]) if high else found.slowest


def _by_halves(
    bandwidth: NDArray[np.float64],
    found: Found,
    levels: NDArray[np.float64],
    limit: int,
    rng: np.random.Generator,
    expired: Callable[[], bool],
) -> None:
    """Tries thresholds between what was found and the bound; a failure without proof counts in this round alone."""
    high = int(np.searchsorted(levels, found.bound, side="right"))
    low, first = int(np.searchsorted(levels, found.slowest, side="right")), True
    while low < high and not expired():
        middle = high - 1 if first else (low + high) // 2
        first = False
        try:
            order, gaps = find_ring(bandwidth >= levels[middle], rng, limit, expired)
        except Contradiction:
            found.bound = min(found.bound, float(levels[middle - 1]) if middle else found.slowest)
            high, first = middle, True
            continue
        if gaps:
            high = middle
            continue
        found.order, found.slowest = order, slowest_edge(bandwidth, order)
        low = int(np.searchsorted(levels, found.slowest, side="right"))
