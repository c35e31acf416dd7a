"""Calls of one caller are made in its order, whichever arrives first; those that are lost hold nobody up for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from ray_pccl.driver.errors import ActorLostError
from ray_pccl.driver.lanes import Lane
from ray_pccl.testing import eventually

LONG_S = 30.0


class Road:
    """A lane, and calls that go along it in threads."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self.lane = Lane()
        self.done: list[int] = []
        self._threads = threads

    def drive(
        self, number: int, first: int = 0, patience: float = LONG_S, inside: Callable[[], object] = lambda: None
    ) -> Future[None]:
        self.lane.arrive(number, first)

        def call() -> None:
            with self.lane.turn(number, patience):
                inside()
                self.done.append(number)

        return self._threads.submit(call)

    def waiting(self) -> int:
        """How many calls wait for their turn."""
        return len(self.lane._changed._waiters)  # type: ignore[attr-defined]


@pytest.fixture
def road() -> Iterator[Road]:
    with ThreadPoolExecutor(16) as threads:
        yield Road(threads)


def test_calls_that_come_in_order_are_made_in_order(road: Road) -> None:
    for number in range(3):
        road.drive(number).result(LONG_S)
    assert road.done == [0, 1, 2]


def test_calls_that_come_in_any_order_are_made_in_order(road: Road) -> None:
    later = [road.drive(number) for number in (4, 2, 3, 1)]
    eventually(lambda: road.waiting() == 4)
    assert road.done == []
    road.drive(0)
    for call in later:
        call.result(LONG_S)
    assert road.done == [0, 1, 2, 3, 4]


def test_only_one_call_is_made_at_a_time(road: Road) -> None:
    inside, leave = threading.Event(), threading.Event()
    one = road.drive(0, inside=lambda: (inside.set(), leave.wait(LONG_S)))
    assert inside.wait(LONG_S)
    two = road.drive(1)
    eventually(lambda: road.waiting() == 1)
    leave.set()
    one.result(LONG_S)
    two.result(LONG_S)
    assert road.done == [0, 1]


def test_calls_before_the_first_are_not_waited_for(road: Road) -> None:
    overtaking = road.drive(8, first=7)
    eventually(lambda: road.waiting() == 1)
    road.drive(7, first=7)
    overtaking.result(LONG_S)
    assert road.done == [7, 8]


def test_a_call_that_fails_lets_the_next_one_in(road: Road) -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        road.drive(0, inside=fail).result(LONG_S)
    road.drive(1).result(LONG_S)
    assert road.done == [1]


def test_calls_that_never_come_are_passed_over_after_a_while(road: Road) -> None:
    road.drive(0).result(LONG_S)
    road.drive(3, patience=0.1).result(LONG_S)
    assert road.done == [0, 3]


def test_a_call_that_is_here_and_waits_for_its_value_is_waited_for(road: Road) -> None:
    road.lane.arrive(0, 0)
    later = road.drive(1, patience=0.05)
    with pytest.raises(TimeoutError):
        later.result(0.5)
    road.drive(0).result(LONG_S)
    later.result(LONG_S)
    assert road.done == [0, 1]


def test_a_call_that_comes_after_it_was_passed_over_is_refused(road: Road) -> None:
    road.drive(0).result(LONG_S)
    road.drive(2, patience=0.05).result(LONG_S)
    with pytest.raises(ActorLostError, match="too late"):
        road.drive(1).result(LONG_S)
    road.drive(3).result(LONG_S)
    assert road.done == [0, 2, 3]


def test_an_old_first_call_does_not_turn_the_lane_back(road: Road) -> None:
    for number in range(5, 8):
        road.drive(number, first=5).result(LONG_S)
    with pytest.raises(ActorLostError, match="too late"):
        road.drive(0, first=0).result(LONG_S)
    road.drive(8, first=5).result(LONG_S)
    assert road.done == [5, 6, 7, 8]


def test_a_call_that_arrived_and_ended_before_its_turn_holds_nobody_up(road: Road) -> None:
    road.lane.arrive(0, 0)
    road.lane.arrive(1, 0)
    behind = road.drive(2)
    eventually(lambda: road.waiting() == 1)

    road.lane.depart(1)
    assert road.done == []
    road.lane.depart(0)

    behind.result(LONG_S)
    assert road.done == [2]


def test_a_call_that_arrives_again_after_it_ended_holds_nobody_up(road: Road) -> None:
    road.drive(0).result(LONG_S)
    road.lane.arrive(0, 0)

    road.drive(1).result(LONG_S)

    assert road.done == [0, 1] and not road.lane._arrived


def test_who_begins_anew_with_an_actor_is_not_waited_for_in_vain(road: Road) -> None:
    road.drive(0).result(LONG_S)
    road.lane.arrive(1, 0)

    anew = road.drive(4, first=4)
    eventually(lambda: road.waiting() == 1)
    assert road.done == [0]  # what is here already has its turn
    road.drive(1)
    anew.result(LONG_S)

    assert road.done == [0, 1, 4]
