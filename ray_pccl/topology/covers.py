"""What every ring must have: a way from each to each, and one edge into and out of each, without contradiction.

Graphs are lists of Python integers: bit j of row i says that there is an edge from i to j. An operation on a row of a
thousand bits takes less than a microsecond, which makes all this fast enough without compiled code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rows = list[int]


def rows_of(usable: NDArray[np.bool_]) -> Rows:
    """The rows of a matrix as integers."""
    packed = np.packbits(usable, axis=1, bitorder="little")
    return [int.from_bytes(row.tobytes(), "little") for row in packed]


def bits(row: int) -> Iterator[int]:
    """The places that are set, the lowest first."""
    while row:
        lowest = row & -row
        yield lowest.bit_length() - 1
        row ^= lowest


def reached(rows: Rows, start: int, within: int = -1) -> int:
    """All that can be reached from `start`, as bits; on ways that stay among the given nodes."""
    seen = frontier = 1 << start
    while frontier:
        following = 0
        for node in bits(frontier):
            following |= rows[node]
        frontier = following & within & ~seen
        seen |= frontier
    return seen


@dataclass
class Cover:
    """For each node the one that follows it, so that all are followed by another one: a set of disjoint cycles."""

    following: list[int]
    """-1 for a node that none could be found for."""
    stuck: int
    """Nodes, as bits, of which too few others can follow; 0 if the cover is complete. The proof that none exists."""

    @property
    def complete(self) -> bool:
        """Whether every node has one that follows."""
        return not self.stuck


def cover(rows: Rows, preferred: list[int] | None = None) -> Cover:
    """A set of cycles through all nodes (a perfect matching, by augmenting paths), beginning with what is preferred."""
    n = len(rows)
    following, before = [-1] * n, [-1] * n
    free = (1 << n) - 1
    for node in range(n):
        wanted = preferred[node] if preferred else -1
        if wanted >= 0 and rows[node] >> wanted & 1 and free >> wanted & 1:
            choice = 1 << wanted
        else:
            choice = rows[node] & free
            # Begin beyond the node's own number: the lowest for all would leave the last ones with nothing.
            choice = choice >> node << node or choice
            choice &= -choice
        if choice:
            following[node] = choice.bit_length() - 1
            before[following[node]] = node
            free ^= choice
    for node in range(n):
        if following[node] < 0:
            taken, competing = _augment(rows, following, before, free, node)
            if not taken:
                return Cover(following, competing)
            free ^= taken
    return Cover(following, 0)


def _augment(rows: Rows, following: list[int], before: list[int], free: int, root: int) -> tuple[int, int]:
    """Finds one to follow `root`, moving others: the place that is taken for it. If none, all nodes that compete."""
    parent: dict[int, int] = {}
    unseen, queue, nodes = (1 << len(rows)) - 1, [root], 1 << root
    for node in queue:
        fresh = rows[node] & unseen
        if end := fresh & free:
            place = (end & -end).bit_length() - 1
            parent[place] = node
            _shift(following, before, parent, place)
            return 1 << place, 0
        unseen ^= fresh
        for place in bits(fresh):
            parent[place] = node
            queue.append(before[place])
            nodes |= 1 << before[place]
    return 0, nodes


def _shift(following: list[int], before: list[int], parent: dict[int, int], place: int) -> None:
    while place >= 0:
        node = parent[place]
        following[node], place_before = place, following[node]
        before[place] = node
        place = place_before


def strongly_connected(rows: Rows, columns: Rows) -> bool:
    """Whether each node can be reached from each other; `columns` are the rows of the transposed matrix."""
    everything = (1 << len(rows)) - 1
    return reached(rows, 0) == everything and reached(columns, 0) == everything


def cycles_of(following: list[int]) -> list[list[int]]:
    """The cycles of a complete cover."""
    seen, found = [False] * len(following), []
    for first in range(len(following)):
        if not seen[first]:
            cycle, node = [], first
            while not seen[node]:
                seen[node] = True
                cycle.append(node)
                node = following[node]
            found.append(cycle)
    return found
