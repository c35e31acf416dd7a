"""Throughput and operations in flight, as the master works them out; and a real group, as it reports it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from master_actor import serve
from master_actor.chronicle import Chronicle
from master_actor.observing import Observatory
from master_actor.thread import MasterThread
from ray_pccl import Communicator, ReduceOp
from ray_pccl.control.messages import Running, Tally
from ray_pccl.reports import GroupReport, from_json, to_json
from ray_pccl.reports import HappeningKind as K
from ray_pccl.testing import PeerProcess, PeerStarter, eventually
from ray_pccl.testing.ownership import Ownership
from tests.core.driven import DrivenMaster


def _tally(operations: int = 0, moved: int = 0, running: tuple[Running, ...] = ()) -> Tally:
    return Tally(operations, moved, 0, 0, 0, len(running), running, 0)


class _Seen:
    """An observatory beside a core with members a and b, under a clock of its own."""

    def __init__(self) -> None:
        self.core = DrivenMaster().formed("a", "b").master
        self.observatory = Observatory(Chronicle(lambda: 0.0, lambda: 0.0))

    def tally(self, peer_id: str, now: float, tally: Tally) -> None:
        self.observatory.tally(peer_id, tally, self.core.world_size_of(peer_id), now)

    def group(self, now: float) -> GroupReport:
        self.observatory.tick(self.core, now, 1000 + now)
        [group] = self.observatory.report(self.core, now, 1000 + now, since=0, dashboard="").groups
        return group


def test_throughput_is_the_sum_of_the_members_and_operations_are_their_mean() -> None:
    seen = _Seen()
    for now in (0.0, 1.0, 2.0):
        for peer in "ab":
            seen.tally(peer, now, _tally(operations=int(10 * now), moved=int(1000 * now)))
    sample = seen.group(2.0).history[-1]
    assert (sample.bytes_per_s, sample.operations_per_s, sample.at) == (2000.0, 10.0, 1002.0)


def test_the_throughput_of_who_says_nothing_more_goes_to_zero() -> None:
    seen = _Seen()
    seen.tally("a", 0.0, _tally())
    seen.tally("a", 1.0, _tally(5, 5000))
    assert seen.group(2.0).history[-1].bytes_per_s == 5000.0
    assert seen.group(4.0).history[-1].bytes_per_s == 0.0


def test_a_long_silence_was_no_part_of_the_work_after_it() -> None:
    seen = _Seen()
    seen.tally("a", 0.0, _tally())
    seen.tally("a", 1000.0, _tally(5, 5000))
    assert seen.group(1000.0).history[-1].bytes_per_s == 2000.0


def test_one_who_connects_anew_counts_from_nothing_and_is_not_negative() -> None:
    seen = _Seen()
    seen.tally("a", 0.0, _tally(100, 100_000))
    seen.tally("a", 1.0, _tally(1, 10))
    assert seen.group(1.0).history[-1].bytes_per_s == 0.0


def test_an_operation_that_several_are_in_is_told_once_with_their_number() -> None:
    seen = _Seen()
    seen.tally("a", 0.0, _tally(running=(Running(7, "barrier", 2.0), Running(8, "broadcast of 4 FLOAT", 0.5))))
    seen.tally("b", 0.0, _tally(running=(Running(7, "barrier", 3.0),)))
    rows = [(row.tag, row.what, row.members, row.seconds) for row in seen.group(1.0).in_flight]
    assert rows == [(7, "barrier", 2, 3.0), (8, "broadcast of 4 FLOAT", 1, 0.5)]


def test_nothing_is_kept_of_who_is_gone() -> None:
    seen = _Seen()
    seen.tally("a", 0.0, _tally(1, 1))
    seen.tally("stranger", 0.0, _tally(1, 1))
    seen.group(1.0)
    assert set(seen.observatory._told) == {"a"}


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[MasterThread, PeerStarter]]:
    """A master in this process, with a journal, and what starts peers on it."""
    thread = serve(journal=str(tmp_path / "journal"))
    starter = PeerStarter(thread.start(), ownership := Ownership())
    try:
        yield thread, starter
    finally:
        starter.end()
        thread.stop("the test is over")
        ownership.wait_until_gone()


def _work(comm: Communicator, count: int) -> None:
    tensor = np.ones(1024, np.float32)
    for _ in range(count):
        comm.all_reduce(tensor, op=ReduceOp.AVG)


def _all_work(peers: Sequence[PeerProcess], count: int) -> None:
    for done in [peer.run_async(_work, count) for peer in peers]:
        done.result(20)


def test_a_real_group_is_reported_with_its_work_its_loss_and_its_recovery(
    watched: tuple[MasterThread, PeerStarter],
) -> None:
    master, start = watched
    peers = start(3)
    _all_work(peers, 5)

    def told() -> bool:
        return [member.operations for member in master.report().groups[0].members] == [5, 5, 5]

    eventually(told, 10, "all members have told what they did")
    os.kill(peers[2].pid, signal.SIGKILL)
    for peer in peers[:2]:
        peer.wait_epoch(2)
    report = from_json(to_json(master.report()))
    [group] = report.groups
    assert (group.name, group.epoch, group.phase) == ("0", 2, "steady")
    assert {member.peer_id for member in group.members} == {peer.peer_id for peer in peers[:2]}
    assert [member.bytes for member in group.members] == [5 * 4096] * 2
    assert (group.losses, group.recoveries) == (1, 1)
    kinds = [happening.kind for happening in report.happenings]
    assert kinds == [K.BOOTED, *[K.JOINED] * 3, K.EPOCH, K.LOST, K.RECOVERED]
    lost, recovered = report.happenings[-2:]
    assert lost.peer_id == peers[2].peer_id and lost.reason
    assert recovered.took_ms is not None and 0 < recovered.took_ms < 5000
    assert [h.number for h in master.report(since=lost.number).happenings] == [recovered.number]


def test_a_stuck_operation_is_told_for_as_long_as_it_is_in_flight(watched: tuple[MasterThread, PeerStarter]) -> None:
    master, start = watched
    peers = start(2)
    started = peers[0].run_async(_work, 1)

    def stuck() -> bool:
        rows = master.report().groups[0].in_flight
        return [(row.what, row.members) for row in rows if row.seconds > 1.5] == [("all_reduce AVG of 1024 FLOAT", 1)]

    eventually(stuck, 10, "the operation is told, with its age")
    peers[1].run(_work, 1)
    started.result(10)
    eventually(lambda: not master.report().groups[0].in_flight, 10, "it is told no more")


def _fly(comm: Communicator, flying: bool) -> None:
    """As if the tally were taken after an operation was counted, and before it was let go."""
    recorder = comm._connected().recorder
    recorder.running = lambda: [Running(7, "barrier", 1.0)] if flying else []
    recorder.changes += flying


def test_an_operation_that_was_told_when_it_had_been_counted_already_is_told_no_more(
    watched: tuple[MasterThread, PeerStarter],
) -> None:
    master, start = watched
    peers = start(2)
    peers[0].run(_fly, True)
    eventually(lambda: master.report().groups[0].in_flight, 10, "the operation is told")
    peers[0].run(_fly, False)
    eventually(lambda: not master.report().groups[0].in_flight, 10, "it is told no more")


def _counts(comm: Communicator) -> tuple[int, int, int, int]:
    seen = comm.statistics()
    return seen.operations, seen.bytes, seen.recoveries, seen.latency["all_reduce"].count


def test_a_communicator_tells_its_own_statistics(watched: tuple[MasterThread, PeerStarter]) -> None:
    _, start = watched
    peers = start(2)
    _all_work(peers, 4)
    assert [peer.run(_counts) for peer in peers] == [(4, 4 * 4096, 0, 4)] * 2
    os.kill(peers[1].pid, signal.SIGKILL)
    peers[0].wait_epoch(2)
    assert peers[0].run(_counts)[2] == 1
    assert 0 < peers[0].run(_last_recovery_ms) < 5000


def _last_recovery_ms(comm: Communicator) -> float | None:
    return comm.statistics().last_recovery_ms
