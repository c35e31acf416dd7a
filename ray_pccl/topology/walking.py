"""Looks for a ring in a graph: a random walk among orders of its nodes that have ever fewer gaps.

A gap is a step of the order that is no edge of the graph. A move swaps two neighbouring stretches of the order:
``a [b..c] [d..e] f`` becomes ``a [d..e] [b..c] f``, the one exchange of three edges that turns no stretch around, so
that it suits graphs whose edges have a direction. A walk takes a gap a-b and looks for such a move that closes it; if
there is none, it takes one that closes it at the price of another gap elsewhere, and goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ray_pccl.topology.chains import forced_chains, search
from ray_pccl.topology.covers import cover, cycles_of, rows_of

WIDTH = 48
"""How many edges of a node are looked at in one step, drawn at random if it has more."""
ROUNDS = 3
"""Walks, each from another beginning."""
Nodes = NDArray[np.intp]


def find_ring(
    usable: NDArray[np.bool_], rng: np.random.Generator, limit: int, expired: Callable[[], bool]
) -> tuple[list[int], int]:
    """An order of the nodes and how many of its steps are gaps: 0 if it is a ring of the graph.

    Gives up after about `limit` moves, or when `expired`. Raises `Contradiction` where it comes upon a proof that
    there is no ring; that it does not find one proves nothing.
    """
    chains = forced_chains(usable)
    if len(chains) == 1:
        return chains[0], 0
    inner = usable[np.ix_([chain[-1] for chain in chains], [chain[0] for chain in chains])]
    np.fill_diagonal(inner, val=False)
    best, fewest = list(range(len(chains))), len(chains) + 1
    for round_ in range(ROUNDS):
        walk = Walk(inner, _beginning(inner, rng), rng)
        walk.run(limit // ROUNDS, expired)
        if walk.fewest < fewest:
            best, fewest = walk.best.tolist(), walk.fewest
        if not fewest or expired():
            break
        if not round_ and (found := search(inner, limit // 20, expired, rng)):
            best, fewest = found, 0
            break
    return [node for place in best for node in chains[place]], fewest


def _beginning(usable: NDArray[np.bool_], rng: np.random.Generator) -> Nodes:
    """The cycles of a cover, one after the other: an order with about as many gaps as there are cycles, so, few."""
    shuffled = rng.permutation(len(usable))
    found = cover(rows_of(usable[np.ix_(shuffled, shuffled)]))
    if not found.complete:
        return shuffled
    return shuffled[[node for cycle in cycles_of(found.following) for node in cycle]]


class Walk:
    """One walk, from an order that it changes in place."""

    def __init__(self, usable: NDArray[np.bool_], order: Nodes, rng: np.random.Generator) -> None:
        self._usable, self._into = usable, np.ascontiguousarray(usable.T)
        self._n, self._rng = len(usable), rng
        self._order, self._place = order, np.empty_like(order)
        self._place[order] = np.arange(self._n)
        self._gaps = self._all_gaps()
        self.best, self.fewest = self._position(), len(self._gaps)

    def run(self, limit: int, expired: Callable[[], bool]) -> None:
        """Goes on until no gap is left, for `limit` moves, or until `expired`; `best` is where there were `fewest`."""
        for step in range(limit):
            if not self._gaps or (step % 64 == 0 and expired()):
                return
            self._step(self._gaps[int(self._rng.integers(len(self._gaps)))])
            if len(self._gaps) < self.fewest:
                self.best, self.fewest = self._position(), len(self._gaps)

    def _position(self) -> Nodes:
        """What is to be remembered of the place where the walk is."""
        return self._order.copy()

    def _step(self, gap: int) -> None:
        if move := self._closing(gap) or self._shifting(gap):
            self._make(gap, *move)

    def _all_gaps(self) -> list[int]:
        """Nodes whose step to the next is no edge."""
        return [int(node) for node in self._order[~self._usable[self._order, np.roll(self._order, -1)]]]

    def _some(self, row: NDArray[np.bool_]) -> Nodes:
        nodes = np.flatnonzero(row)
        return nodes if len(nodes) <= WIDTH else self._rng.choice(nodes, WIDTH, replace=False)

    def _next(self, nodes: Nodes | int, by: int) -> Nodes:
        return self._order[(self._place[nodes] + by) % self._n]

    def _closing(self, a: int) -> tuple[int, int] | None:
        """How to close the gap after `a` with edges a-d and e-b; if it can be, with c-f too, which opens no other."""
        b = int(self._next(a, 1))
        ds, es = self._some(self._usable[a]), self._some(self._into[b])
        cs, fs = self._next(ds, -1), self._next(es, 1)
        from_b = self._place[b]
        valid = ((self._place[ds] - from_b) % self._n)[:, None] <= ((self._place[es] - from_b) % self._n)[None, :]
        whole = valid & self._usable[np.ix_(cs, fs)]
        chosen = np.flatnonzero(whole)
        if not len(chosen):
            chosen = np.flatnonzero(valid) if self._rng.random() < 0.5 else chosen
        if not len(chosen):
            return None
        i, j = divmod(int(chosen[self._rng.integers(len(chosen))]), len(es))
        return int(ds[i]), int(es[j])

    def _shifting(self, a: int) -> tuple[int, int] | None:
        """How to close the gap after `a` at one end: with a-d and c-f, or with e-b and c-f."""
        b = int(self._next(a, 1))
        from_b = int(self._place[b])
        if self._rng.random() < 0.5:
            ds = self._some(self._usable[a])
            if not len(ds):
                return None
            d = int(ds[self._rng.integers(len(ds))])
            es = self._next(self._some(self._usable[self._next(d, -1)]), -1)
            es = es[((self._place[es] - from_b) % self._n >= (self._place[d] - from_b) % self._n) & (es != a)]
            return (d, int(es[self._rng.integers(len(es))])) if len(es) else None
        es = self._some(self._into[b])
        if not len(es):
            return None
        e = int(es[self._rng.integers(len(es))])
        ds = self._next(self._some(self._into[self._next(e, 1)]), 1)
        ds = ds[((self._place[ds] - from_b) % self._n <= (self._place[e] - from_b) % self._n) & (ds != b)]
        return (int(ds[self._rng.integers(len(ds))]), e) if len(ds) else None

    def _make(self, a: int, d: int, e: int) -> None:
        """Swaps the stretch from after `a` to before `d` with the one from `d` to `e`."""
        b = int(self._next(a, 1))
        first = int(self._place[b])
        left, right = int((self._place[d] - first) % self._n), int((self._place[e] - first) % self._n) + 1
        c, f = int(self._next(d, -1)), int(self._next(e, 1))
        places = np.arange(first, first + right) % self._n
        moved = self._order[places]
        moved = np.concatenate((moved[left:], moved[:left]))
        self._order[places] = moved
        self._place[moved] = places
        for node, follower in ((a, d), (e, b), (c, f)):
            self._look_at(node, follower)

    def _look_at(self, node: int, follower: int) -> None:
        """Whether the step from the node is a gap now."""
        known = node in self._gaps
        if self._usable[node, follower] and known:
            self._gaps.remove(node)
        elif not self._usable[node, follower] and not known:
            self._gaps.append(node)
