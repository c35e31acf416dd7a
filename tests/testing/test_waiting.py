import itertools

import pytest

from ray_pccl.testing import eventually


def test_eventually_returns_the_first_true_value() -> None:
    numbers = itertools.count()

    assert eventually(lambda: next(numbers) * (next(numbers) > 4)) == 4


def test_a_condition_that_never_comes_true_fails_and_is_named() -> None:
    with pytest.raises(AssertionError, match=r"not within 0\.05 s: a white raven; it is \[\]"):
        eventually(lambda: [], 0.05, "a white raven")


def test_the_state_of_things_is_asked_for_only_when_the_time_is_up() -> None:
    asked: list[bool] = []

    eventually(lambda: True, 0.05, lambda: str(asked.append(True)))

    assert not asked


def test_the_condition_is_tried_even_with_no_time_at_all() -> None:
    assert eventually(lambda: "there", 0.0) == "there"
