"""A master and the peers of one group, in processes that can be struck; and the watch over those that hang."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from ray_pccl.settings import Settings
from ray_pccl.testing.master import MasterProcess
from tests.chaos.board import Board, State, Word
from tests.chaos.peer import Config
from tests.chaos.workload import SLOTS

SETTINGS = Settings(heartbeat_timeout_s=0.7, register_grace_s=0.8, reconnect_cap_ms=200.0)
HANG_S = 35.0
"""No call may take this long: longer than the timeout of an operation, which would be an error of its own."""
_GONE_S = 20.0


class HangError(AssertionError):
    """Something did not happen in time."""


class Nursery:
    """The process that forks peers."""

    def __init__(self) -> None:
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self._lock = threading.Lock()

    def fork(self, config: Config) -> int:
        """Starts a peer; its pid."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(asdict(config)) + "\n")
            self._process.stdin.flush()
            return int(self._process.stdout.readline())

    def close(self) -> None:
        """Ends it, and every peer that is left."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(_GONE_S)
        self._process.stdout.close()


class Victim:
    """A peer process, as the test sees it."""

    def __init__(self, config: Config, pid: int) -> None:
        self.config = config
        self.name = config.name
        self.pid = pid
        self.board = Board(Path(config.directory) / f"{config.name}.board")
        self.stopped = False
        self.harmed = False
        """Whether the test has done to it what may get it evicted."""
        self._seen = (-1, time.monotonic())
        try:
            self._handle: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._handle = None

    @property
    def alive(self) -> bool:
        """Whether its process has not ended."""
        return self._handle is not None and not select.select([self._handle], [], [], 0)[0]

    @property
    def is_member(self) -> bool:
        """Whether it runs operations."""
        return self.alive and not self.stopped and self.board[Word.STATE] == State.MEMBER

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal, if it is still there."""
        if self._handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def stuck_for(self) -> float:
        """For how many seconds no call of its has ended."""
        progress, now = self.board[Word.PROGRESS], time.monotonic()
        if progress != self._seen[0] or self.stopped:
            self._seen = (progress, now)
        return now - self._seen[1]

    def stack(self) -> str:
        """Where its threads are."""
        spy = shutil.which("py-spy", path=str(Path(sys.executable).parent) + os.pathsep + os.environ.get("PATH", ""))
        if spy is None:
            self.signal(signal.SIGUSR1)
            return f"its threads are in {self.name}.log"
        done = subprocess.run(
            [spy, "dump", "--pid", str(self.pid)], capture_output=True, text=True, timeout=30, check=False
        )
        return done.stdout + done.stderr

    def let_go(self) -> None:
        """Kills it, uncounted, and closes what the test holds of it."""
        if self._handle is not None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGKILL)
            select.select([self._handle], [], [], _GONE_S)
            os.close(self._handle)
            self._handle = None


class Arena:
    """One group: its master, its peers. A context manager that leaves nothing behind but the records."""

    def __init__(self, nursery: Nursery, directory: Path, transport: str, seed: int, bug: str = "") -> None:
        self._nursery = nursery
        self.directory = directory
        self._transport, self._seed, self._bug = transport, seed, bug
        self.master = MasterProcess(directory, SETTINGS)
        self.victims: list[Victim] = []
        self._slot_used = [-1] * SLOTS

    def __enter__(self) -> Arena:
        self.master.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for victim in self.victims:
            victim.let_go()
        self.master.close()

    def launch(self) -> Victim:
        """Starts one more peer, in the slot that was free for longest."""
        number = len(self.victims)
        busy = {victim.config.slot for victim in self.victims if victim.alive}
        slot = min((slot for slot in range(SLOTS) if slot not in busy), key=self._slot_used.__getitem__)
        self._slot_used[slot] = number
        endpoint = str(self.master.endpoint)
        directory = str(self.directory)
        config = Config(f"peer{number:04d}", directory, endpoint, self._transport, self._seed, number, slot, self._bug)
        Board(self.directory / f"{config.name}.board")
        victim = Victim(config, self._nursery.fork(config))
        self.victims.append(victim)
        return victim

    def members(self) -> list[Victim]:
        """Those that run operations now."""
        return [victim for victim in self.victims if victim.is_member]

    def fill(self, size: int) -> None:
        """Starts as many as are missing; they are admitted as the others look for newcomers."""
        alive = sum(victim.alive and not victim.stopped for victim in self.victims)
        for _ in range(size - alive):
            self.launch()

    def wait(self, condition: Callable[[], bool], what: str, timeout_s: float = HANG_S + 5) -> None:
        """Waits for a condition, and watches over the peers meanwhile."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.watch()
            if time.monotonic() >= deadline:
                raise HangError(f"not within {timeout_s:g} s: {what}\n{self.stacks(self.victims)}")
            time.sleep(0.003)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Waits for what may as well not happen; whether it did."""
        deadline = time.monotonic() + timeout_s
        while not condition() and time.monotonic() < deadline:
            self.watch()
            time.sleep(0.003)
        return condition()

    def wait_progress(self, calls: int) -> None:
        """Waits until every member has ended a few more calls, or is gone."""
        due = [(victim, victim.board[Word.PROGRESS] + calls) for victim in self.members()]
        self.wait(
            lambda: all(victim.board[Word.PROGRESS] >= goal or not victim.is_member for victim, goal in due),
            "all members go on",
        )

    def watch(self) -> None:
        """Raises `HangError` if a peer has been in one call for too long, with everyone's stacks."""
        stuck = [v for v in self.victims if v.alive and not v.stopped and v.stuck_for() > HANG_S]
        if stuck:
            names = ", ".join(victim.name for victim in stuck)
            raise HangError(f"no call ended within {HANG_S:g} s in {names}\n{self.stacks(self.victims)}")

    def stacks(self, victims: Sequence[Victim]) -> str:
        """Where the threads of all these are."""
        return "\n".join(f"--- {victim.name}\n{victim.stack()}" for victim in victims if victim.alive)
