"""Which processes belong to a test: those that carry its mark in their environment.

A mark is handed down to everything that a process starts: sentinels, forked workers, all of Ray. So a fixture can tell
that nothing of it is left, and a fault can refuse to signal a process that no fixture started.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
from collections.abc import Iterator
from pathlib import Path

from ray_pccl.testing.waiting import eventually

VARIABLE = "RAY_PCCL_TESTING_OWNER"
LEFT_TIMEOUT_S = 20.0
"""Longer than a sentinel goes on trying to report to a master that is away."""
END_TIMEOUT_S = 60.0
"""How long the kernel may take to free a large process."""
_SESSION = secrets.token_hex(8)


class Ownership:
    """The mark of one fixture's processes."""

    def __init__(self) -> None:
        self._mark = f"{_SESSION}/{secrets.token_hex(8)}"

    def environment(self) -> dict[str, str]:
        """This process's environment with the mark, for processes to be started with."""
        return {**os.environ, VARIABLE: self._mark}

    @contextlib.contextmanager
    def adopt(self) -> Iterator[None]:
        """Marks whatever this process starts meanwhile."""
        before = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = self._mark
        try:
            yield
        finally:
            del os.environ[VARIABLE]
            if before is not None:
                os.environ[VARIABLE] = before

    def processes(self, *, besides: int | None = None) -> dict[int, str]:
        """The processes with the mark, and what each was started as; this one and `besides` are left out."""
        pids = {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()}
        return {pid: _command(pid) for pid in pids - {os.getpid(), besides} if _mark_of(pid) == self._mark}

    def wait_until_gone(self, timeout: float = LEFT_TIMEOUT_S, *, besides: int | None = None) -> None:
        """Returns when no process with the mark is left, or only `besides`.

        Raises:
            AssertionError: Some are; it names them. They have been ended with SIGKILL.
        """

        def left() -> dict[int, str]:
            return self.processes(besides=besides)

        try:
            eventually(lambda: not left(), timeout, lambda: f"processes are left behind: {left()}")
        except AssertionError:
            for pid in left():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    send_signal(pid, signal.SIGKILL)
            raise


def send_signal(pid: int, number: signal.Signals) -> None:
    """Signals a process that a fixture of this test session started, itself or through others, and no other.

    Returns when a process that got SIGKILL has ended.

    Raises:
        ProcessLookupError: There is no such process.
        PermissionError: No fixture started it.
    """
    # The descriptor names this process and none that gets its number later, so the check and the signal mean the same.
    handle = os.pidfd_open(pid)
    try:
        if not _mark_of(pid).startswith(_SESSION + "/"):
            raise PermissionError(f"process {pid} was not started by a fixture of ray_pccl.testing: it is left alone")
        signal.pidfd_send_signal(handle, number)
        if number is signal.SIGKILL:
            select.select([handle], [], [], END_TIMEOUT_S)
    finally:
        os.close(handle)


def _mark_of(pid: int) -> str:
    """The process's mark; empty if it has none, is gone, or is somebody else's."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return ""
    for entry in environment.split(b"\0"):
        name, _, value = entry.partition(b"=")
        if name == VARIABLE.encode():
            return value.decode()
    return ""


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
