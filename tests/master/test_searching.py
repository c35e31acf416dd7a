"""The search for the best ring, as the server has it done."""

from __future__ import annotations

import asyncio
import math

import pytest

from master_actor import searching, serve
from master_actor.core.actions import Solve, Solved
from master_actor.searching import search
from ray_pccl.testing import eventually


def _question(count: int, slow: float = 10.0, fast: float = 100.0) -> Solve:
    """Members whose ring in the order of every second one is the fast one."""
    rows = [[slow] * count for _ in range(count)]
    order = [*range(0, count, 2), *range(1, count, 2)]
    for source, target in zip(order, [*order[1:], order[0]], strict=True):
        rows[source][target] = fast
    for place in range(count):
        rows[place][place] = math.inf
    return Solve("g", 7, tuple(map(tuple, rows)), tuple(range(count)), 1.0)


@pytest.mark.parametrize("count", [2, 5, 24])
def test_the_best_ring_is_found_with_or_without_a_process_of_its_own(count: int) -> None:
    answer = asyncio.run(search(_question(count)))
    assert (answer.group, answer.number, answer.error, answer.edges) == ("g", 7, "", ())
    assert answer.order == (*range(0, count, 2), *range(1, count, 2)) and answer.bottleneck == 100.0


def test_edges_in_the_way_are_named() -> None:
    rows = ((math.inf, 0.0, 0.0), (1.0, math.inf, 1.0), (1.0, 1.0, math.inf))
    answer = asyncio.run(search(Solve("g", 1, rows, (0, 1, 2), 1.0)))
    assert not answer.order and set(answer.edges) == {(0, 1), (0, 2)}


def test_what_is_unknown_is_no_obstacle() -> None:
    rows = tuple(tuple(math.inf if near == far else math.nan for far in range(3)) for near in range(3))
    assert sorted(asyncio.run(search(Solve("g", 1, rows, (0, 1, 2), 1.0))).order) == [0, 1, 2]


def test_a_new_question_of_a_group_ends_the_search_for_its_older_one_and_a_master_that_ends_ends_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running: list[tuple[str, int]] = []

    async def for_ever(question: Solve) -> Solved:
        running.append((question.group, question.number))
        try:
            await asyncio.sleep(3600)
        finally:
            running.remove((question.group, question.number))
        raise AssertionError

    monkeypatch.setattr(searching, "search", for_ever)
    master = serve()
    master.start()
    try:
        for group, number in (("g", 1), ("h", 1), ("g", 2), ("g", 3)):
            question = Solve(group, number, (), (), 1.0)
            master._loop.call_soon_threadsafe(master.server._send_all, [question])
            eventually(lambda it=(group, number): it in running, 5, "it is searched for")
        eventually(lambda: sorted(running) == [("g", 3), ("h", 1)], 5, "the older ones have ended")
    finally:
        master.stop("the test is over")
    assert not running
