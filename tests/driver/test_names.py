"""What Ray's task list shows of the hidden calls. The state API and the dashboard show what is read here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ray._private.state import state

import ray_pccl
from ray_pccl.testing import eventually
from tests.driver.workers import end, get, start

pytestmark = pytest.mark.ray


def tasks() -> list[Any]:
    """The tasks that Ray has noted so far. It learns of them with some delay."""
    return [event.task_info for event in state._get_all_task_events() if event.HasField("task_info")]


def names() -> set[str]:
    return {task.name for task in tasks()}


def test_every_hidden_call_has_a_name_that_says_what_it_does_for_which_group(workers: list[Any], name: str) -> None:
    [late] = start(1)
    group = ray_pccl.create_group(workers, name)
    refs = [worker.make.remote(np.ones, 3) for worker in workers]
    get(group.allreduce_refs(refs))
    get(group.reduce_refs(refs))
    get(group.allgather_refs(refs))
    get(group.reducescatter_refs(refs))
    get(group.broadcast_ref(refs[0]))
    get(group.barrier())
    group.add([late])
    group.wait_ready(60)
    ray_pccl.store_stats(workers[0])
    group.destroy()
    end([late])

    calls = ["join", "allreduce", "reduce", "allgather", "reducescatter", "broadcast", "barrier", "admit", "leave"]
    due = {*(f"ray_pccl.{call}({name})" for call in calls), "ray_pccl.store_stats"}

    eventually(lambda: due <= names(), 30, lambda: f"Ray knows of {sorted(due - names())}", every_s=0.2)
    hidden = {task.name for task in tasks() if task.func_or_class_name.endswith("__ray_call__")}
    assert hidden >= due
    assert all(call.startswith("ray_pccl.") for call in hidden)


def test_a_collective_method_keeps_its_own_name(workers: list[Any]) -> None:
    get(workers[0].make.remote(np.ones, 3))
    get(workers[0].make.options(name="the user's own").remote(np.ones, 3))

    eventually(lambda: {"Worker.make", "the user's own"} <= names(), 30, every_s=0.2)
