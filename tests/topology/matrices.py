"""Matrices to order, and the best ring of few peers by trying all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


def edges_of(order: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(order, [*order[1:], *order[:1]], strict=True))


def counted(bandwidth: Matrix, hosts: Sequence[int], order: Sequence[int]) -> list[float]:
    """The edges that count: those between hosts, or all if there is but one host."""
    alone = len(set(hosts)) == 1
    return [float(bandwidth[i, j]) for i, j in edges_of(order) if alone or hosts[i] != hosts[j]]


def together(hosts: Sequence[int], order: Sequence[int]) -> bool:
    """Whether the peers of each host are neighbours."""
    changes = sum(hosts[i] != hosts[j] for i, j in edges_of(order))
    return changes == (len(set(hosts)) if len(set(hosts)) > 1 else 0)


def brute_force(bandwidth: Matrix, hosts: Sequence[int]) -> tuple[float, float] | None:
    """The slowest edge and the sum of the best ring; None if each needs an edge that can't connect."""
    best = None
    for rest in itertools.permutations(range(1, len(bandwidth))):
        order = (0, *rest)
        if together(hosts, order):
            rates = counted(bandwidth, hosts, order)
            if min(rates) > 0 and (best is None or (min(rates), sum(rates)) > best):
                best = (min(rates), sum(rates))
    return best


def planted(bandwidth: Matrix, rng: np.random.Generator, rate: float = 1.0) -> Matrix:
    """With a ring whose edges have the rate or little more."""
    ring = rng.permutation(len(bandwidth))
    bandwidth[ring, np.roll(ring, -1)] = rate * rng.uniform(1.0, 1.02, len(bandwidth))
    np.fill_diagonal(bandwidth, 0.0)
    return bandwidth


def uniform(n: int, rng: np.random.Generator) -> Matrix:
    """All others are slower, many by little."""
    return planted(rng.uniform(0.0, 1.0, (n, n)), rng)


def sparse(others: float) -> Callable[[int, np.random.Generator], Matrix]:
    """A few others per peer are as fast, which lead astray; the rest are less than half as fast."""

    def made(n: int, rng: np.random.Generator) -> Matrix:
        fast = rng.random((n, n)) < others / n
        return planted(np.where(fast, rng.uniform(1.0, 2.0, (n, n)), rng.uniform(0.0, 0.45, (n, n))), rng)

    return made


def regions(n: int, rng: np.random.Generator) -> Matrix:
    """Like the internet: near peers are fast, ways differ by direction, some pairs can't connect."""
    region = rng.integers(8, size=n)
    between = 0.2 * rng.lognormal(0.0, 1.0, (8, 8))
    between[np.diag_indices(8)] = 3.0
    rates = between[np.ix_(region, region)] * rng.lognormal(0.0, 0.5, (n, n)) * rng.lognormal(0.0, 0.7, (n, 1))
    # Where a region is fast, it would hide the ring: all but one or two links of a peer are slower than that.
    rates = np.minimum(rates, np.where(rng.random((n, n)) < 1.5 / n, np.inf, 0.9))
    rates[rng.random((n, n)) < 0.02] = 0.0
    return planted(rates, rng)
