"""Orders more hosts than the exact way can take, and chooses where each is entered and left.

The hosts are ordered by their fastest edges first, which is optimistic where two of these need one port. Then the peer
through which each host is left is chosen; where that leaves gaps, a walk looks for another order and other ports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ray_pccl.topology.chains import search
from ray_pccl.topology.heuristic import Expired, Found, climb, greedy_order, slowest_edge, upper_bound
from ray_pccl.topology.improving import or_opt
from ray_pccl.topology.port_walking import PortWalk
from ray_pccl.topology.problem import Matrix, Problem, rotated
from ray_pccl.topology.walking import find_ring

Deadline = Callable[[float], Expired]
"""For a share of the budget, the question whether it is used up."""
SEARCHES = 4
"""How often ports and order are searched for with forced edges; each time in another random order."""
SWEEPS = 2
"""How often stretches are moved for a larger sum, and ports chosen anew after that."""


def order_hosts(
    problem: Problem, start: Sequence[int] | None, rng: np.random.Generator, deadline: Deadline
) -> tuple[tuple[int, ...], bool]:
    """A ring of all peers, and whether no other has a faster slowest edge, as far as that could be proven."""
    fastest = problem.between_hosts()
    tours = [greedy_order(fastest)] + ([problem.hosts_in(start)] if start is not None else [])
    ordering = _Plain(fastest, rng) if problem.plain else _WithPorts(problem, fastest, rng)
    orders = [ordering.best_of(tour) for tour in tours]
    order = max(orders, key=lambda order: slowest_edge(ordering.worth, order))
    found = Found(order, slowest_edge(ordering.worth, order))
    found.bound = upper_bound(fastest, found.slowest, deadline(0.6))
    expired = deadline(0.7)
    climb(ordering.worth, found, lambda level, limit: ordering.find(level, limit, expired), expired)
    order = ordering.larger_sum(found.order, deadline(1.0))
    return (rotated(order) if problem.plain else problem.ring(order, ordering.entry)), found.optimal


class _Plain:
    """Hosts of one peer each: an order of hosts is an order of peers, and all is said."""

    def __init__(self, bandwidth: Matrix, rng: np.random.Generator) -> None:
        self.worth, self.entry, self._rng = bandwidth, np.empty(0, np.intp), rng

    def best_of(self, tour: list[int]) -> list[int]:
        """The order of peers for one of hosts."""
        return tour

    def find(self, level: float, limit: int, expired: Expired) -> tuple[list[int], int]:
        """An order, and how many of its edges are slower than the level."""
        return find_ring(self.worth >= level, self._rng, limit, expired)

    def larger_sum(self, order: list[int], expired: Expired) -> list[int]:
        """An order without slower edges than this one has, and as large a sum or larger."""
        return or_opt(_not_slower(self.worth, slowest_edge(self.worth, order)), order, expired)


class _WithPorts:
    """Orders are lists of peers: those through which the hosts are left, one for each."""

    def __init__(self, problem: Problem, fastest: Matrix, rng: np.random.Generator) -> None:
        self._problem, self._fastest, self._rng = problem, fastest, rng
        self.worth, self.entry = problem.by_exits()

    def best_of(self, tour: list[int]) -> list[int]:
        """The best ports for an order of hosts."""
        slowest, _ = _best_exits(self.worth, self._layers(tour), np.minimum)
        return _best_exits(_not_slower(self.worth, slowest), self._layers(tour), np.add)[1]

    def find(self, level: float, limit: int, expired: Expired) -> tuple[list[int], int]:
        """An order, and how many of its edges are slower than the level."""
        tour, _ = find_ring(self._fastest >= level, self._rng, limit, expired)
        usable = self.worth >= level
        _, exits = _best_exits(usable.astype(np.float64), self._layers(tour), np.add)
        walk = PortWalk(usable, self._problem.members, self._problem.host_of, exits, self._rng)
        walk.run(limit, expired)
        if walk.fewest and (ring := self._searched(level, limit, expired)):
            return ring, 0
        return walk.best.tolist(), walk.fewest

    def _searched(self, level: float, limit: int, expired: Expired) -> list[int] | None:
        """For graphs with few edges, where walks get lost."""
        host_of = self._problem.host_of
        usable = (self._problem.bandwidth >= level) | (host_of[:, None] == host_of[None, :])
        np.fill_diagonal(usable, val=False)
        for _ in range(SEARCHES):
            ring = search(usable, limit // 20, expired, self._rng, host_of)
            if ring:
                return [
                    peer
                    for peer, after in zip(ring, ring[1:] + ring[:1], strict=True)
                    if host_of[peer] != host_of[after]
                ]
        return None

    def larger_sum(self, order: list[int], expired: Expired) -> list[int]:
        """An order without slower edges than this one has, and as large a sum or larger."""
        for _ in range(SWEEPS):
            chosen = self.worth[np.ix_(order, order)]
            places = or_opt(_not_slower(chosen, slowest_edge(self.worth, order)), range(len(order)), expired)
            order = self.best_of(self._problem.host_of[[order[place] for place in places]].tolist())
        return order

    def _layers(self, tour: list[int]) -> list[NDArray[np.intp]]:
        """The peers of each host in turn, from the host that has the fewest."""
        sizes = [len(self._problem.members[host]) for host in tour]
        first = sizes.index(min(sizes))
        return [self._problem.members[host] for host in (*tour[first:], *tour[:first])]


def _not_slower(worth: Matrix, slowest: float) -> Matrix:
    return np.where(worth >= slowest, worth, -np.inf)


def _best_exits(worth: Matrix, layers: list[NDArray[np.intp]], join: Callable[..., Matrix]) -> tuple[float, list[int]]:
    """One peer of each layer, so that the way through them and back is worth most."""
    best, exits = -np.inf, list[int]()
    for start in layers[0].tolist():
        ways = [worth[start, layers[1]]]
        for here, there in pairwise(layers[1:]):
            ways.append(join(ways[-1][:, None], worth[np.ix_(here, there)]).max(axis=0))
        closed = join(ways[-1], worth[layers[-1], start])
        if closed.max() > best:
            best, exits = float(closed.max()), [int(layers[-1][closed.argmax()])]
            for way, here in zip(ways[-2::-1], layers[-2:0:-1], strict=True):
                exits.append(int(here[join(way, worth[here, exits[-1]]).argmax()]))
            exits = [start, *exits[::-1]]
    return best, exits
