"""The walk of `walking`, for hosts of several peers: beside the order of hosts, it changes where each is left."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ray_pccl.topology.walking import Nodes, Walk


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
        """Tries other ports on either side of the gap; now and then one that opens a gap elsewhere instead."""
        after = int(self._next(gap, 1))
        hosts = [gap, after] if self._rng.random() < 0.5 else [after, gap]
        daring = self._rng.random() < 0.2
        for host in hosts:
            if len(self._members[host]) > 1 and self._choose(host, gap, daring=daring):
                return
        super()._step(gap)

    def _choose(self, host: int, gap: int, *, daring: bool) -> bool:
        """Has the host left through another peer, one that closes the gap, unless that opens another."""
        peers = self._members[host]
        before, after = int(self._next(host, -1)), int(self._next(host, 1))
        arriving, going = self._between[self._exit[before], peers], self._between[peers, self._exit[after]]
        closing = going if host == gap else arriving
        chosen = peers[arriving & going]
        if not len(chosen) and daring:
            chosen = peers[closing]
        if not len(chosen):
            return False
        self._leave(host, int(chosen[self._rng.integers(len(chosen))]))
        self._look_at(before, host)
        self._look_at(host, after)
        return True

    def _leave(self, host: int, peer: int) -> None:
        self._exit[host] = peer
        self._usable[host] = self._into[:, host] = self._between[peer, self._exit]
        self._usable[:, host] = self._into[host] = self._between[self._exit, peer]
        self._usable[host, host] = self._into[host, host] = False
