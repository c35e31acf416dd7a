"""How much the way to another peer carries, measured over connections of their own, in one direction after the other.

Everything here blocks, in threads of its own, and ends by itself within a few seconds: by what was measured, by the
time that both sides know, or because `stopped` says so. The receiver counts, and ends it: what the sender's kernel has
taken says nothing, and a slow way would need seconds to drain it. `docs/design/topology.md` says more.
"""

from __future__ import annotations

import bisect
import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import pairwise
from typing import TypeVar

from ray_pccl.errors import PCCLError, ProtocolError
from ray_pccl.ring import fault_points

MOST_MS = 2000
MOST_BYTES = 1 << 30
"""What one stream sends at most, however fast it is."""
WARM_UP = 1 / 3
"""The part of a probe that does not count: slow start, and what a shaper lets through at once."""
SHORTEST = 1 / 6
"""The part of a probe in which all streams have to run together, for it to tell something."""
MARK_S = 0.002
"""How often the receiver notes how much has come."""
GRACE_S = 3.0
"""How much longer than agreed a side waits for the other."""
LOOK_S = 0.1
REDIAL_S = 0.2
_HEAD = struct.Struct(">BH")
_COUNT = struct.Struct(">H")
_MARK = struct.Struct(">dQ")
_ANSWER_BYTES = _COUNT.size + 0xFFFF * _MARK.size
_RESET = struct.pack("ii", 1, 0)
_BLOCK = bytes(256 << 10)

T = TypeVar("T")
Connect = Callable[[], socket.socket]
Stopped = Callable[[], bool]
Marks = list[tuple[float, int]]
"""How many bytes of a stream had come at which time, by the receiver's clock; the last one when it stopped."""


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
        rates = _attempt(_patient(connect), plan, plan.directions, stopped)
    except UnreachableError:
        return dict.fromkeys(plan.directions, 0.0)
    missing = tuple(direction for direction, rate in rates.items() if rate is None)
    if missing and not stopped():
        with contextlib.suppress(UnreachableError):  # it could be reached a moment ago
            rates |= _attempt(connect, plan, missing, stopped)
    return rates


def _patient(connect: Connect) -> Connect:
    def twice() -> socket.socket:
        try:
            return connect()
        except UnreachableError:
            time.sleep(REDIAL_S)
            return connect()

    return twice


def _attempt(
    connect: Connect, plan: Plan, directions: tuple[Direction, ...], stopped: Stopped
) -> dict[Direction, float | None]:
    """One direction after the other, over connections that are all made before: a busy way delays handshakes."""
    with contextlib.ExitStack() as ends:
        dialled = _at_once([connect] * (plan.streams * len(directions)))
        for sock in dialled:
            if isinstance(sock, socket.socket):
                ends.callback(sock.close)
        for error in dialled:
            if isinstance(error, UnreachableError):
                raise error
        socks = [sock for sock in dialled if isinstance(sock, socket.socket)]
        if len(socks) < len(dialled):
            return dict.fromkeys(directions)
        ways = [(direction, socks[at :: len(directions)]) for at, direction in enumerate(directions)]
        return {direction: _measure(streams, plan, direction, stopped) for direction, streams in ways}


def _measure(socks: list[socket.socket], plan: Plan, direction: Direction, stopped: Stopped) -> float | None:
    streams = _at_once([partial(_stream, sock, plan.duration_s, direction, stopped) for sock in socks])
    records = [marks for marks in streams if isinstance(marks, list)]
    return common_rate(records, plan.duration_s) if len(records) == len(streams) else None


def _at_once(functions: Sequence[Callable[[], T]]) -> list[T | Exception]:
    """Runs functions in threads of their own; what each returned, or raised."""
    results: list[T | Exception] = [OSError("it did not run")] * len(functions)

    def run(place: int) -> None:
        try:
            results[place] = functions[place]()
        except (OSError, PCCLError) as error:
            results[place] = error

    threads = [
        threading.Thread(target=run, args=(place,), name="ray_pccl-probe", daemon=True)
        for place in range(len(functions))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def _stream(sock: socket.socket, duration_s: float, direction: Direction, stopped: Stopped) -> Marks | None:
    """One stream, to its end: what is still on its way then must not be in the way of the other direction."""
    with sock:
        sock.settimeout(LOOK_S)
        sock.sendall(_HEAD.pack(direction, round(duration_s * 1000)))
        fault_points.reach("probing")
        marks = _count(sock, duration_s, stopped) if direction is Direction.BACK else _pour(sock, duration_s, stopped)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    return marks


def common_rate(records: Sequence[Marks], duration_s: float) -> float | None:
    """What all streams carried together while all of them ran, after their warm-up; None if that was too short.

    Streams that do not begin together, since a core was busy, each find the way free for a while: the sum of what
    each carried by itself would be more than the way does.
    """
    if not all(records):
        return None
    begin = max(marks[0][0] for marks in records) + WARM_UP * duration_s
    end = min(marks[-1][0] for marks in records)
    if end - begin < SHORTEST * duration_s:
        return None
    moved = sum(_total_at(marks, end) - _total_at(marks, begin) for marks in records)
    return moved / (end - begin) if moved > 0 else None


def _total_at(marks: Marks, at: float) -> float:
    place = max(1, min(bisect.bisect_left(marks, (at, 0)), len(marks) - 1))
    (before, low), (after, high) = marks[place - 1], marks[place]
    part = (at - before) / (after - before) if after > before else 1.0
    return low + (high - low) * min(1.0, max(0.0, part))


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
            marks = _count(sock, duration_ms / 1000, stopped)
            sock.sendall(_COUNT.pack(len(marks)) + b"".join(_MARK.pack(*mark) for mark in marks))
            _drain(sock, stopped)
        else:
            _pour(sock, duration_ms / 1000, stopped)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


# ------------------------------------------------------------------------------------------------------ both sides


def _count(sock: socket.socket, duration_s: float, stopped: Stopped) -> Marks:
    """Receives for as long as agreed, from the first byte on: how much had come when."""
    sock.settimeout(LOOK_S)
    buffer = bytearray(1 << 20)
    marks: Marks = []
    total = 0
    ends = time.monotonic() + duration_s + GRACE_S
    while time.monotonic() < ends and not stopped():
        try:
            count = sock.recv_into(buffer)
        except TimeoutError:
            continue
        if not count:
            return []
        now = time.monotonic()
        if not marks:
            ends = now + duration_s
        total += count
        if not marks or now - marks[-1][0] >= MARK_S:
            marks.append((now, total))
    if marks:
        marks.append((time.monotonic(), total))
    return marks


def _pour(sock: socket.socket, duration_s: float, stopped: Stopped) -> Marks | None:
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
                    more = sock.recv(_ANSWER_BYTES)
                    answer += more
                    if not more or len(answer) >= _length_of(answer):
                        return _marks_of(answer)
                elif events & select.POLLOUT:
                    sent += sock.send(_BLOCK)
            except BlockingIOError:
                continue
            except ConnectionError:
                return None
        if sent >= MOST_BYTES:
            poll.modify(sock, select.POLLIN)
    return None


def _length_of(answer: bytes) -> int:
    """Of the whole answer that begins like this."""
    if len(answer) < _COUNT.size:
        return _COUNT.size
    count: int = _COUNT.unpack_from(answer)[0]
    return _COUNT.size + count * _MARK.size


def _marks_of(answer: bytes) -> Marks | None:
    """What the other has counted; None if that is nothing, or makes no sense."""
    if len(answer) < _COUNT.size or len(answer) != _length_of(answer):
        return None
    marks: Marks = list(_MARK.iter_unpack(answer[_COUNT.size :]))
    sound = all(a[0] <= b[0] and a[1] <= b[1] for a, b in pairwise(marks))
    return marks if sound else None


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
