"""A good order of many nodes: thresholds, tried by halves, until no faster slowest edge is found in time.

The edges that are at least as fast as a threshold form a graph, and a ring of that graph is an order that is nowhere
slower. What every ring needs gives an upper bound to begin with; where an order reaches it, it is the best there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ray_pccl.topology.chains import Contradiction
from ray_pccl.topology.covers import cover, rows_of, strongly_connected
from ray_pccl.topology.problem import Matrix

FIRST_LIMIT = 2000
"""Moves that the first try of a threshold may take; each further round allows four times as many."""
ROUNDS = 6
Expired = Callable[[], bool]
Find = Callable[[float, int], tuple[list[int], int]]
"""For a threshold and a limit of moves, an order and how many of its edges are slower; raises `Contradiction`."""


@dataclass(slots=True)
class Found:
    """The best order so far."""

    order: list[int]
    slowest: float
    """0: a ring without unusable edges was not found."""
    bound: float = np.inf
    """No order has a faster slowest edge than this."""

    @property
    def optimal(self) -> bool:
        """Whether there is no better one, as far as the slowest edge goes."""
        return self.slowest >= self.bound


def slowest_edge(bandwidth: Matrix, order: Sequence[int]) -> float:
    """Of the ring in that order."""
    return float(bandwidth[np.asarray(order), np.roll(order, -1)].min())


def greedy_order(bandwidth: Matrix, first: int = 0) -> list[int]:
    """From each node to the one that it reaches fastest among those that are left."""
    order, left = [first], bandwidth.copy()
    for _ in range(len(bandwidth) - 1):
        left[:, order[-1]] = -1.0
        order.append(int(left[order[-1]].argmax()))
    return order


def upper_bound(bandwidth: Matrix, at_least: float, expired: Expired) -> float:
    """The fastest threshold, from one that is known to have a ring, whose graph has what every ring needs.

    That is a cover by cycles, and a way from each node to each.
    """
    highest = float(min(bandwidth.max(axis=0).min(), bandwidth.max(axis=1).min()))
    levels = np.unique(bandwidth[(bandwidth > at_least) & (bandwidth <= highest)])
    low, high = 0, len(levels)  # those below `low` pass, those from `high` on do not
    preferred = None
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
    return float(levels[high - 1]) if high else at_least


def climb(worth: Matrix, found: Found, find: Find, expired: Expired) -> None:
    """Tries thresholds, harder each round, until the best order found is proven to be so, or until `expired`.

    `worth` is that of the edges of the orders that `find` gives.
    """
    levels = np.unique(worth[(worth > found.slowest) & (worth <= found.bound)])
    for round_ in range(ROUNDS):
        _by_halves(worth, found, levels, find, FIRST_LIMIT * 4**round_, expired)
        if found.optimal or expired():
            return


def _by_halves(worth: Matrix, found: Found, levels: Matrix, find: Find, limit: int, expired: Expired) -> None:
    """Tries thresholds between what was found and the bound; a failure without proof counts in this round alone."""
    low, high = np.searchsorted(levels, [found.slowest, found.bound], side="right").tolist()
    highest = True
    while low < high and not expired():
        middle, highest = (high - 1 if highest else (low + high) // 2), False
        try:
            order, gaps = find(float(levels[middle]), limit)
        except Contradiction:
            found.bound = float(levels[middle - 1]) if middle else found.slowest
            high = middle
            continue
        if gaps:
            high = middle
            if not middle and found.slowest <= 0:
                found.order = order  # no ring yet: what comes nearest to one
            continue
        found.order, found.slowest = order, slowest_edge(worth, order)
        low = int(np.searchsorted(levels, found.slowest, side="right"))
