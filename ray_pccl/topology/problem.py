"""What is to be ordered: bandwidths without gaps, hosts, and the ports through which a ring enters and leaves them.

Peers of one host are neighbours in the ring, so a ring is an order of hosts, each with a peer through which it is
entered and another one through which it is left (the same one if the host has no other). Inside, any order will do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ray_pccl.errors import SettingsError

Matrix = NDArray[np.float64]
Worth = tuple[float, float]
"""The slowest edge, then the sum: rings are compared by this."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Bandwidths between peers, which are grouped by host. With all peers on one host, each counts as its own."""

    bandwidth: Matrix
    """Nothing is NaN; the diagonal is 0."""
    members: tuple[NDArray[np.intp], ...]
    """The peers of each host."""
    host_of: NDArray[np.intp]

    @classmethod
    def of(cls, bandwidth: Matrix, hosts: Sequence[int] | None) -> Self:
        """Raises `SettingsError` for what is no matrix of bandwidths, or does not fit the hosts."""
        given = np.asarray(bandwidth, dtype=np.float64)
        if given.ndim != 2 or given.shape[0] != given.shape[1] or not given.size:
            raise SettingsError(
                f"bandwidth must be a square matrix with a row for each peer, not of shape {given.shape}"
            )
        n = len(given)
        hosts = None if hosts is None else [int(host) for host in hosts]
        if hosts is not None and len(hosts) != n:
            raise SettingsError(f"hosts names {len(hosts)} peers, but bandwidth has {n}")
        number = {host: place for place, host in enumerate(dict.fromkeys(hosts or ()))}  # by their first peers
        labels = np.array([number[host] for host in hosts]) if hosts and len(number) > 1 else np.arange(n)
        counts = labels[:, None] != labels[None, :]
        return cls(
            _without_gaps(given, counts),
            tuple(np.split(np.argsort(labels, kind="stable"), np.cumsum(np.bincount(labels))[:-1])),
            labels,
        )

    @property
    def plain(self) -> bool:
        """Whether every host has one peer: then hosts are peers, and nothing is to be chosen but their order."""
        return len(self.members) == len(self.host_of)

    def worth(self, order: Sequence[int]) -> Worth:
        """The slowest of the ring's edges between hosts, and their sum, which no rotation changes."""
        tour = np.asarray(order)
        after = np.roll(tour, -1)
        edges = self.bandwidth[tour, after][self.host_of[tour] != self.host_of[after]]
        return (float(edges.min()), math.fsum(edges)) if edges.size else (math.inf, 0.0)

    def keeps_hosts_together(self, order: Sequence[int]) -> bool:
        """Whether the ring enters each host once."""
        tour = self.host_of[np.asarray(order)]
        return int((tour != np.roll(tour, -1)).sum()) <= len(self.members)

    def hosts_in(self, order: Sequence[int]) -> list[int]:
        """The hosts, in the order in which the ring first comes to them."""
        return list(dict.fromkeys(self.host_of[np.asarray(order)].tolist()))

    def between_hosts(self) -> Matrix:
        """The fastest edge from each host to each other: what a ring has at most, since two may need one port."""
        if self.plain:
            return self.bandwidth
        return self.through([(peers, peers) for peers in self.members])

    def through(self, ports: Sequence[tuple[NDArray[np.intp], NDArray[np.intp]]]) -> Matrix:
        """The fastest edge from each host to each other, given where each may be entered and where it may be left."""
        leaving = np.array([self.bandwidth[exits].max(axis=0) for _, exits in ports])
        best = np.array([leaving[:, entries].max(axis=1) for entries, _ in ports]).T
        np.fill_diagonal(best, 0.0)
        return best

    def by_exits(self) -> tuple[Matrix, NDArray[np.intp]]:
        """For peers i and j of two hosts: the best edge from i into j's host if that is left through j, and its end."""
        n = len(self.bandwidth)
        best, entry = self.bandwidth.copy(), np.tile(np.arange(n), (n, 1))
        for peers in self.members:
            if len(peers) == 1:
                continue
            into = self.bandwidth[:, peers]
            first, second = np.argsort(-into, axis=1, kind="stable")[:, :2].T
            for place, peer in enumerate(peers):
                chosen = np.where(first == place, second, first)
                best[:, peer], entry[:, peer] = into[np.arange(n), chosen], peers[chosen]
        return best, entry

    def ring(self, exits: Sequence[int], entry: NDArray[np.intp]) -> tuple[int, ...]:
        """All peers in ring order, from the peers through which the hosts are left, rotated so that 0 comes first."""
        order: list[int] = []
        for before, leaving in zip([exits[-1], *exits[:-1]], exits, strict=True):
            peers = self.members[self.host_of[leaving]]
            entering = int(entry[before, leaving])
            order += [entering] if len(peers) > 1 else []
            order += [peer for peer in peers.tolist() if peer not in (entering, leaving)]
            order.append(int(leaving))
        return rotated(order)


def rotated(order: Sequence[int]) -> tuple[int, ...]:
    """The same ring, told from peer 0 on."""
    first = list(order).index(0)
    return tuple(int(peer) for peer in (*order[first:], *order[:first]))


def _without_gaps(given: Matrix, counts: NDArray[np.bool_]) -> Matrix:
    wrong = counts & ((given < 0) | np.isinf(given))
    if wrong.any():
        i, j = np.argwhere(wrong)[0]
        raise SettingsError(f"bandwidth[{i}, {j}] is {given[i, j]}: expected bytes per second, 0 or NaN")
    known = given[counts & ~np.isnan(given)]
    filled = np.where(np.isnan(given), float(np.median(known)) if known.size else 1.0, given)
    return np.where(counts, filled, 0.0)
