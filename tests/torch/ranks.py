"""Ranks in processes of their own, forked from one that has imported torch: a test of three takes some 0.3 s, not 6."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Answer = Callable[[Any], None]


class Ended:
    """A rank that ended without an answer."""

    def __init__(self, why: str) -> None:
        self.why = why

    def __repr__(self) -> str:
        return f"<ended: {self.why}>"


@dataclass
class Failed:
    """A rank that raised."""

    error: str
    trace: str


@dataclass
class Forked:
    """A rank, as its parent sees it."""

    pid: int
    pipe: int
    received: bytearray = field(default_factory=bytearray)
    over: bool = False
    status: int | None = None

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def read(self) -> None:
        data = os.read(self.pipe, 1 << 20)
        self.received += data
        if not data:
            self.over = True
            os.close(self.pipe)

    def answers(self) -> list[Any]:
        """What it has said so far: each message as it was given."""
        found, place = [], 0
        while len(self.received) >= place + 8:
            size = int.from_bytes(self.received[place : place + 8], "little")
            if len(self.received) < place + 8 + size:
                break
            found.append(pickle.loads(self.received[place + 8 : place + 8 + size]))
            place += 8 + size
        return found

    def wait(self) -> int:
        if self.status is None:
            _, status = os.waitpid(self.pid, 0)
            self.status = os.waitstatus_to_exitcode(status)
        return self.status


def fork(main: Callable[[Answer], None]) -> Forked:
    """Runs `main` in a child, which ends with it. What it hands to its argument comes back; so does what it raises."""
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return Forked(pid, reading)
    code = 1
    try:
        os.close(reading)
        faulthandler.dump_traceback_later(120, exit=False)
        try:
            main(lambda value: _write(writing, value))
            code = 0
        except BaseException as error:
            _write(writing, Failed(f"{type(error).__name__}: {error}", traceback.format_exc()))
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _write(pipe: int, value: Any) -> None:
    data = pickle.dumps(value)
    data = len(data).to_bytes(8, "little") + data
    while data:
        data = data[os.write(pipe, data) :]


def collect(ranks: list[Forked], timeout: float) -> list[Any]:
    """Each rank's last answer, when all have ended; a rank that does not end in time is killed."""
    deadline = time.monotonic() + timeout
    while open_ranks := [rank for rank in ranks if not rank.over]:
        ready, _, _ = select.select([rank.pipe for rank in open_ranks], [], [], max(0.0, deadline - time.monotonic()))
        for rank in open_ranks:
            if rank.pipe in ready:
                rank.read()
        if not ready and time.monotonic() >= deadline:
            for rank in open_ranks:
                rank.kill(signal.SIGABRT)  # with the tracebacks of its threads, if it has faulthandler enabled
                os.close(rank.pipe)
                rank.over = True
            break
    found = []
    for rank in ranks:
        status = rank.wait()
        answers = rank.answers()
        found.append(answers[-1] if answers else Ended(f"exit status {status}"))
    return found
