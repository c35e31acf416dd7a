"""Nothing is left behind: no thread, no socket, no file, no memory, neither of a group nor of one alone."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from ray_pccl import Communicator, Settings
from ray_pccl.testing import MasterProcess, PeerStarter, eventually
from tests.collectives import programs
from tests.collectives.conftest import TRANSPORTS, survivable, together


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_nothing_is_left_of_one_alone_after_close(shared_master: MasterProcess) -> None:
    with Communicator("leaving", master=shared_master.endpoint, settings=Settings(last_call_s=0.0)):
        pass  # what the process needs once, it has now
    threads, files = set(threading.enumerate()), _descriptors()
    memory = set(Path("/dev/shm").iterdir())
    for _ in range(2):
        with Communicator("leaving", master=shared_master.endpoint, settings=Settings(last_call_s=0.0)) as communicator:
            handles = [communicator.all_reduce_async(np.ones(1000), tag=tag) for tag in range(20)]
            assert all(handle.wait()[0] for handle in handles)
            name = f"ray_pccl-data/{communicator.peer_id}"
            assert name in Path("/proc/net/unix").read_text()
            assert set(Path("/dev/shm").iterdir()) <= memory, "shared memory has no name"
        assert name not in Path("/proc/net/unix").read_text()
    eventually(lambda: set(threading.enumerate()) <= threads, 10, "no thread is left")
    eventually(lambda: _descriptors() <= files, 10, "no file is left open")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_is_left_of_a_group_after_close(peer_group: PeerStarter, transport: str) -> None:
    memory = set(Path("/dev/shm").iterdir())
    peers = survivable(peer_group, transport, 3)
    for kind in ("all_reduce", "all_gather"):
        together(peers, programs.large, kind, ("numpy",), ("float32",))
    together(peers, programs.many_behind, 20)
    assert set(Path("/dev/shm").iterdir()) <= memory, "shared memory has no name"
    before = together(peers, programs.belongings)
    assert all(threads and sockets for threads, sockets, _ in before)
    for peer in peers:
        peer.call("close")
    for peer in peers:
        eventually(lambda peer=peer: not any(peer.run(programs.belongings)), 10, "all is gone", every_s=0.1)
