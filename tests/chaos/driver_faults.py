"""What befalls the actors of a driver's group, and its master: kills and stops, counted by kind and by phase."""

from __future__ import annotations

import contextlib
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from ray_pccl.ring.fault_points import NAMES
from tests.chaos.board import Action, Board, Word
from tests.chaos.driver_worker import Mark, started
from tests.chaos.faults import IN_RECOVERY

PHASES = ("idle", "method", "collective")
STOP_S = 2.0
"""Longer than `heartbeat_timeout_s`: the others go on without it."""
REACH_S = 2.0
"""How long a victim may take to come to its point or phase; if it does not, it is struck where it is."""
GONE_S = 20.0


class Process:
    """A process that can be struck, and never another one that has its pid."""

    def __init__(self, pid: int, handle: int) -> None:
        self.pid = pid
        self._handle = handle

    @classmethod
    def find(cls, pid: int, began: int) -> Process | None:
        """The process of this pid that began then, if it is still there."""
        try:
            handle = os.pidfd_open(pid)
        except (ProcessLookupError, OSError):
            return None
        if started(pid) == began:
            return cls(pid, handle)
        os.close(handle)
        return None

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return not select.select([self._handle], [], [], 0)[0]

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal, if it is still there."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self.signal(signal.SIGKILL)
        gone, _, _ = select.select([self._handle], [], [], GONE_S)
        assert gone, f"process {self.pid} outlives SIGKILL"


class Victim:
    """An actor of the group, as the test sees it."""

    def __init__(self, slot: int, actor: Any, page: Path, *, is_new: bool = False) -> None:
        self.slot = slot
        self.actor = actor
        self.id: str = actor._actor_id.hex()
        self.page = page
        self.board = Board(page)
        self.harms: list[tuple[float, float]] = []
        """From when to when the test has harmed it."""
        self.ailing = is_new
        """Whether it failed in the last call, and not because of others."""
        self.sound_since = 0.0
        """When the last call was made in which it did not fail."""

    def __repr__(self) -> str:
        return f"actor {self.id[:8]} in slot {self.slot}"

    def process(self) -> Process | None:
        """Its present process, if there is one."""
        pid = self.board[Mark.PID]
        return Process.find(pid, self.board[Mark.STARTED]) if pid else None

    @property
    def alive(self) -> bool:
        """Whether it has a process."""
        process = self.process()
        if process is None:
            return False
        with process:
            return process.alive

    def was_harmed(self) -> bool:
        """Whether something was done to it since it last took part."""
        return any(end >= self.sound_since for _, end in self.harms)

    def stack(self) -> str:
        """Where its threads are."""
        path = str(Path(sys.executable).parent) + os.pathsep + os.environ.get("PATH", "")
        spy, pid = shutil.which("py-spy", path=path), self.board[Mark.PID]
        if spy is None or not self.alive:
            return "no process, or no py-spy"
        done = subprocess.run([spy, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=60, check=False)
        return done.stdout + done.stderr


@dataclass
class Tally:
    """What was done so far."""

    kinds: Counter[str] = field(default_factory=Counter)
    """Faults by kind."""
    phases: Counter[str] = field(default_factory=Counter)
    """Kills of actors by what they were doing."""
    points: Counter[str] = field(default_factory=Counter)

    @property
    def kills(self) -> int:
        """Of actors."""
        return self.phases.total()

    def __str__(self) -> str:
        return f"{self.kills} kills {dict(self.phases)} by {dict(self.kinds)}, at points {dict(self.points)}"


class Reaper:
    """Strikes the actors of one group."""

    def __init__(self, victims: Callable[[], Sequence[Victim]], master: Any, chance: random.Random, tally: Tally):
        self._victims = victims
        self._master = master
        self._chance = chance
        self.tally = tally

    def strike(self, kind: str) -> None:
        """One fault. Returns when it is done, not when the group has got over it."""
        getattr(self, kind)()
        self.tally.kinds[kind] += 1

    def alive(self) -> list[Victim]:
        """Who can be struck."""
        return [victim for victim in self._victims() if victim.alive]

    # ------------------------------------------------------------------------------------------------------ kinds

    def anywhere(self) -> None:
        """At a random moment."""
        time.sleep(self._chance.random() * 0.1)
        self._kill(self._victim())

    def idle(self) -> None:
        """While nothing is asked of it."""
        self._kill(self._victim())

    def method(self) -> None:
        """While it makes its value."""
        self._kill_when(lambda victim: victim.board[Mark.IN_METHOD] > 0)

    def collective(self) -> None:
        """While it is in an operation."""
        self._kill_when(lambda victim: victim.board[Word.IN_CALL] > 0)

    def point(self) -> None:
        """At an exact point of the protocol: the one that had the fewest so far."""
        points = [name for name in NAMES if name not in IN_RECOVERY]
        name = min(points, key=lambda point: (self.tally.points[point], self._chance.random()))
        victim, began = self._victim(), time.monotonic()
        process = victim.process()
        if process is None:
            return
        with process:
            victim.harms.append((began, began + REACH_S + GONE_S))
            victim.board.arm(NAMES.index(name), 1, Action.KILL)
            _until(lambda: not process.alive)
            victim.board.disarm()
            if victim.board[Word.STRUCK]:
                self.tally.points[name] += 1
            self._end(victim, process, began)

    def two(self) -> None:
        """Two of them, one right after the other."""
        for victim in self._chance.sample(self.alive(), 2):
            self._kill(victim)
            time.sleep(self._chance.choice((0, 0.005, 0.05)))

    def master(self) -> None:
        """The master, which Ray starts again."""
        with contextlib.suppress(RayActorError, GetTimeoutError):  # it is away already
            pid = ray.get(self._master.pid.remote(), timeout=GONE_S)
            process = Process.find(pid, started(pid))
            if process is not None and ray.get(self._master.pid.remote(), timeout=GONE_S) == pid:
                with process:
                    process.kill()

    def master_and_actor(self) -> None:
        """Both, in either order."""
        victim = self._victim()
        first = self._chance.random() < 0.5
        if first:
            self._kill(victim)
        self.master()
        if not first:
            self._kill(victim)

    def stop(self) -> None:
        """SIGSTOP until the others have gone on without it; then SIGCONT."""
        time.sleep(self._chance.random() * 0.1)
        victim, began = self._victim(), time.monotonic()
        process = victim.process()
        if process is None:
            return
        with process:
            victim.harms.append((began, began + STOP_S + GONE_S))
            process.signal(signal.SIGSTOP)
            time.sleep(STOP_S)
            process.signal(signal.SIGCONT)
            victim.harms[-1] = (began, time.monotonic())

    # ----------------------------------------------------------------------------------------------------- inside

    def _victim(self) -> Victim:
        return self._chance.choice(self.alive())

    def _kill_when(self, condition: Callable[[Victim], bool]) -> None:
        """Whoever comes first into the phase, or someone if nobody does."""
        order = self.alive()
        self._chance.shuffle(order)
        found: list[Victim] = []
        _until(lambda: bool(found.extend([victim for victim in order if condition(victim)]) or found))
        self._kill(found[0] if found else order[0])

    def _kill(self, victim: Victim) -> None:
        process = victim.process()
        if process is not None:
            with process:
                self._end(victim, process, time.monotonic())

    def _end(self, victim: Victim, process: Process, began: float) -> None:
        victim.harms.append((began, began + GONE_S))
        process.kill()
        board = victim.board
        self.tally.phases["method" if board[Mark.IN_METHOD] else "collective" if board[Word.IN_CALL] else "idle"] += 1
        victim.harms[-1] = (began, time.monotonic())


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + REACH_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.0005)
