"""What the master tells of a group's topology, in a form that stays small for a thousand peers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from master_actor.core.bandwidth import Bandwidth
from ray_pccl.control.messages import TopologyReport
from ray_pccl.types import Member

_encoder = msgspec.msgpack.Encoder()
MOST_HOSTS = 1300
"""The rates between more would not fit into a frame: they are left out."""


def describe(members: Sequence[Member], bandwidth: Bandwidth, now: float) -> tuple[bytes, bytes]:
    """The values of the reply: the report, and the rates from each host to each as 32-bit floats (nan: unknown)."""
    hosts = list(dict.fromkeys(member.host for member in members))
    rates = bandwidth.packed(hosts) if len(hosts) <= MOST_HOSTS else b""
    place = {host: number for number, host in enumerate(hosts)}
    order = tuple((member.peer_id, place[member.host]) for member in members)
    report = TopologyReport(order, tuple(hosts), bottleneck_of(members, bandwidth), age_of(members, bandwidth, now))
    return _encoder.encode(report), rates


def _edges(members: Sequence[Member]) -> list[tuple[str, str]]:
    """The edges of the ring that lead from host to host."""
    pairs = zip(members, [*members[1:], *members[:1]], strict=True)
    return [(source.host, target.host) for source, target in pairs if source.host != target.host]


def bottleneck_of(members: Sequence[Member], bandwidth: Bandwidth) -> float | None:
    """The slowest edge of the ring between hosts, if all are known."""
    rates = [bandwidth.rate(*edge) for edge in _edges(members)]
    known = [rate for rate in rates if rate is not None]
    # Rounded as the matrix is, so that it is found there.
    return array("f", [min(known)])[0] if known and len(known) == len(rates) else None


def age_of(members: Sequence[Member], bandwidth: Bandwidth, now: float) -> float | None:
    """How old the oldest figure of the ring's edges is."""
    times = [at for edge in _edges(members) if (at := bandwidth.measured_at(*edge)) is not None]
    return max(0.0, now - min(times)) if times else None
