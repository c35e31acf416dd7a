"""The walk of `walking`, for hosts of several peers: beside the order of hosts, it changes where each is left."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ray_pccl.topology.walking import Nodes, Walk

NEUTRAL, DARING = 0.3, 0.4
"""Below the first, a port is changed that closes no gap; below the second, one that opens another."""


class PortWalk(Walk):
    """A walk among orders of hosts, each with the peer through which it is left; `best` holds these peers in order."""

    def __init__(
        self,
        usable: NDArray[np.bool_],
        members: Sequence[Nodes],
        host_of: Nodes,
        exits: Sequence[int],
        rng: np.random.Generator,
    ) -> None:
        self._between, self._members = usable, members
        self._exit = np.empty(len(members), np.intp)
        self._exit[host_of[np.asarray(exits)]] = exits
        hosts = usable[np.ix_(self._exit, self._exit)]
        np.fill_diagonal(hosts, val=False)
        super().__init__(hosts, host_of[np.asarray(exits)], rng)

    def _position(self) -> Nodes:
        return self._exit[self._order]

    def _step(self, gap: int) -> None:
        """Tries other ports on either side of the gap, then moves stretches as ever."""
        after = int(self._next(gap, 1))
        for host in (gap, after) if self._rng.random() < 0.5 else (after, gap):
            if len(self._members[host]) > 1 and self._choose(host, gap):
                return
        super()._step(gap)

    def _choose(self, host: int, gap: int) -> bool:
        """Has the host left through another peer, and says whether that closes the gap.

        One that does, and opens no other, is taken at once; if there is none, one now and then that leaves the gap
        open, so that other edges lead out of it, or one that closes it and opens another.
        """
        peers = self._members[host]
        before, after = int(self._next(host, -1)), int(self._next(host, 1))
        arriving, going = self._between[self._exit[before], peers], self._between[peers, self._exit[after]]
        closing, keeping = (going, arriving) if host == gap else (arriving, going)
        chosen = peers[arriving & going]
        if not len(chosen):
            dice = self._rng.random()
            chosen = peers[keeping] if dice < NEUTRAL else peers[closing] if dice < DARING else chosen
        if not len(chosen):
            return False
        self._leave(host, int(chosen[self._rng.integers(len(chosen))]))
        self._look_at(before, host)
        self._look_at(host, after)
        return gap not in self._gaps

    def _leave(self, host: int, peer: int) -> None:
        self._exit[host] = peer
        self._usable[host] = self._into[:, host] = self._between[peer, self._exit]
        self._usable[:, host] = self._into[host] = self._between[self._exit, peer]
        self._usable[host, host] = self._into[host, host] = False
