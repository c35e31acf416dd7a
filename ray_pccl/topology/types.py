"""What users see of a group's topology."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Topology:
    """The ring of an epoch and what is known of the bandwidth between its peers. A snapshot."""

    order: tuple[str, ...]
    """The `peer_id` of every member; each sends to the next one, the last to the first."""
    matrix: dict[tuple[str, str], float]
    """Bytes per second from one peer to another, for the directed edges that are known; 0: they can't connect."""
    hosts: dict[str, str]
    """The host of each peer."""
    bottleneck: float | None
    """The slowest edge between hosts of the ring, in bytes per second; None where it isn't known."""
    age_s: float | None
    """How long ago the oldest of the ring's figures was measured; None where nothing was."""
