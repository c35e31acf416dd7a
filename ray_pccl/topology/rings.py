"""What an ordering gives: a ring and its worth, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass

from ray_pccl.errors import NoRingError, PCCLError

__all__ = ["NoRingError", "OrderingError", "RingOrder"]


@dataclass(frozen=True, slots=True)
class RingOrder:
    """An order of the peers 0 to n - 1, and what its directed edges are worth."""

    order: tuple[int, ...]
    """The ring goes ``order[0] -> order[1] -> ... -> order[0]``; it is rotated so that ``order[0] == 0``."""
    bottleneck: float
    """The slowest edge that counts: those within a host do not, unless all peers are on one; inf for one peer."""
    total: float
    """The sum of the edges that count."""
    optimal: bool
    """Whether it is proven that no ring has a faster slowest edge. After an exact search none has a larger sum."""


class OrderingError(PCCLError, RuntimeError):
    """The process that orders rings gave no answer; the ring can stay as it is."""
