"""The search for the best ring, as the server has it done: the core's question in, its answer out."""

from __future__ import annotations

import asyncio
from types import ModuleType

from master_actor.core.actions import Solve, Solved
from ray_pccl.errors import NoRingError


async def search(question: Solve) -> Solved:
    """Looks for the best ring, away from the event loop."""
    solving = await asyncio.to_thread(_solver)
    start = tuple(range(len(question.hosts)))
    try:
        ring = await solving.solve(question.bandwidth, question.hosts, budget_s=question.budget_s, start=start)
    except NoRingError as error:
        return Solved(question.group, question.number, edges=tuple(error.edges), error="" if error.edges else str(error))
    order = tuple(int(place) for place in ring.order)
    return Solved(question.group, question.number, order, float(ring.bottleneck), float(ring.total), bool(ring.optimal))


def _solver() -> ModuleType:
    """Loaded at its first use: it works with numpy, which a master needs for nothing else."""
    from ray_pccl.topology import solving

    return solving
