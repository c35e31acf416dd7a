"""What a peer counts, and what is made of it."""

from __future__ import annotations

import threading

import pytest

from master_actor import serve
from ray_pccl import Communicator, Settings
from ray_pccl.control.messages import Decide, FromMaster, Running
from ray_pccl.peer.connection import MasterConnection
from ray_pccl.peer.link import Link
from ray_pccl.peer.statistics import MOST_RUNNING, Durations, Recorder
from ray_pccl.testing import eventually


def test_quantiles_are_right_to_within_a_bucket() -> None:
    durations = Durations()
    for number in range(1, 1001):
        durations.add(number / 1000)
    summary = durations.summary()
    assert summary.count == 1000
    assert summary.mean_s == pytest.approx(0.5005)
    assert 0.5 <= summary.p50_s <= 0.5 * 1.26
    assert 0.99 <= summary.p99_s <= 1.0 == summary.max_s


def test_the_longest_and_the_shortest_times_have_buckets() -> None:
    durations = Durations()
    durations.add(1e-9)
    durations.add(1e9)
    assert sum(durations.buckets) == 2
    assert durations.quantile(1.0) == 1e9


def test_calls_of_many_threads_are_all_counted() -> None:
    recorder = Recorder()

    def work() -> None:
        for _ in range(2000):
            recorder.committed("all_reduce", 4, 0.001)
            recorder.aborted()
            recorder.failed()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = recorder.snapshot()
    assert (seen.operations, seen.bytes, seen.aborts, seen.retries, seen.failures) == (8000, 32000, 8000, 8000, 8000)
    assert seen.latency["all_reduce"].count == 8000


def test_a_recovery_takes_from_the_first_freeze_to_the_epoch() -> None:
    recorder = Recorder()
    recorder.began(10.0, recovers=False)
    assert recorder.snapshot().last_recovery_ms is None
    recorder.froze(20.0)
    recorder.froze(20.5)  # a second question of the same story
    recorder.began(21.0, recovers=True)
    seen = recorder.snapshot()
    assert (seen.epochs, seen.recoveries, seen.last_recovery_ms) == (2, 1, 1000.0)


def test_only_the_longest_running_operations_are_told_one_by_one() -> None:
    recorder = Recorder()
    recorder.running = lambda: [Running(tag, "all_reduce", 100.0 - tag) for tag in range(MOST_RUNNING + 9)]
    tally = recorder.tally()
    assert tally.in_flight == MOST_RUNNING + 9
    assert len(tally.running) == MOST_RUNNING
    assert tally.running[0].seconds == 100.0


def test_a_signal_handler_may_count_while_its_own_thread_counts() -> None:
    recorder = Recorder()

    def interrupted() -> None:
        with recorder._lock:  # where a signal strikes
            recorder.committed("all_reduce", 4, 0.001)

    thread = threading.Thread(target=interrupted, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive(), "it waits for itself"
    assert recorder.snapshot().operations == 1


def test_a_decision_that_is_told_again_is_no_other_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    decisions: list[tuple[MasterConnection, Link, Decide]] = []
    right = MasterConnection.received

    def received(self: MasterConnection, link: Link, message: FromMaster) -> None:
        right(self, link, message)
        if isinstance(message, Decide):
            right(self, link, message)
            decisions.append((self, link, message))

    monkeypatch.setattr(MasterConnection, "received", received)
    settings = Settings(sentinel=False, last_call_s=0.0)
    with serve(settings=settings) as endpoint, Communicator("g", master=endpoint, settings=settings) as comm:
        eventually(lambda: decisions, 10, "the decision came, twice")
        assert comm.statistics().epochs == 1
