"""Deaths that are hard to see are noticed as fast as the others, and the living are left alone."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest

from ray_pccl import Communicator, MembershipChange, PeerEvictedError, Settings
from ray_pccl.testing.faults import Faults
from ray_pccl.testing.groups import PeerGroup, PeerStarter
from ray_pccl.testing.peers import PeerProcess
from ray_pccl.testing.waiting import eventually

NOTICED_WITHIN_S = 0.5
"""Far above what is measured (see benchmarks/recovery.py), far below what a missing mechanism costs."""
TIMEOUT_S = Settings().heartbeat_timeout_s


def when_epoch(peer: PeerProcess, epoch: int) -> float:
    """When the peer had the epoch. It is told by a thread of its own, which may be a little behind."""

    def stamps() -> list[float]:
        return [
            stamped.at
            for stamped in peer.events()
            if stamped.event.change is MembershipChange.EPOCH and stamped.event.epoch == epoch
        ]

    return eventually(stamps, what=f"{peer} tells of epoch {epoch}")[0]


def seconds_to_notice(peers: PeerGroup, began: float) -> float:
    survivors = [peer for peer in peers if peer is not peers[0]]
    for peer in survivors:
        peer.wait_epoch(2)
    return max(when_epoch(peer, 2) for peer in survivors) - began


def lost_reason(peer: PeerProcess) -> str:
    [reason] = [stamped.event.reason for stamped in peer.events() if stamped.event.change is MembershipChange.LOST]
    return reason


def hold_memory(comm: Communicator, size: int) -> int:
    memory = bytearray(size)
    for page in range(0, size, 4096):
        memory[page] = 1
    comm.held = memory  # type: ignore[attr-defined]
    return len(memory)


def fork_a_loader(comm: Communicator) -> int:
    """A torch DataLoader whose worker outlives us for as long as it is not told to end."""
    from torch.utils.data import DataLoader

    loader = iter(DataLoader(list(range(100)), num_workers=1, multiprocessing_context="fork"))
    next(loader)
    comm.loader = loader  # type: ignore[attr-defined]
    [worker] = loader._workers
    return int(worker.pid)


def hold_gil(comm: Communicator, seconds: float) -> float:
    began = time.monotonic()
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    return time.monotonic() - began


@pytest.mark.parametrize("mebibytes", [0, 1024])
def test_a_killed_peer_is_noticed_however_large_it_is(mebibytes: int, peer_group: PeerStarter, faults: Faults) -> None:
    peers = peer_group(3)
    assert peers[0].run(hold_memory, mebibytes << 20, timeout=60) == mebibytes << 20
    began = time.monotonic()
    os.kill(peers[0].pid, 9)
    assert seconds_to_notice(peers, began) < NOTICED_WITHIN_S
    assert lost_reason(peers[1])


def test_a_killed_peer_is_noticed_though_its_data_loader_lives_on(peer_group: PeerStarter, faults: Faults) -> None:
    peers = peer_group(3)
    worker = peers[0].run(fork_a_loader, timeout=60)
    faults.stop(worker)  # it can't notice that its parent is gone
    began = time.monotonic()
    os.kill(peers[0].pid, 9)
    assert seconds_to_notice(peers, began) < NOTICED_WITHIN_S
    faults.kill(worker)


def test_a_frozen_peer_is_evicted_after_the_heartbeat_timeout_and_not_before(
    peer_group: PeerStarter, faults: Faults
) -> None:
    peers = peer_group(3)
    began = time.monotonic()
    faults.stop(peers[0])
    noticed = seconds_to_notice(peers, began)
    assert TIMEOUT_S <= noticed < TIMEOUT_S + NOTICED_WITHIN_S
    assert "SIGSTOP" in lost_reason(peers[1])
    old = peers[0].peer_id
    faults.resume(peers[0])
    with pytest.raises(PeerEvictedError, match="SIGSTOP"):
        peers[0].call("update_topology", timeout=20)
        peers[0].call("update_topology", timeout=20)
    again = peers[0].call_async("connect", 20)
    eventually(lambda: peers[1].call("num_waiting") == 1, what="the evicted peer waits as a new one")
    for _ in range(2):  # the first call since their admission is absorbed
        votes = [peer.call_async("update_topology") for peer in (peers[1], peers[2])]
        for vote in votes:
            vote.result(20)
    again.result(20)
    assert peers[0].run(lambda comm: comm.peer_id) != old
    assert peers[0].world_size == 3


def test_a_short_freeze_costs_nothing(peer_group: PeerStarter, faults: Faults) -> None:
    peers = peer_group(3)
    for _ in range(3):
        faults.stop(peers[0])
        thawed_at = time.monotonic() + TIMEOUT_S / 2
        eventually(lambda end=thawed_at: time.monotonic() >= end, timeout=TIMEOUT_S)
        faults.resume(peers[0])
        assert peers[0].call("num_waiting", timeout=10) == 0
    assert [peer.epoch for peer in peers] == [1, 1, 1]


@pytest.mark.slow
def test_a_healthy_peer_that_holds_its_gil_for_ten_seconds_is_not_evicted(peer_group: PeerStarter) -> None:
    peers = peer_group(3)
    assert peers[0].run(hold_gil, 10.0, timeout=30) >= 10.0
    assert peers[0].call("num_waiting", timeout=10) == 0
    assert [peer.epoch for peer in peers] == [1, 1, 1]


def _burn(until: float) -> None:
    while time.monotonic() < until:
        pass


@pytest.mark.slow
def test_nobody_is_evicted_on_a_machine_whose_every_core_is_loaded(peer_group: PeerStarter) -> None:
    peers = peer_group(3)
    seconds = 15.0
    context: Any = multiprocessing.get_context("spawn")
    load = [
        context.Process(target=_burn, args=(time.monotonic() + seconds,), daemon=True)
        for _ in range(2 * (os.cpu_count() or 1))
    ]
    for process in load:
        process.start()
    for process in load:
        process.join(seconds + 30)
    assert [peer.epoch for peer in peers] == [1, 1, 1]
    assert all(peer.call("num_waiting", timeout=10) == 0 for peer in peers)


def test_a_sentinel_that_dies_is_replaced_and_nobody_is_evicted(peer_group: PeerStarter, faults: Faults) -> None:
    peers = peer_group(3)
    first = sentinel_of(peers[0])
    faults.kill(first)
    second = eventually(lambda: sentinel_of(peers[0], besides=first), timeout=10, what="a new sentinel")
    assert second != first
    eventually(lambda: watched(peers), timeout=10, what="all peers are watched again")
    assert [peer.epoch for peer in peers] == [1, 1, 1]
    began = time.monotonic()
    faults.stop(peers[0])
    assert seconds_to_notice(peers, began) < TIMEOUT_S + 2 * NOTICED_WITHIN_S
    faults.resume(peers[0])


def watched(peers: PeerGroup) -> bool:
    return all(peer.run(lambda comm: comm._connection.wait_watched(0)) for peer in peers)


def sentinel_of(peer: PeerProcess, besides: int = 0) -> int:
    """The process id of the sentinel that watches a peer, by the name of its socket."""
    address = peer.run(_sentinel_address)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != besides:
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if address.encode() in words and b"ray_pccl.peer.sentinel" in b" ".join(words):
                return int(entry.name)
    return 0


def _sentinel_address(comm: Communicator) -> str:
    from ray_pccl.peer.host import sentinel_address

    assert comm._connection is not None
    return sentinel_address(comm._connection.membership.master_id).removeprefix("\0")
