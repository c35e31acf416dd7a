"""How much the way to another peer carries, measured over connections of their own, in one direction after the other.

Everything here blocks, in threads of its own, and ends by itself within a few seconds: by what was measured, by the
time that both sides know, or because `stopped` says so. The receiver counts, and ends it: what the sender's kernel has
taken says nothing, and a slow way would need seconds to drain it. `docs/design/topology.md` says more.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from ray_pccl.errors import PCCLError, ProtocolError
from ray_pccl.ring import fault_points

MOST_MS = 2000
MOST_BYTES = 1 << 30
"""What one stream sends at most, however fast it is."""
WARM_UP = 1 / 3
"""The part of a probe that does not count: slow start, and what a shaper lets through at once."""
GRACE_S = 3.0
"""How much longer than agreed a side waits for the other."""
LOOK_S = 0.1
REDIAL_S = 0.2
_HEAD = struct.Struct(">BH")
_RESULT = struct.Struct(">d")
_RESET = struct.pack("ii", 1, 0)
_BLOCK = bytes(256 << 10)

Connect = Callable[[], socket.socket]
Stopped = Callable[[], bool]


class UnreachableError(OSError):
    """No connection can be made: refused, no route, or no answer."""


class Direction(IntEnum):
    """Which way the data of a stream goes."""

    THERE = 1
    """From who dials."""
    BACK = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured, and how."""

    streams: int
    duration_s: float
    directions: tuple[Direction, ...] = (Direction.THERE, Direction.BACK)


# -------------------------------------------------------------------------------------------------------- who dials


def measure(connect: Connect, plan: Plan, stopped: Stopped) -> dict[Direction, float | None]:
    """Bytes per second in each direction: 0 where no connection can be made, None where nothing could be measured.

    `connect` gives a connection whose other side has proved itself and serves it with `serve`. It may raise
    `UnreachableError`, which is believed the second time, and `OSError` or `PCCLError` for all else that goes wrong.
    """
    try:
        return {direction: _measure(_patient(connect), plan, direction, stopped) for direction in plan.directions}
    except UnreachableError:
        return dict.fromkeys(plan.directions, 0.0)


def _patient(connect: Connect) -> Connect:
    def twice() -> socket.socket:
        try:
            return connect()
        except UnreachableError:
            time.sleep(REDIAL_S)
            return connect()

    return twice


def _measure(connect: Connect, plan: Plan, direction: Direction, stopped: Stopped) -> float | None:
    start = threading.Barrier(plan.streams)
    rates: list[float | None] = [None] * plan.streams
    unreachable: list[UnreachableError] = []

    def run(stream: int) -> None:
        try:
            with connect() as sock:
                start.wait(plan.duration_s + GRACE_S)
                rates[stream] = _stream(sock, plan.duration_s, direction, stopped)
        except UnreachableError as error:
            unreachable.append(error)
            start.abort()
        except (OSError, PCCLError, threading.BrokenBarrierError):
            start.abort()

    threads = [
        threading.Thread(target=run, args=(stream,), name="ray_pccl-probe", daemon=True)
        for stream in range(plan.streams)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if unreachable:
        raise unreachable[0]
    known = [rate for rate in rates if rate is not None]
    return sum(known) if len(known) == plan.streams else None


def _stream(sock: socket.socket, duration_s: float, direction: Direction, stopped: Stopped) -> float | None:
    sock.settimeout(LOOK_S)
    sock.sendall(_HEAD.pack(direction, round(duration_s * 1000)))
    fault_points.reach("probing")
    rate = _count(sock, duration_s, stopped) if direction is Direction.BACK else _pour(sock, duration_s, stopped)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)  # what is still on its way need not arrive
    return rate


# ------------------------------------------------------------------------------------------------- who is dialled


def serve(sock: socket.socket, stopped: Stopped) -> None:
    """The other side of one stream; closes the connection. Raises `OSError`, `ProtocolError`."""
    with sock:
        # The others of the probe may still be shaking hands, and so does who waits for them.
        head = _exactly(sock, _HEAD.size, MOST_MS / 1000 + 2 * GRACE_S, stopped)
        kind, duration_ms = _HEAD.unpack(head)
        if kind not in iter(Direction) or not 0 < duration_ms <= MOST_MS:
            raise ProtocolError(f"a probe of kind {kind} and {duration_ms} ms")
        fault_points.reach("probed")
        if kind == Direction.THERE:
            rate = _count(sock, duration_ms / 1000, stopped)
            sock.sendall(_RESULT.pack(-1.0 if rate is None else rate))
            _drain(sock, stopped)
        else:
            _pour(sock, duration_ms / 1000, stopped)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


# ------------------------------------------------------------------------------------------------------ both sides


def _count(sock: socket.socket, duration_s: float, stopped: Stopped) -> float | None:
    """Receives for as long as agreed; the rate from the end of the warm-up to the last byte."""
    sock.settimeout(LOOK_S)
    buffer = bytearray(1 << 20)
    began = counts = last = 0.0
    before = received = 0
    ends = time.monotonic() + duration_s + GRACE_S
    while (now := time.monotonic()) < ends and not stopped():
        try:
            count = sock.recv_into(buffer)
        except TimeoutError:
            continue
        if not count:
            return None
        now = time.monotonic()
        if not began:
            began, ends = now, now + duration_s
        if now < began + WARM_UP * duration_s:
            before += count
        elif not counts:
            counts = last = now  # what came with this one had been on its way before
        else:
            received, last = received + count, now
    if received and last > counts:
        return received / (last - counts)
    # So slow that hardly anything came: all of it counts.
    return before / max(duration_s, now - began) if before else None


def _pour(sock: socket.socket, duration_s: float, stopped: Stopped) -> float | None:
    """Sends until the other side has enough; what it says then, if it says something."""
    sock.setblocking(False)
    poll = select.poll()
    poll.register(sock, select.POLLIN | select.POLLOUT)
    answer, sent = b"", 0
    ends = time.monotonic() + duration_s + GRACE_S
    while time.monotonic() < ends and not stopped():
        for _, events in poll.poll(LOOK_S * 1000):
            try:
                if events & (select.POLLIN | select.POLLERR | select.POLLHUP):
                    more = sock.recv(_RESULT.size - len(answer))
                    answer += more
                    if not more or len(answer) == _RESULT.size:
                        return _rate_of(answer)
                elif events & select.POLLOUT:
                    sent += sock.send(_BLOCK)
            except BlockingIOError:
                continue
            except ConnectionError:
                return None
        if sent >= MOST_BYTES:
            poll.modify(sock, select.POLLIN)
    return None


def _rate_of(answer: bytes) -> float | None:
    if len(answer) < _RESULT.size:
        return None
    rate: float = _RESULT.unpack(answer)[0]
    return rate if 0 < rate < float("inf") else None


def _drain(sock: socket.socket, stopped: Stopped) -> None:
    """Takes what still comes: to close on it would reset the connection before the result has left."""
    sock.settimeout(LOOK_S)
    buffer = bytearray(1 << 20)
    ends = time.monotonic() + GRACE_S
    with contextlib.suppress(ConnectionError):
        while time.monotonic() < ends and not stopped():
            try:
                if not sock.recv_into(buffer):
                    return
            except TimeoutError:
                continue


def _exactly(sock: socket.socket, count: int, timeout_s: float, stopped: Stopped) -> bytes:
    sock.settimeout(LOOK_S)
    data = b""
    ends = time.monotonic() + timeout_s
    while len(data) < count:
        if time.monotonic() >= ends or stopped():
            raise TimeoutError("a probe that says nothing")
        try:
            more = sock.recv(count - len(data))
        except TimeoutError:
            continue
        if not more:
            raise ConnectionError("the peer closed the connection")
        data += more
    return data
