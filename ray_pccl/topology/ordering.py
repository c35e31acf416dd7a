"""Orders a ring: the slowest edge as fast as can be, then the sum of all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, permutations

import numpy as np
from numpy.typing import NDArray

from ray_pccl.topology.rings import NoRingError, RingOrder

__all__ = ["NoRingError", "RingOrder", "order_ring"]


def order_ring(
    bandwidth: NDArray[np.float64],
    hosts: Sequence[int] | None = None,
    *,
    budget_s: float = 1.0,
    seed: int = 0,
    start: Sequence[int] | None = None,
) -> RingOrder:
    """A placeholder that tries all orders of up to 8 peers and knows no hosts."""
    n = len(bandwidth)
    if n > 8:
        raise NotImplementedError
    best = RingOrder(tuple(range(n)), float("-inf"), 0.0, True)
    for rest in permutations(range(1, n)):
        order = (0, *rest, 0)
        edges = [float(bandwidth[edge]) for edge in pairwise(order)]
        if n == 1:
            return RingOrder((0,), float("inf"), 0.0, True)
        if (min(edges), sum(edges)) > (best.bottleneck, best.total):
            best = RingOrder(order[:-1], min(edges), sum(edges), True)
    if best.bottleneck <= 0:
        raise NoRingError("no ring exists", edges=())
    return best
