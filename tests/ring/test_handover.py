"""Memory that changes hands: sealed, of the announced size, and the receiver's to rely on."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from ray_pccl.errors import ProtocolError
from ray_pccl.ring import dialing, handover
from ray_pccl.ring.dialing import Meeting

PARTS = [np.arange(10, dtype=np.uint8), np.empty(0, np.uint8), np.full(5000, 7, np.uint8)]


@pytest.fixture
def sealed():
    fd = handover.sealed_file(PARTS)
    yield fd
    os.close(fd)


def test_a_sealed_file_holds_its_parts_and_nobody_can_change_it(sealed: int) -> None:
    memory = handover.map_sealed(sealed, 5010)
    assert memory.tobytes() == b"".join(part.tobytes() for part in PARTS)
    with pytest.raises(PermissionError):
        os.pwrite(sealed, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(sealed, 10)
    with pytest.raises(PermissionError):
        mmap.mmap(sealed, 5010)
    with pytest.raises(ValueError, match="read-only"):
        memory[0] = 1


def test_memory_outlives_its_descriptor_and_takes_none() -> None:
    before = _open_files()
    memories = []
    for number in range(50):
        fd = handover.sealed_file([np.full(10, number, np.uint8)])
        memories.append(handover.map_sealed(fd, 10)[2:])
        os.close(fd)
    assert _open_files() == before
    assert [memory.tolist() for memory in memories] == [[number] * 8 for number in range(50)]
    held = _mapped_files()
    assert held >= 50
    memories.clear()
    assert _mapped_files() <= held - 50, "it goes with the last array over it"


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _mapped_files() -> int:
    return Path("/proc/self/maps").read_text().count("ray_pccl-handover")


def test_where_nothing_can_be_mapped_any_more_it_is_read(sealed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "_mmap", lambda *_: handover._FAILED)
    assert handover.map_sealed(sealed, 5010).tobytes() == b"".join(part.tobytes() for part in PARTS)


def test_a_file_of_another_size_or_without_seals_is_refused(sealed: int) -> None:
    with pytest.raises(ProtocolError):
        handover.map_sealed(sealed, 5011)
    fd = os.memfd_create("plain", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 10)
        with pytest.raises(ProtocolError):
            handover.map_sealed(fd, 10)
        fcntl.fcntl(fd, 1033, 0x2 | 0x4)  # it can't shrink, but be written
        with pytest.raises(ProtocolError):
            handover.map_sealed(fd, 10)
    finally:
        os.close(fd)


def test_heads_come_whole_with_or_without_a_descriptor(sealed: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(ours, [handover.HEAD.pack(handover.HERE, 5010)], [sealed])
        what, size, fds = handover.receive_head(Meeting(theirs, "p", [], local=True))
        assert (what, size, len(fds)) == (handover.HERE, 5010, 1)
        dialing.close_all(fds)
        for byte in handover.HEAD.pack(handover.FOLLOWS, 3) + b"abc":
            ours.send(bytes([byte]))
        assert handover.receive_head(Meeting(theirs, "p", [], local=False)) == (handover.FOLLOWS, 3, [])
        memory = np.empty(3, np.uint8)
        handover.receive_into(theirs, memory)
        assert memory.tobytes() == b"abc"
        ours.send(b"\0\0")
        ours.close()
        with pytest.raises(ConnectionError):
            handover.receive_head(Meeting(theirs, "p", [], local=True))


def test_a_large_send_may_take_longer_than_the_patience_for_each_step() -> None:
    here, there = socket.socketpair()
    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
    here.settimeout(0.5)
    data = np.arange(1 << 16, dtype=np.uint32).view(np.uint8)
    received = bytearray()

    def read_slowly() -> None:
        while len(received) < len(data):
            received.extend(there.recv(1 << 13))
            time.sleep(0.03)

    reader = threading.Thread(target=read_slowly, daemon=True)
    reader.start()
    began = time.monotonic()
    handover.send_all(here, data)

    assert time.monotonic() - began > 0.5, "the test is too fast to tell"
    reader.join(10.0)
    assert bytes(received) == data.tobytes()
