"""What `optimize_topology()` tells while it runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TopologyProgress:
    """How far `optimize_topology()` is, the same on all members."""

    stage: str
    """``probing``: edges are being measured; ``solving``: the best order is looked for; ``linking``: all re-link."""
    probed: int
    """How many directed edges between hosts are done with."""
    to_probe: int
    """How many there were to measure."""
