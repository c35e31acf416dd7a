"""What busy links carry, as the kernel counts it, while collectives run. Lives in the mesh's thread.

A sample begins when a socket is full and ends when the queue before it is empty: in between the sender always had more
to send, so what was acknowledged is what the way carried. Unless the receiver was the slow one: the kernel knows for
how long its window, and not the network, held the sender up. And unless this thread was the slow one, with a core that
others had: the kernel knows for how long it had something to send, and only that time counts.
`docs/design/topology.md` says what else is left out.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

SHORTEST_S = 0.05
LONGEST_S = 1.0
"""A sample that goes on for longer is told, and the next begins."""
FEWEST_BYTES = 1 << 20
RECEIVER_AT_MOST = 0.1
"""The part of a sample for which the receiver's window may have been the limit."""
STRAY_BYTES = 64 << 10
"""From this size on, data that does not go around the ring may slow down what does."""
_TCP_INFO_BYTES = 192
_ACKED = struct.Struct("=Q")
_ACKED_AT, _BUSY_AT, _RWND_LIMITED_AT = 120, 168, 176


@dataclass(frozen=True, slots=True)
class Counters:
    """What the kernel has counted on a connection since it was made."""

    acked: int
    busy_s: float
    """For how long there was something to send, or to be acknowledged."""
    receiver_limited_s: float


def counters(sock: socket.socket) -> Counters | None:
    """The kernel's counters, if it has them."""
    if not hasattr(socket, "TCP_INFO"):
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return None
    if len(info) < _TCP_INFO_BYTES:
        return None
    (acked,) = _ACKED.unpack_from(info, _ACKED_AT)
    (busy_us,) = _ACKED.unpack_from(info, _BUSY_AT)
    (limited_us,) = _ACKED.unpack_from(info, _RWND_LIMITED_AT)
    return Counters(acked, busy_us / 1e6, limited_us / 1e6)


class Traffic:
    """What all links of a communicator know of each other: how much went elsewhere than around the ring."""

    def __init__(self) -> None:
        self.strays = 0
        self.around = False
        """Whether the last large piece went around the ring: else no sample need be begun."""

    def queued(self, length: int, *, around: bool) -> None:
        """A piece is about to be sent."""
        if length >= STRAY_BYTES:
            self.around = around
            self.strays += not around


class Meter:
    """Takes samples of one link. `read` gives the kernel's counters, `tell` takes bytes per second."""

    def __init__(
        self,
        traffic: Traffic,
        read: Callable[[], Counters | None],
        tell: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.traffic = traffic
        self._read = read
        self._tell = tell
        self._clock = clock
        self._began = 0.0
        self._first: Counters | None = None
        self._strays = 0

    def full(self) -> None:
        """The socket takes no more for now, and more waits to be sent."""
        if self._first is not None:
            if self._clock() - self._began < LONGEST_S:
                return
            self.drained()
        if not self.traffic.around:
            return
        self._first = self._read()
        self._began, self._strays = self._clock(), self.traffic.strays

    def drained(self) -> None:
        """Nothing waits to be sent any more."""
        first, self._first = self._first, None
        if first is None:
            return
        elapsed = self._clock() - self._began
        last = self._read() if elapsed >= SHORTEST_S and self._strays == self.traffic.strays else None
        if last is None:
            return
        moved, held_up = last.acked - first.acked, last.receiver_limited_s - first.receiver_limited_s
        busy = min(elapsed, last.busy_s - first.busy_s)
        if moved >= FEWEST_BYTES and busy >= SHORTEST_S and held_up <= RECEIVER_AT_MOST * busy:
            self._tell(moved / busy)
