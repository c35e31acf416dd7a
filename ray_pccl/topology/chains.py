"""Edges that a ring can't do without: a node with one way out takes it, and one with one way in is entered by it.

Each such edge joins two chains of nodes to one, and rules out others: whatever else leads out of its beginning or into
its end, and what would close the chain before all are in it. Sparse graphs shrink to a fraction of their nodes so, and
a node that is left with no way in or out proves that there is no ring.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ray_pccl.topology.covers import Rows, bits, rows_of


class Contradiction(Exception):  # an answer, not an error: no ring exists
    """There is provably no ring."""


def forced_chains(usable: NDArray[np.bool_]) -> list[list[int]]:
    """The nodes as chains that every ring contains; most of one node in a dense graph. Raises `Contradiction`."""
    if min(usable.sum(axis=0).min(), usable.sum(axis=1).min()) > 1:
        return [[node] for node in range(len(usable))]
    chains = _Chains(rows_of(usable), rows_of(usable.T))
    chains.settle()
    return chains.all()


def search(usable: NDArray[np.bool_], limit: int, expired: Callable[[], bool]) -> list[int] | None:
    """Tries the edges of the node that has fewest, one after the other, with all that each entails: a ring, or None.

    None after `limit` tries or when `expired`. Raises `Contradiction` when all was tried in vain.
    """
    waiting = [_Chains(rows_of(usable), rows_of(usable.T))]
    while waiting:
        chains = waiting.pop()
        try:
            chains.settle()
        except Contradiction:
            continue
        if len(chains.all()) == 1:
            return chains.all()[0]
        if (limit := limit - 1) < 0 or expired():
            return None
        end, start = chains.narrowest()
        waiting += [chains.without(end, start), chains.joined(end, start)]
    raise Contradiction


class _Chains:
    def __init__(self, out: Rows, into: Rows) -> None:
        self._out, self._in = out, into
        self._chain = {node: [node] for node in range(len(out))}
        """By the first node of each chain."""
        self._first = list(range(len(out)))
        """For the last node of a chain, its first; -1 for others."""
        self._closing = 0
        """Where the chain that was made last could go on, its own beginning among them."""
        self._doubtful = list(range(len(out)))

    def all(self) -> list[list[int]]:
        return list(self._chain.values())

    def settle(self) -> None:
        """Joins all that must be joined. Raises `Contradiction`."""
        while self._doubtful and len(self._chain) > 1:
            self._look_at(self._doubtful.pop())
        if len(self._chain) == 1:
            (first,) = self._chain
            if not self._closing >> first & 1:
                raise Contradiction

    def narrowest(self) -> tuple[int, int]:
        """An edge out of a chain that has the fewest."""
        end = min((chain[-1] for chain in self._chain.values()), key=lambda end: self._out[end].bit_count())
        return end, (self._out[end] & -self._out[end]).bit_length() - 1

    def joined(self, end: int, start: int) -> _Chains:
        """A copy in which the edge is taken."""
        copy = self._copy()
        copy._join(end, start)
        return copy

    def without(self, end: int, start: int) -> _Chains:
        """A copy in which the edge is ruled out."""
        copy = self._copy()
        copy._out[end] &= ~(1 << start)
        copy._in[start] &= ~(1 << end)
        copy._doubtful += [end, start]
        return copy

    def _copy(self) -> _Chains:
        copy = _Chains(self._out.copy(), self._in.copy())
        copy._chain = {first: chain.copy() for first, chain in self._chain.items()}
        copy._first, copy._doubtful = self._first.copy(), self._doubtful.copy()
        return copy

    def _look_at(self, node: int) -> None:
        """Takes the one edge out of the node, or into it, if there is no other."""
        if self._first[node] >= 0:
            ways = self._out[node]
            if not ways:
                raise Contradiction
            if not ways & (ways - 1):
                self._join(node, ways.bit_length() - 1)
        if node in self._chain and len(self._chain) > 1:
            ways = self._in[node]
            if not ways:
                raise Contradiction
            if not ways & (ways - 1):
                self._join(ways.bit_length() - 1, node)

    def _join(self, end: int, start: int) -> None:
        first, chain = self._first[end], self._chain.pop(start)
        self._chain[first] += chain
        last = chain[-1]
        self._first[end], self._first[last] = -1, first
        for other in bits(self._out[end] & ~(1 << start)):
            self._in[other] &= ~(1 << end)
            self._doubtful.append(other)
        for other in bits(self._in[start] & ~(1 << end)):
            self._out[other] &= ~(1 << start)
            self._doubtful.append(other)
        self._closing = self._out[last]
        self._out[last] &= ~(1 << first)
        self._in[first] &= ~(1 << last)
        self._doubtful += [last, first]
