"""Attempts over links, by the frames that arrive."""

from __future__ import annotations

import time

import numpy as np

from ray_pccl.peer.ledger import Ledger
from ray_pccl.ring.header import Header, Kind
from ray_pccl.ring.linked import LinkedAttempt
from ray_pccl.ring.task import Attempt, Epoch, Recipe, Task


def test_another_member_that_enters_what_could_not_begin_here_does_no_harm() -> None:
    epoch = Epoch(1, 0, ("a", "b"), 2)
    task = Task(Recipe(Header(Kind.ALL_REDUCE, 1)), np.zeros(1, np.uint8), np.zeros(1, np.uint8))
    attempt = Attempt(task, (0, 0), epoch, Ledger(), time.monotonic() + 10)
    linked = LinkedAttempt(attempt, lambda link: None, lambda ended: None)
    linked.enter(1, attempt.packed)  # as the plane passes it on, before it has begun for want of a link
    assert not linked.ended.is_set()
