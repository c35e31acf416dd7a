"""Waiting for a condition with a deadline, instead of a sleep that hopes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def eventually(
    condition: Callable[[], _T], timeout: float = 10.0, what: str | Callable[[], str] = "", every_s: float = 0.01
) -> _T:
    """Calls `condition` until it returns something true, and returns that.

    Args:
        condition: What is waited for. What it raises ends the wait.
        timeout: In seconds. The condition is tried once more when they have passed.
        what: Names the condition in the error; a function is asked only then, so that it can tell the state of things.
        every_s: The pause between two tries.

    Raises:
        AssertionError: The condition did not come true in time.
    """
    deadline = time.monotonic() + timeout
    while True:
        late = time.monotonic() >= deadline
        if value := condition():
            return value
        if late:
            said = what() if callable(what) else what
            raise AssertionError(f"not within {timeout:g} s: {said or 'the condition'}; it is {value!r}")
        time.sleep(every_s)
