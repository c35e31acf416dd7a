"""Makes the sum of a ring's edges larger, by moving short stretches of it elsewhere (Or-opt)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

LONGEST = 3
"""Nodes of a stretch."""


def or_opt(worth: NDArray[np.float64], order: Sequence[int], expired: Callable[[], bool]) -> list[int]:
    """An order whose edges are worth at least as much in sum; -inf marks edges that must not come into it.

    Ends when no stretch of up to `LONGEST` nodes can be moved with profit, or when `expired`. The order that comes in
    has no edge of -inf.
    """
    tour = np.asarray(order)
    tolerance = 1e-12 * float(np.abs(worth[tour, np.roll(tour, -1)]).max(initial=0.0))
    idle, length = 0, 1
    while idle < LONGEST and len(tour) > length + 1 and not expired():
        tour, moved = _sweep(worth, tour, length, tolerance)
        idle = 0 if moved else idle + 1
        length = length % min(LONGEST, len(tour) - 2) + 1
    return [int(node) for node in tour]


def _sweep(
    worth: NDArray[np.float64], tour: NDArray[np.intp], length: int, tolerance: float
) -> tuple[NDArray[np.intp], int]:
    """Finds the best new place of every stretch, then makes all these moves that the ones before have left possible."""
    head, tail = tour, np.roll(tour, 1 - length)
    before, after, follower = np.roll(tour, 1), np.roll(tour, -length), np.roll(tour, -1)
    freed = worth[before, after] - worth[before, head] - worth[tail, after]
    gains = worth[np.ix_(tour, head)].T + worth[np.ix_(tail, follower)] - worth[tour, follower][None, :]
    for by in range(-1, length):  # a stretch can't go into itself; where it is, it need not go
        places = np.arange(len(tour))
        gains[places, (places + by) % len(tour)] = -np.inf
    target = gains.argmax(axis=1)
    profit = freed + gains[np.arange(len(tour)), target]
    following = np.empty_like(tour)
    following[tour] = follower
    succ: list[int] = following.tolist()
    pred: list[int] = np.argsort(following).tolist()
    moved = 0
    for place in np.argsort(-profit, kind="stable"):
        if profit[place] <= tolerance:
            break
        stretch = (int(head[place]), int(tail[place]), length)
        moved += _move(worth, succ, pred, stretch, int(tour[target[place]]), tolerance)
    fresh, node = [], int(tour[0])
    for _ in range(len(tour)):
        fresh.append(node)
        node = succ[node]
    return np.asarray(fresh), moved


def _move(
    worth: NDArray[np.float64],
    succ: list[int],
    pred: list[int],
    stretch: tuple[int, int, int],
    target: int,
    tolerance: float,
) -> bool:
    """Puts the stretch behind the target, if it is still one and still gains by it."""
    head, tail, length = stretch
    node = head
    for _ in range(length - 1):
        if node == target:
            return False
        node = succ[node]
    before, after, follower = pred[head], succ[tail], succ[target]
    if node != tail or target in (tail, before):
        return False
    gain = worth[before, after] + worth[target, head] + worth[tail, follower]
    if not gain - (worth[before, head] + worth[tail, after] + worth[target, follower]) > tolerance:
        return False
    succ[before], pred[after] = after, before
    succ[target], pred[head] = head, target
    succ[tail], pred[follower] = follower, tail
    return True
