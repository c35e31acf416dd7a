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
    chains = _Chains(rows_of(usable), rows_of(usable.T), [0] * len(usable))
    chains.settle()
    return chains.all()


def search(
    usable: NDArray[np.bool_],
    limit: int,
    expired: Callable[[], bool],
    rng: np.random.Generator,
    host_of: NDArray[np.intp] | None = None,
) -> list[int] | None:
    """Tries the edges of the node that has fewest, one after the other, with all that each entails: a ring, or None.

    With hosts, a ring that enters each of them once. None after `limit` tries or when `expired`. Raises `Contradiction`
    when all was tried in vain.
    """
    together = [0] * len(usable) if host_of is None else rows_of(host_of[:, None] == host_of[None, :])
    waiting = [_Chains(rows_of(usable), rows_of(usable.T), together)]
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
        end, start = chains.narrowest(rng)
        waiting += [chains.without(end, start), chains.joined(end, start)]
    raise Contradiction


class _Chains:
    def __init__(self, out: Rows, into: Rows, together: Rows) -> None:
        self._out, self._in, self._together = out, into, together
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

    def narrowest(self, rng: np.random.Generator) -> tuple[int, int]:
        """An edge into or out of a chain that has the fewest."""
        first, salt = len(self._out), int(rng.integers(1 << 30))
        ways = [(self._out[chain[-1]].bit_count(), chain[-1] ^ salt) for chain in self._chain.values()]
        ways += [(self._in[start].bit_count(), (start + first) ^ salt) for start in self._chain]
        node = min(ways)[1] ^ salt  # the salt makes it any of those with the fewest
        outward, node = node < first, node % first
        others = list(bits(self._out[node] if outward else self._in[node]))
        other = others[int(rng.integers(len(others)))]
        return (node, other) if outward else (other, node)

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
        copy = _Chains(self._out.copy(), self._in.copy(), self._together)
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
        self._keep(self._out, self._in, end, 1 << start)
        self._keep(self._in, self._out, start, 1 << end)
        if not self._together[end] >> start & 1:
            for node in bits(self._together[end] & ~(1 << end)):
                self._keep(self._out, self._in, node, self._together[end])
            for node in bits(self._together[start] & ~(1 << start)):
                self._keep(self._in, self._out, node, self._together[start])
        self._closing = self._out[last]
        self._out[last] &= ~(1 << first)
        self._in[first] &= ~(1 << last)
        self._doubtful += [last, first]

    def _keep(self, graph: Rows, reverse: Rows, node: int, kept: int) -> None:
        """Rules out the node's edges to all others, in the one direction."""
        for other in bits(graph[node] & ~kept):
            reverse[other] &= ~(1 << node)
            self._doubtful.append(other)
        self._doubtful.append(node)
        graph[node] &= kept
