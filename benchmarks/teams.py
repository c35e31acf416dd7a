"""Teams: the worker processes of one library, that wait for their turn without using a processor."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from work import Work

WORKER = Path(__file__).with_name("worker.py")
START_PATIENCE_S = 90.0
STEP_PATIENCE_S = 300.0
END_PATIENCE_S = 10.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class TeamFailed(Exception):
    """A library did not start, gave a wrong result, or stopped answering; the message says why."""


class Team:
    """The processes of one library. Workers are told over a Unix socket, each by its rank.

    Args:
        name: What the library is called in the results.
        peers: How many workers there will be.
        commands: What to start: one command per worker, or one that starts them all. ``SOCKET`` stands for the place
            where the workers find us, ``FOLDER`` for a folder of this team's own.
        environment: Variables on top of ours.

    Raises:
        TeamFailed: They did not all come in time.
    """

    def __init__(
        self, name: str, peers: int, commands: Sequence[Sequence[str]], environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.pids: list[int] = []
        self.version = ""
        self._pipes: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="bench-")
        self._log = Path(self._folder.name) / "log"
        try:
            self._start(peers, commands, {**os.environ, "TMPDIR": self._folder.name, **(environment or {})})
        except BaseException:
            self.end()
            raise

    def _start(self, peers: int, commands: Sequence[Sequence[str]], environment: Mapping[str, str]) -> None:
        address = str(Path(self._folder.name) / "socket")
        places = {"SOCKET": address, "FOLDER": self._folder.name}
        with socket.socket(socket.AF_UNIX) as listener, self._log.open("wb") as log:
            listener.bind(address)
            listener.listen(peers)
            listener.settimeout(0.2)
            for command in commands:
                words = [places.get(word, word) for word in command]
                self._processes.append(
                    subprocess.Popen(
                        words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                    )
                )
            self._accept(listener, peers)
        greetings = sorted(
            ((self._answer(pipe, START_PATIENCE_S), pipe) for pipe in self._pipes), key=lambda greeting: greeting[0][0]
        )
        self._pipes = [pipe for _, pipe in greetings]
        self.pids = [pid for (_, pid, _), _ in greetings]
        self.version = greetings[0][0][2]

    def _accept(self, listener: socket.socket, peers: int) -> None:
        deadline = time.monotonic() + START_PATIENCE_S
        while len(self._pipes) < peers:
            with contextlib.suppress(TimeoutError):
                self._pipes.append(Connection(listener.accept()[0].detach()))
                continue
            if ended := [process.returncode for process in self._processes if process.poll() is not None]:
                raise TeamFailed(f"a process ended with code {ended[0]}: {self._last_words()}")
            if time.monotonic() > deadline:
                raise TeamFailed(f"only {len(self._pipes)} of {peers} workers came within {START_PATIENCE_S:g} s")

    def call(self, command: str, work: Work, *arguments: Any, patience_s: float = STEP_PATIENCE_S) -> list[Any]:
        """Has all workers obey at the same time; their answers, by rank."""
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((command, work, *arguments))
            except OSError:
                raise TeamFailed(f"the worker of rank {rank} is gone: {self._last_words()}") from None
        deadline = time.monotonic() + patience_s
        return [self._answer(pipe, max(0.0, deadline - time.monotonic())) for pipe in self._pipes]

    def _answer(self, pipe: Connection, patience_s: float) -> Any:
        try:
            if not pipe.poll(patience_s):
                raise TeamFailed(f"a worker did not answer in time: {self._last_words()}")
            went_well, answer = pipe.recv()
        except (EOFError, OSError):
            raise TeamFailed(f"a worker ended: {self._last_words()}") from None
        if not went_well:
            raise TeamFailed(answer.strip())
        return answer

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines() if self._log.exists() else []
        return "\n".join(lines[-12:]) or "it said nothing"

    def cpu_seconds(self) -> float:
        """Processor time that the workers have used so far."""
        ticks = 0
        for pid in self.pids:
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / TICKS_PER_S

    def end(self) -> None:
        """Lets the workers go, and kills those that stay. May be called twice."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + END_PATIENCE_S
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):  # the leader of its own session: nobody else is in it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._folder.cleanup()
