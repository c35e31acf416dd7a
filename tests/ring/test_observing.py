"""Samples of what links carry: only while they are busy, and not when the receiver is the slow one."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from ray_pccl.ring.link import Link
from ray_pccl.ring.observing import STRAY_BYTES, Counters, Meter, Traffic, counters
from ray_pccl.ring.wire import Frame, Type
from ray_pccl.testing import eventually

MIB = 1 << 20


class Kernel:
    """A clock and counters that only the test moves, and what the meter tells."""

    def __init__(self) -> None:
        self.now = 0.0
        self.counters: Counters | None = Counters(0, 0.0, 0.0)
        self.told: list[float] = []
        self.traffic = Traffic()
        self.traffic.queued(MIB, around=True)
        self.meter = Meter(self.traffic, lambda: self.counters, self.told.append, lambda: self.now)

    def passes(self, seconds: float, acked: int, receiver_limited_s: float = 0.0, busy_s: float | None = None) -> None:
        assert self.counters is not None
        self.now += seconds
        busy = self.counters.busy_s + (seconds if busy_s is None else busy_s)
        self.counters = Counters(
            self.counters.acked + acked, busy, self.counters.receiver_limited_s + receiver_limited_s
        )


def test_from_full_to_drained_what_was_acknowledged_is_what_the_link_carries() -> None:
    kernel = Kernel()
    kernel.meter.full()
    kernel.passes(0.25, 2 * MIB)
    kernel.meter.full()
    kernel.passes(0.25, 2 * MIB)
    kernel.meter.drained()
    assert kernel.told == [8 * MIB]


def test_a_link_that_was_never_full_tells_nothing() -> None:
    kernel = Kernel()
    kernel.passes(1.0, 100 * MIB)
    kernel.meter.drained()
    assert kernel.told == []


@pytest.mark.parametrize(("seconds", "acked"), [(0.04, 8 * MIB), (0.5, MIB - 1)])
def test_short_and_small_samples_say_nothing(seconds: float, acked: int) -> None:
    kernel = Kernel()
    kernel.meter.full()
    kernel.passes(seconds, acked)
    kernel.meter.drained()
    assert kernel.told == []


def test_a_slow_consumer_is_not_taken_for_a_slow_link() -> None:
    kernel = Kernel()
    kernel.meter.full()
    kernel.passes(0.5, 2 * MIB, receiver_limited_s=0.06)
    kernel.meter.drained()
    assert kernel.told == []


def test_a_thread_that_gets_no_core_is_not_taken_for_a_slow_link() -> None:
    kernel = Kernel()
    kernel.meter.full()
    kernel.passes(0.5, 2 * MIB, busy_s=0.125)  # then the socket ran dry, with more in the queue
    kernel.meter.drained()
    assert kernel.told == [16 * MIB]
    kernel.meter.full()
    kernel.passes(0.5, 2 * MIB, busy_s=0.04)  # too short to tell
    kernel.meter.drained()
    kernel.meter.full()
    kernel.passes(0.5, 2 * MIB, receiver_limited_s=0.02, busy_s=0.125)  # the receiver's part is one of the busy time
    kernel.meter.drained()
    assert kernel.told == [16 * MIB]


def test_large_data_that_goes_elsewhere_spoils_the_sample() -> None:
    kernel = Kernel()
    kernel.meter.full()
    kernel.traffic.queued(STRAY_BYTES, around=False)
    kernel.passes(0.5, 2 * MIB)
    kernel.meter.drained()
    assert kernel.told == []
    kernel.meter.full()  # nothing goes around the ring
    kernel.passes(0.5, 2 * MIB)
    kernel.meter.drained()
    assert kernel.told == []
    kernel.traffic.queued(MIB, around=True)
    kernel.meter.full()
    kernel.traffic.queued(STRAY_BYTES - 1, around=False)
    kernel.traffic.queued(MIB, around=True)
    kernel.passes(0.5, 2 * MIB)
    kernel.meter.drained()
    assert kernel.told == [4 * MIB]


def test_a_link_that_stays_busy_tells_now_and_then() -> None:
    kernel = Kernel()
    kernel.meter.full()
    for _ in range(10):
        kernel.passes(0.5, 2 * MIB)
        kernel.meter.full()
    assert kernel.told == [4 * MIB] * 5


def test_without_counters_nothing_is_told() -> None:
    kernel = Kernel()
    kernel.counters = None
    kernel.meter.full()
    kernel.now = 1.0
    kernel.meter.drained()
    assert kernel.told == []


# ------------------------------------------------------------------------------------------------------ real sockets


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
        with near, far:
            yield near, far


def test_the_kernels_counters_are_read(ends: tuple[socket.socket, socket.socket]) -> None:
    near, far = ends
    near.sendall(bytes(100_000))
    assert len(far.recv(100_000, socket.MSG_WAITALL)) == 100_000
    if counters(near) is None:
        pytest.skip("this kernel has no TCP_INFO with these counters")

    def all_acknowledged() -> bool:
        found = counters(near)
        return found is not None and 100_000 <= found.acked <= 100_001

    eventually(all_acknowledged, 5, "all that was sent is acknowledged")


def test_time_in_which_nothing_was_to_be_sent_is_not_busy(ends: tuple[socket.socket, socket.socket]) -> None:
    near, far = ends
    if counters(near) is None:
        pytest.skip("this kernel has no TCP_INFO with these counters")
    far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    near.setblocking(False)
    sent = near.send(bytes(4 * MIB))
    began = time.monotonic()
    eventually(lambda: time.monotonic() - began >= 0.3, 5, "the receiver has read nothing for a while")
    busy = counters(near)
    assert busy is not None and busy.busy_s >= 0.2
    assert len(far.recv(sent, socket.MSG_WAITALL)) == sent

    def done() -> bool:
        found = counters(near)
        return found is not None and found.acked >= sent

    eventually(done, 5, "all that was sent is acknowledged")
    first = counters(near)
    began = time.monotonic()
    eventually(lambda: time.monotonic() - began >= 0.3, 5, "the socket was empty for a while")
    assert counters(near) == first


def test_a_link_to_a_peer_that_reads_slowly_tells_nothing(ends: tuple[socket.socket, socket.socket]) -> None:
    """Its consumer takes 20 MB/s of what loopback carries in gigabytes."""
    near, far = ends
    if counters(near) is None:
        pytest.skip("this kernel has no TCP_INFO with these counters")
    far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 256 << 10)
    near.setblocking(False)
    told: list[float] = []
    link = Link(near, "p", handler=None, local=False)  # type: ignore[arg-type]
    link.meter = Meter(Traffic(), lambda: counters(near), told.append)
    total, taken = 8 * MIB, 0
    piece = memoryview(bytes(MIB))
    for _ in range(total // MIB):
        link.send_data(Frame(Type.DATA, MIB, 1), piece, None, around=True)

    def consume() -> None:
        nonlocal taken
        while taken < total:
            taken += len(far.recv(100_000))
            time.sleep(0.005)

    consumer = threading.Thread(target=consume)
    consumer.start()
    began = time.monotonic()
    while link._queue and time.monotonic() - began < 20:
        link.pump()
        time.sleep(0.001)
    consumer.join(20)
    assert taken >= total and time.monotonic() - began > 0.2
    assert told == []
