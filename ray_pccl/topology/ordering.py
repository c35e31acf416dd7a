"""Orders a ring: the slowest edge as fast as can be, then the sum of all."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ray_pccl.errors import SettingsError
from ray_pccl.topology import exact
from ray_pccl.topology.explaining import missing, obstacle
from ray_pccl.topology.hosts import order_hosts
from ray_pccl.topology.problem import Problem, rotated
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
    """The ring whose slowest edge is the fastest; among those of the same slowest edge, the one of the largest sum.

    It is exact up to 18 hosts of one peer each (or as much work with more peers a host), and a heuristic beyond.

    Args:
        bandwidth: Bytes per second that i can send to j at ``[i, j]``. 0: can't connect. NaN: not known, and taken for
            the median of what is known, or for 1 if nothing is. The diagonal is ignored.
        hosts: A number for each peer's host; None: each has its own. Peers of one host stay neighbours, and what they
            can send one another does not count, unless all peers are on one host: then it is as if each had its own.
        budget_s: About how long it may take. The exact part takes what it takes, under a second; the heuristic ends
            early if it can prove its order to be the best.
        seed: The same one gives the same order, except where the budget ends the search.
        start: An order to improve on: what is returned is as good or better, and this very one if none is better. One
            that parts the peers of a host, or needs an edge that can't connect, is no more than a hint.

    Raises:
        NoRingError: Every ring needs an edge that can't connect; or, with so few edges that a ring is hard to find,
            none was found in time. `NoRingError.edges` names those in the way.
        SettingsError: The arguments make no sense.
    """
    deadline = _deadline(budget_s)
    problem = Problem.of(bandwidth, hosts)
    n = len(problem.host_of)
    if start is not None and sorted(start) != list(range(n)):
        raise SettingsError(f"start must be an order of the peers 0 to {n - 1}, not {list(start)[:10]}...")
    if n == 1:
        return RingOrder((0,), math.inf, 0.0, True)
    if error := obstacle(problem):
        raise error
    if exact.steps([len(peers) for peers in problem.members]) <= exact.LIMIT:
        order, optimal = _exactly(problem), True
    else:
        order, optimal = order_hosts(problem, start, np.random.default_rng(seed), deadline)
    order, worth = rotated(order), problem.worth(order)
    if start is not None and problem.keeps_hosts_together(start) and problem.worth(start) >= worth:
        order, worth = rotated(start), problem.worth(start)
    if worth[0] <= 0:
        raise missing(problem, order, proven=optimal)
    return RingOrder(order, *worth, optimal)


def _deadline(budget_s: float) -> Callable[[float], Callable[[], bool]]:
    """Gives, for a part of the budget, the question whether it is used up."""
    if not budget_s > 0:
        raise SettingsError(f"budget_s must be positive, not {budget_s}")
    begin = time.monotonic()
    return lambda share: lambda: time.monotonic() - begin > share * budget_s


def _exactly(problem: Problem) -> tuple[int, ...]:
    worth, entry = problem.by_exits()
    exits = exact.best_exits(problem, worth)
    order = problem.ring(exits, entry)
    if problem.worth(order)[0] > 0:
        return order
    return problem.ring(exact.most_worth(problem, (worth > 0).astype(np.float64)), entry)
