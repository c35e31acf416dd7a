"""A master that was held up, by its journal, its scheduler or its boot, holds that against nobody."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from master_actor.journal import MemoryStorage
from master_actor.thread import MasterThread
from ray_pccl import Communicator, Endpoint, Settings
from ray_pccl.testing.faults import Faults
from ray_pccl.testing.groups import PeerStarter
from ray_pccl.testing.waiting import eventually

SETTINGS = Settings(
    sentinel=False, last_call_s=0.0, answer_timeout_s=0.4, register_grace_s=0.8, reconnect_cap_ms=100, join_timeout_s=20
)


class SlowStorage(MemoryStorage):
    """Takes as long as it is told to for every entry."""

    delay_s = 0.0

    def create(self, key: str, value: bytes) -> bool:
        time.sleep(self.delay_s)
        return super().create(key, value)


@contextlib.contextmanager
def group(endpoint: Endpoint, count: int) -> Iterator[list[Communicator]]:
    peers = [Communicator("g", master=endpoint, min_world_size=count, settings=SETTINGS) for _ in range(count)]
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(Communicator.connect, peers))
    try:
        yield peers
    finally:
        for peer in peers:
            peer.close()


def test_a_journal_that_takes_longer_than_an_answer_may_costs_nobody_its_place() -> None:
    storage = SlowStorage()
    master = MasterThread(storage=storage, settings=SETTINGS)
    with master as endpoint, group(endpoint, 4) as peers:
        storage.delay_s = 4 * SETTINGS.answer_timeout_s
        write = threading.Thread(target=peers[0].store.set, args=("k", b"v"))
        write.start()
        peers[3].close()  # the question to the others now waits behind the write
        write.join()
        storage.delay_s = 0.0
        eventually(lambda: {peer.epoch for peer in peers[:3]} == {2}, what="the survivors' epoch")
        assert [peer.world_size for peer in peers[:3]] == [3, 3, 3]


def test_a_boot_that_takes_longer_than_the_grace_costs_nobody_its_place() -> None:
    storage = SlowStorage()
    first = MasterThread(storage=storage, settings=SETTINGS)
    with group(first.start(), 3) as peers:
        first.crash()
        storage.delay_s = 2 * SETTINGS.register_grace_s
        with MasterThread(storage=storage, settings=SETTINGS):
            storage.delay_s = 0.0
            assert [peer.num_waiting() for peer in peers] == [0, 0, 0]
            assert [peer.epoch for peer in peers] == [1, 1, 1]


@pytest.mark.slow
def test_a_master_that_is_frozen_right_after_its_restart_costs_nobody_its_place(
    peer_group: PeerStarter, faults: Faults, master_process: object
) -> None:
    peers = peer_group(3)
    faults.kill_master()
    pid: int = master_process.pid  # type: ignore[attr-defined]
    faults.stop(pid)
    frozen_until = time.monotonic() + Settings().register_grace_s + 1.0
    eventually(lambda: time.monotonic() >= frozen_until, timeout=10)
    faults.resume(pid)
    assert [peer.call("num_waiting", timeout=20) for peer in peers] == [0, 0, 0]
    assert [peer.epoch for peer in peers] == [1, 1, 1]
