"""The search for the best ring, as the server has it done: the core's question in, its answer out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from master_actor.core.actions import Solve, Solved
from ray_pccl.errors import NoRingError

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

    from ray_pccl.topology.rings import RingOrder


async def search(question: Solve) -> Solved:
    """Looks for the best ring, away from the event loop."""
    solve, bandwidth = await asyncio.to_thread(_prepare, question)
    start = tuple(range(len(question.hosts)))
    try:
        ring = await solve(bandwidth, question.hosts, budget_s=question.budget_s, start=start)
    except NoRingError as error:
        return Solved(
            question.group, question.number, edges=tuple(error.edges), error="" if error.edges else str(error)
        )
    order = tuple(int(place) for place in ring.order)
    return Solved(question.group, question.number, order, float(ring.bottleneck), float(ring.total), bool(ring.optimal))


def _prepare(question: Solve) -> tuple[Callable[..., Awaitable[RingOrder]], NDArray[float64]]:
    """The solver and its matrix. Loaded at the first use: a master needs numpy for nothing else."""
    import numpy as np

    from ray_pccl.topology.solving import solve

    return solve, np.array(question.bandwidth, np.float64)
