"""The order of a group's calls."""

from __future__ import annotations

import threading

from ray_pccl.testing import eventually
from ray_pccl.torch.lane import Lane


def test_what_is_submitted_runs_in_order_one_at_a_time() -> None:
    lane, ran, on = Lane("test"), [], []

    def run(number: int) -> None:
        on.append(number)
        assert len(on) == 1
        ran.append(number)
        on.remove(number)

    for number in range(200):
        lane.submit(lambda number=number: run(number))
    lane.close()
    assert ran == list(range(200))


def test_a_callers_own_call_is_let_in_only_when_nothing_is_before_it() -> None:
    lane, gate, ran = Lane("test"), threading.Event(), []

    def hold() -> None:
        ran.append("submitted")
        gate.wait(10.0)

    assert lane.enter()
    assert not lane.enter(), "two calls at a time"
    lane.submit(hold)
    assert ran == [], "a call began while another was on"
    lane.leave()
    eventually(lambda: ran == ["submitted"], 5.0, "the thread goes on")
    assert not lane.enter(), "a call overtook one that is on"
    gate.set()
    eventually(lane.enter, 5.0, "the lane is free")
    lane.leave()
    lane.close()


def test_closing_lets_what_was_submitted_run_and_ends_the_thread() -> None:
    lane, ran = Lane("closing"), []
    assert lane.enter()
    lane.submit(lambda: ran.append(1))
    threading.Timer(0.05, lane.leave).start()
    lane.close()
    assert ran == [1]
    assert not [thread for thread in threading.enumerate() if thread.name == "ray_pccl-closing"]


def test_what_follows_a_call_may_wait_for_later_ones() -> None:
    lane, second, third = Lane("following"), threading.Event(), threading.Event()
    ended = []

    def follow(event: threading.Event) -> None:
        ended.append(event.wait(10.0))

    lane.submit(lambda: lambda: follow(second))
    lane.submit(lambda: lambda: (second.set(), follow(third))[1])
    lane.submit(lambda: third.set())
    eventually(lambda: ended == [True, True], 5.0, "callbacks end")
    lane.close()
