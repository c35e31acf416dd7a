"""The best ring of few peers, by dynamic programming over sets of hosts (Held and Karp).

A state is a set of hosts that were visited and the peer through which the last of them is left. Two passes: the first
finds the slowest edge of the best ring, the second the largest sum without slower edges. One pass can't do both, since
of two ways with another slowest edge, and another sum, either may turn out to be the better beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
from numpy.typing import NDArray

from ray_pccl.topology.problem import Matrix, Problem

LIMIT = 1 << 26
"""As many steps as take well under a second: 18 hosts of one peer, or 11 of 4."""
Join = Callable[..., Matrix]
"""What becomes of a way's worth and of the edge that prolongs it: the slower of both, or their sum."""


def steps(sizes: Collection[int]) -> int:
    """How many steps `best_exits` takes for hosts of so many peers."""
    return min(sizes) * sum(sizes) ** 2 << (len(sizes) - 1)


def best_exits(problem: Problem, worth: Matrix) -> list[int]:
    """The peers through which the hosts of the best ring are left, in its order.

    `worth[i, j]` is that of going from i to j's host and leaving it through j, as `Problem.by_exits` has it. A ring
    that needs edges of no worth is returned like any other.
    """
    slowest, _ = _best(problem, worth, np.minimum)
    return most_worth(problem, np.where(worth >= slowest, worth, -np.inf))


def most_worth(problem: Problem, worth: Matrix) -> list[int]:
    """The ring of the largest sum, as the peers through which its hosts are left; -inf stands for what can't be."""
    return _best(problem, worth, np.add)[1]


def _best(problem: Problem, worth: Matrix, join: Join) -> tuple[float, list[int]]:
    first = min(range(len(problem.members)), key=lambda host: len(problem.members[host]))
    others = [peers for host, peers in enumerate(problem.members) if host != first]
    best, exits = -np.inf, list[int]()
    for start in problem.members[first].tolist():
        table = _table(others, worth, start, join)
        closed = join(table[-1], worth[:, start])
        if closed.max() > best:
            best = float(closed.max())
            exits = [start, *_traced(others, table, worth, int(closed.argmax()), join)]
    return best, exits


def _table(others: list[NDArray[np.intp]], worth: Matrix, start: int, join: Join) -> Matrix:
    """The worth of the best way from `start` through each set of other hosts to each of their peers."""
    sets = np.arange(1 << len(others))
    sizes = sum((sets >> host) & 1 for host in range(len(others)))
    table = np.full((len(sets), len(worth)), -np.inf)
    for host, peers in enumerate(others):
        table[1 << host, peers] = worth[start, peers]
    for size in range(1, len(others)):
        layer = sets[sizes == size]
        for host, peers in enumerate(others):
            without = layer[layer & (1 << host) == 0]
            ways = table[without]
            for peer in peers:
                table[without | (1 << host), peer] = join(ways, worth[:, peer]).max(axis=1)
    return table


def _traced(others: list[NDArray[np.intp]], table: Matrix, worth: Matrix, last: int, join: Join) -> list[int]:
    """The way that the table's last line holds for `last`, found again from its end."""
    host_of = {peer: host for host, peers in enumerate(others) for peer in peers.tolist()}
    way, visited = [last], len(table) - 1
    while visited := visited & ~(1 << host_of[way[-1]]):
        way.append(int(join(table[visited], worth[:, way[-1]]).argmax()))
    return way[::-1]
