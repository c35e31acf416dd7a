"""Orders more hosts than the exact way can take, and chooses where each is entered and left.

With one peer a host there is nothing to choose. Else the peers of every host are parted in those by which it may be
entered and those by which it may be left: then any order of the hosts can be had at the worth that their fastest edges
promise. The first order takes all peers for both, which is optimistic; each further round parts them anew, most in a
way that keeps the best order so far possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ray_pccl.topology.heuristic import greedy_order, search_order, slowest_edge
from ray_pccl.topology.improving import or_opt
from ray_pccl.topology.problem import Matrix, Problem, rotated

Deadline = Callable[[float], Callable[[], bool]]
Ports = tuple[NDArray[np.intp], NDArray[np.intp]]
FRUITLESS = 16
"""Rounds without success after which no other parting is tried."""
FREE = 0.25
"""The share of hosts whose ports are parted without regard to the best order so far."""


def order_hosts(
    problem: Problem, start: Sequence[int] | None, rng: np.random.Generator, deadline: Deadline
) -> tuple[tuple[int, ...], bool]:
    """A ring of all peers, and whether no other has a faster slowest edge, as far as that could be proven."""
    fastest = problem.between_hosts()
    tours = [greedy_order(fastest)] + ([problem.hosts_in(start)] if start is not None else [])
    tour = max(tours, key=lambda tour: slowest_edge(fastest, tour))
    found = search_order(fastest, tour, rng, deadline(0.7 if problem.plain else 0.4))
    if problem.plain:
        return rotated(_larger_sum(fastest, found.order, deadline(1.0))), found.optimal
    best = problem.ring(*_ports(problem, _larger_sum(fastest, found.order, deadline(0.5))))
    fruitless = 0
    while problem.worth(best)[0] < found.bound and fruitless < FRUITLESS and not deadline(0.8)():
        between = problem.through([_parted(ports, rng) for ports in _used(problem, best)])
        again = search_order(between, problem.hosts_in(best), rng, deadline(0.8))
        better = problem.ring(*_ports(problem, _larger_sum(between, again.order, deadline(0.9))))
        fruitless = 0 if problem.worth(better) > problem.worth(best) else fruitless + 1
        best = max(best, better, key=problem.worth)
    return best, problem.worth(best)[0] >= found.bound


def _larger_sum(bandwidth: Matrix, order: list[int], expired: Callable[[], bool]) -> list[int]:
    slowest = slowest_edge(bandwidth, order)
    return or_opt(np.where(bandwidth >= slowest, bandwidth, -np.inf), order, expired)


def _used(problem: Problem, order: Sequence[int]) -> list[tuple[int, int, NDArray[np.intp]]]:
    """For each host: where the ring enters it, where it leaves it, and all its peers."""
    tour = np.asarray(order)
    before, after = np.roll(tour, 1), np.roll(tour, -1)
    entries = tour[problem.host_of[tour] != problem.host_of[before]]
    exits = tour[problem.host_of[tour] != problem.host_of[after]]
    entered = dict(zip(problem.host_of[entries].tolist(), entries.tolist(), strict=True))
    left = dict(zip(problem.host_of[exits].tolist(), exits.tolist(), strict=True))
    return [(entered[host], left[host], peers) for host, peers in enumerate(problem.members)]


def _parted(used: tuple[int, int, NDArray[np.intp]], rng: np.random.Generator) -> Ports:
    entry, leaving, peers = used
    if len(peers) == 1:
        return peers, peers
    if rng.random() < FREE:
        entry, leaving = rng.choice(peers, 2, replace=False)
    entering = rng.random(len(peers)) < 0.5
    entering[peers == entry], entering[peers == leaving] = True, False
    return peers[entering], peers[~entering]


def _ports(problem: Problem, tour: Sequence[int]) -> tuple[list[int], NDArray[np.intp]]:
    """Where to leave each host, for the best ring that visits the hosts in that order; and where to enter them."""
    worth, entry = problem.by_exits()
    sizes = [len(problem.members[host]) for host in tour]
    first = sizes.index(min(sizes))
    layers = [problem.members[host] for host in (*tour[first:], *tour[:first])]
    slowest, _ = _best_exits(worth, layers, np.minimum)
    _, exits = _best_exits(np.where(worth >= slowest, worth, -np.inf), layers, np.add)
    return exits, entry


def _best_exits(worth: Matrix, layers: list[NDArray[np.intp]], join: Callable[..., Matrix]) -> tuple[float, list[int]]:
    """One peer of each layer, so that the way through them and back is worth most."""
    best, exits = -np.inf, list[int]()
    for start in layers[0].tolist():
        ways = [worth[start, layers[1]]]
        for here, there in zip(layers[1:-1], layers[2:], strict=True):
            ways.append(join(ways[-1][:, None], worth[np.ix_(here, there)]).max(axis=0))
        closed = join(ways[-1], worth[layers[-1], start])
        if closed.max() > best:
            best, exits = float(closed.max()), [int(layers[-1][closed.argmax()])]
            for way, here in zip(ways[-2::-1], layers[-2:0:-1], strict=True):
                exits.append(int(here[join(way, worth[here, exits[-1]]).argmax()]))
            exits = [start, *exits[::-1]]
    return best, exits
