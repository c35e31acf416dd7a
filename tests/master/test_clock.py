"""The master's clock leaves out what the master itself slept through."""

from __future__ import annotations

from master_actor.clock import ABSENCE_S, WRITE_S, MasterClock


class Hand:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_it_runs_as_time_does_while_it_is_looked_at() -> None:
    hand = Hand()
    clock = MasterClock(hand)
    for _ in range(100):
        hand.now += 0.02
        clock.read()
    assert abs(clock.read() - 102.0) < 1e-9


def test_a_time_in_which_nobody_looked_is_left_out() -> None:
    hand = Hand()
    clock = MasterClock(hand)
    hand.now += 0.02
    before = clock.read()
    hand.now += 60.0
    assert clock.read() == before
    hand.now += ABSENCE_S / 2
    assert clock.read() == before + ABSENCE_S / 2


def test_a_short_write_costs_no_time_and_a_long_one_stops_the_clock() -> None:
    hand = Hand()
    clock = MasterClock(hand)
    clock.hold()
    hand.now += WRITE_S / 2
    clock.release()
    assert clock.read() == 100.0 + WRITE_S / 2
    clock.hold()
    for _ in range(400):
        hand.now += 0.02
        clock.read()
    assert abs(clock.read() - (100.0 + 1.5 * WRITE_S)) < 1e-9
    clock.release()
    assert abs(clock.read() - (100.0 + 1.5 * WRITE_S)) < 1e-9
    hand.now += 0.02
    assert abs(clock.read() - (100.02 + 1.5 * WRITE_S)) < 1e-9


def test_a_long_write_during_which_nobody_looked_stops_the_clock_too() -> None:
    hand = Hand()
    clock = MasterClock(hand)
    clock.hold()
    hand.now += 3.5
    clock.release()
    assert clock.read() <= 100.0 + WRITE_S


def test_it_never_goes_back() -> None:
    hand = Hand()
    clock = MasterClock(hand)
    seen = [clock.read()]
    for step in range(300):
        hand.now += 0.4 if step % 7 == 0 else 0.01
        if step % 11 == 0:
            clock.hold()
        if step % 11 == 8:
            clock.release()
        seen.append(clock.read())
    assert seen == sorted(seen)
