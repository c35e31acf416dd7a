"""Real torchrun, two agents on this machine, a real master in a process of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_pccl.testing import MasterProcess
from tests.torch.torchrun import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def start(tmp_path: Path, master_process: MasterProcess) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start_run(**given: Any) -> Run:
        runs.append(Run(tmp_path, master_process, **given))
        return runs[-1]

    yield start_run
    for run in runs:
        run.end()


def test_two_nodes_meet_do_not_notice_the_masters_death_and_return_and_end_in_order(
    start: Callable[..., Run], master_process: MasterProcess
) -> None:
    run = start(nodes="2:2")
    run.start_agent(workers=2)
    run.start_agent(workers=1)
    workers = run.wait_started(world=3, agents=2)
    assert {entry["sum"] for entry in workers} == {3}
    assert {entry["master"] for entry in workers} == {str(master_process.endpoint)}  # the workers find it, too
    master_process.kill()
    run.wait_steps(20)  # agents look every 100 ms: what disturbs them shows
    master_process.start()
    run.wait_steps(20)
    run.finish()
    assert len(run.lines("done")) == len(run.lines()) == 3  # nothing was started twice


def test_the_survivor_of_a_killed_node_starts_again_alone_and_a_new_node_joins_it(start: Callable[..., Run]) -> None:
    run = start(nodes="1:2", restarts=0)  # so that only the loss of the node can have made it start again
    conf = "last_call_timeout=1.5"
    first, second = run.start_agent(conf), run.start_agent(conf)
    workers = run.wait_started(world=2, agents=2)

    before, killed = len(run.lines()), time.monotonic()
    run.kill_node(second, workers)
    alone = run.wait_started(world=1, agents=1, after=before)
    assert alone[0]["agent"] == first.pid
    print(f"the survivor's workers were back {time.monotonic() - killed:.1f} s after the kill")

    before = len(run.lines())
    third = run.start_agent(conf)
    both = run.wait_started(world=2, agents=1, after=before)
    assert {entry["agent"] for entry in both} == {first.pid, third.pid}
    assert both[0]["meet_at"] != workers[0]["meet_at"]  # nothing of the first round is to be found
    run.finish()
    assert [entry["world"] for entry in run.lines("done")] == [2, 2]


def test_a_worker_that_fails_makes_all_nodes_meet_again(start: Callable[..., Run]) -> None:
    run = start(nodes="2:2", restarts=1)
    run.start_agent()
    run.start_agent()
    workers = run.wait_started(world=2, agents=2)
    os.kill(workers[1]["pid"], signal.SIGKILL)
    again = run.wait_started(world=2, agents=2, after=2)
    assert {entry["pid"] for entry in again}.isdisjoint(entry["pid"] for entry in workers)
    run.finish()


def test_torchs_own_rendezvous_runs_on_the_master(start: Callable[..., Run]) -> None:
    run = start(backend="pccl-dynamic", nodes="2:2")
    run.start_agent()
    run.start_agent()
    run.wait_started(world=2, agents=2)
    run.finish()
    assert len(run.lines("done")) == 2
