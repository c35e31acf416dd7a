"""Suppliers and pullers over real sockets, in one process: with partners that lie, fail, or talk nonsense."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ray_pccl.ring import fault_points, handover
from ray_pccl.ring.dialing import Meeting
from ray_pccl.state import supplying
from ray_pccl.state.hashing import digests_of
from ray_pccl.state.pieces import PIECE_BYTES, cut
from ray_pccl.state.pulling import Puller
from ray_pccl.state.supplying import INDEX, REQUEST, Offer, Supply
from ray_pccl.testing import eventually

SYNC = b"sync" * 4
CONTENTS = [np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8) for size in (3 * PIECE_BYTES + 5, 7, 7, 0)]
PIECES = cut([len(content) for content in CONTENTS], [False] * 4)
WANTED = digests_of(CONTENTS, PIECES)
LOCALLY = pytest.mark.parametrize("local", [True, False], ids=["memory", "socket"])


def _connection(serve: Callable[[Meeting], None], *, local: bool) -> Meeting:
    ours, theirs = socket.socketpair()
    ours.settimeout(10)

    def run() -> None:
        with theirs, contextlib.suppress(OSError):  # the other side may have hung up
            serve(Meeting(theirs, "receiver", [], local))

    threading.Thread(target=run, daemon=True).start()
    return Meeting(ours, "source", [], local)


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _supply(contents=CONTENTS) -> Supply:
    supply = Supply()
    supply.offer(SYNC, Offer(contents, PIECES, keeps=True))
    return supply


def _pull(sources: dict[str, Callable[[Meeting], None]], *, local: bool) -> Puller:
    puller = Puller(SYNC, PIECES, WANTED, lambda peer, _: _connection(sources[peer], local=local))
    puller.want(range(len(PIECES)), WANTED, dict.fromkeys(sources, WANTED))
    return puller


def _whole(puller: Puller) -> bool:
    parts: list[list[np.ndarray]] = [[] for _ in CONTENTS]
    for index in sorted(puller.arrived):
        parts[PIECES[index].tensor].append(puller.arrived[index])
    return all(b"".join(p.tobytes() for p in some) == c.tobytes() for some, c in zip(parts, CONTENTS, strict=True))


@LOCALLY
def test_pieces_come_from_all_sources(local: bool) -> None:
    supplies = {"a": _supply(), "b": _supply()}
    puller = _pull({name: supply.serve for name, supply in supplies.items()}, local=local)
    eventually(lambda: puller.wait(0.1), 10, "everything has arrived")
    assert _whole(puller) and puller.missing == 0
    assert puller.rx_bytes == sum(map(len, CONTENTS))
    puller.stop()


@LOCALLY
def test_a_source_that_lies_is_left_out_and_the_last_one_that_does_is_told_of(local: bool) -> None:
    false = [content.copy() for content in CONTENTS]
    false[0][PIECE_BYTES + 1] ^= 1
    false[1][0] ^= 1
    both = _pull({"liar": _supply(false).serve, "honest": _supply().serve}, local=local)
    eventually(lambda: both.wait(0.1), 10, "everything has arrived")
    assert _whole(both) and both.spoilt == -1
    alone = _pull({"liar": _supply(false).serve}, local=local)
    eventually(lambda: alone.spoilt >= 0, 10, "it is noticed")
    assert not alone.sources and alone.missing
    for puller in (both, alone):
        puller.stop()


def test_a_liar_that_is_the_last_one_left_is_told_of() -> None:
    false = [content ^ 1 for content in CONTENTS]
    gone = threading.Event()
    puller = _pull({"liar": _supply(false).serve, "slow": lambda meeting: gone.wait(10) and None}, local=True)
    eventually(lambda: puller.sources == ("slow",), 10, "the liar is left out")
    assert puller.spoilt == -1, "there is another one to ask"
    puller.drop("slow")
    gone.set()
    assert puller.spoilt >= 0 and not puller.sources
    puller.stop()


def _garbage(meeting: Meeting) -> None:
    meeting.sock.recv(100)
    meeting.sock.sendall(handover.HEAD.pack(handover.FOLLOWS, 1 << 60))
    time.sleep(0.05)


def _no_memory(meeting: Meeting) -> None:
    meeting.sock.recv(100)
    meeting.sock.sendall(handover.HEAD.pack(handover.HERE, PIECE_BYTES))
    time.sleep(0.05)


@LOCALLY
@pytest.mark.parametrize("bad", [_garbage, _no_memory, lambda meeting: None, Supply().serve])
def test_a_source_that_talks_nonsense_or_hangs_up_is_made_up_for(local: bool, bad) -> None:
    puller = _pull({"bad": bad, "good": _supply().serve}, local=local)
    eventually(lambda: puller.wait(0.1), 10, "everything has arrived")
    assert _whole(puller)
    puller.stop()


def test_nobody_reads_what_was_withdrawn() -> None:
    supply = _supply()
    stuck = _connection(supply.serve, local=False)  # it asks, and takes nothing: the source is in the midst of sending
    with stuck.sock:
        stuck.sock.sendall(REQUEST.pack(SYNC, 1) + INDEX.pack(0))
        assert stuck.sock.recv(1)
        began = time.monotonic()
        supply.withdraw(SYNC)
        assert time.monotonic() - began < 5
        with pytest.raises((ConnectionError, AssertionError)):
            while True:
                assert stuck.sock.recv(1 << 20)


def test_withdrawing_waits_for_who_is_in_the_midst_of_reading() -> None:
    supply, inside, goes_on = _supply(), threading.Event(), threading.Event()

    def strike(name: str) -> None:
        if name == "state_sending":
            inside.set()
            assert goes_on.wait(10)

    fault_points.install(strike)
    try:
        meeting = _connection(supply.serve, local=True)
        meeting.sock.sendall(REQUEST.pack(SYNC, 1) + INDEX.pack(0))
        assert inside.wait(10)
        withdrawal = threading.Thread(target=supply.withdraw, args=(SYNC,), daemon=True)
        withdrawal.start()
        withdrawal.join(0.2)
        assert withdrawal.is_alive(), "the user would change what is being read"
        goes_on.set()
        withdrawal.join(10)
        assert not withdrawal.is_alive()
    finally:
        fault_points.install(None)
        goes_on.set()


@pytest.mark.parametrize(
    "request_",
    [
        REQUEST.pack(SYNC, 0),
        REQUEST.pack(SYNC, 1 << 31),
        REQUEST.pack(SYNC, 1) + INDEX.pack(len(PIECES)),
        REQUEST.pack(SYNC, 2) + INDEX.pack(0) + INDEX.pack(1),
    ],
    ids=["nothing", "too many", "no such piece", "too large"],
)
def test_a_request_that_makes_no_sense_ends_the_connection(request_: bytes) -> None:
    meeting = _connection(_supply().serve, local=False)
    with meeting.sock:
        meeting.sock.sendall(request_)
        assert meeting.sock.recv(1) == b""


def test_several_receivers_get_the_same_memory() -> None:
    supply = _supply()
    inodes = set()
    for _ in range(3):
        meeting = _connection(supply.serve, local=True)
        with meeting.sock:
            meeting.sock.sendall(REQUEST.pack(SYNC, 1) + INDEX.pack(0))
            _, _, fds = handover.receive_head(meeting)
            inodes.add(os.fstat(fds[0]).st_ino)
            os.close(fds[0])
    assert len(inodes) == 1
    supply.withdraw(SYNC)


def test_a_source_keeps_only_so_many_files_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supplying, "KEPT_FILES", 1)
    supply = _supply()
    before = _open_files()
    puller = _pull({"a": supply.serve}, local=True)
    eventually(lambda: puller.wait(0.1), 10, "everything has arrived")
    puller.stop()
    assert _whole(puller)
    eventually(lambda: _open_files() <= before + 1, 10, "but one are closed")
    supply.withdraw(SYNC)
    assert _open_files() <= before
