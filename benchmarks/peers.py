"""What the benchmarks share: a master and peers as processes of their own, and a table to print.

Peers are fresh interpreters that do what a user's process does: make a `Communicator`, connect, vote. They stamp
every event with `time.monotonic()`, which on Linux is one clock for all processes of a machine, and report over a pipe,
so the time of the pipe is in no figure.
"""

from __future__ import annotations

import json
import math
import mmap
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from ray_pccl import Communicator, MembershipChange, MembershipEvent, Settings

PATIENCE_S = 60.0
"""How long any single step may take before the benchmark gives up."""
SPAWN = multiprocessing.get_context("spawn")
GONE = (MembershipChange.LOST.value, MembershipChange.EVICTED.value)


class Report(NamedTuple):
    """What a peer tells about itself: a membership event, or that it is done with a command."""

    what: str
    at: float
    epoch: int = 0
    members: tuple[str, ...] = ()
    peer_id: str = ""
    detail: str = ""


class MasterProcess:
    """``python -m master_actor`` on loopback; as a context manager it gives itself."""

    def __enter__(self) -> MasterProcess:
        command = [sys.executable, "-m", "master_actor", "--host", "127.0.0.1", "--port", "0", "--dashboard-host", ""]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        self.endpoint = self._process.stdout.readline().strip()
        if not self.endpoint:
            raise RuntimeError("the master did not start; run `python -m master_actor --port 0` to see why")
        self.pid = self._process.pid
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE_S)


class Peer:
    """The handle of one peer process. `joined()` blocks until it is a member."""

    def __init__(self, endpoint: str, group: str, *, min_world_size: int = 1, resident_mib: int = 0) -> None:
        self._pipe, theirs = SPAWN.Pipe()
        arguments = (theirs, endpoint, group, min_world_size, resident_mib)
        self.process = SPAWN.Process(target=_live, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.reports: list[Report] = []
        self.peer_id = ""
        self.children: list[int] = []

    def joined(self) -> Report:
        """Waits until the peer is a member."""
        report = self.wait(lambda report: report.what == "joined")
        self.peer_id = report.peer_id
        return report

    def vote(self) -> None:
        """Sends the peer into `update_topology()`; `voted()` waits for its return."""
        self._pipe.send("vote")

    def voted(self) -> Report:
        """Waits until `update_topology()` has returned."""
        return self.wait(lambda report: report.what == "voted")

    def fork(self, how: str) -> None:
        """Has the peer fork a child that does nothing: "fork" as Python does it, "raw_fork" behind Python's back."""
        self._pipe.send(how)
        self.children.append(int(self.wait(lambda report: report.what == "forked").detail))

    def epoch_without(self, peer_id: str) -> Report:
        """Waits until the peer holds an epoch that `peer_id` is no member of."""
        return self.wait(lambda report: report.what == MembershipChange.EPOCH.value and peer_id not in report.members)

    def wait(self, wanted: Callable[[Report], bool]) -> Report:
        """The next report that is wanted; those before it are taken as read."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"peer {self.peer_id} did not report within {PATIENCE_S:g} s: {self.reports[-3:]}")
            report = self._pipe.recv()
            self.reports.append(report)
            if report.what == "failed":
                raise RuntimeError(f"peer {self.peer_id} failed: {report.detail}")
            if wanted(report):
                return report

    def drain(self) -> list[Report]:
        """What the peer has reported since somebody last looked."""
        fresh = []
        while self._pipe.poll(0):
            fresh.append(self._pipe.recv())
        self.reports += fresh
        return fresh

    def resident_mib(self) -> float:
        """How much memory the process holds, as the kernel counts it."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) / 1024

    def send_signal(self, number: signal.Signals) -> float:
        """Sends the signal, and returns the time just before."""
        assert self.process.pid is not None
        at = time.monotonic()
        os.kill(self.process.pid, number)
        return at

    def end(self) -> None:
        """Kills the process and its children, and waits until it is gone."""
        self.process.kill()
        for child in self.children:  # they hold the pipe that tells us of the parent's end
            os.kill(child, signal.SIGKILL)
        self.process.join(PATIENCE_S)
        self._pipe.close()


class Trio:
    """Two members that stay, and a third that is new in every trial."""

    def __init__(self, endpoint: str, group: str) -> None:
        self._endpoint, self._group = endpoint, group
        self.survivors = [Peer(endpoint, group, min_world_size=2) for _ in range(2)]
        for survivor in self.survivors:
            survivor.joined()

    def admit(self, *, resident_mib: int = 0) -> Peer:
        """A new third member: it comes, the two vote, and all three hold the same epoch."""
        newcomer = Peer(self._endpoint, self._group, min_world_size=2, resident_mib=resident_mib)
        for survivor in self.survivors:
            survivor.wait(lambda report: report.what == MembershipChange.WAITING.value)
        for survivor in self.survivors:
            survivor.vote()
        joined = newcomer.joined()
        for survivor in self.survivors:
            voted = survivor.voted()
            assert (voted.epoch, voted.members) == (joined.epoch, joined.members), "members of an epoch disagree"
        return newcomer

    def end(self) -> None:
        """Ends the two."""
        for survivor in self.survivors:
            survivor.end()


# ------------------------------------------------------------------------------------------- inside a peer process


def _live(pipe: Connection, endpoint: str, group: str, min_world_size: int, resident_mib: int) -> None:
    """A peer's life: joins, obeys commands, ends with its pipe."""
    memory = _reside(resident_mib)
    lock = threading.Lock()
    settings = Settings.from_env(last_call_s=0.0)
    comm = Communicator(group, master=endpoint, min_world_size=min_world_size, settings=settings)

    def say(report: Report) -> None:
        with lock:
            pipe.send(report)

    def on_event(event: MembershipEvent) -> None:
        report = Report(event.change.value, time.monotonic(), event.epoch, event.members, event.peer_id or "")
        say(report._replace(detail=event.reason))

    comm.on_membership(on_event)
    try:
        comm.connect(timeout=PATIENCE_S)
        comm.update_topology()  # the first call after the admission returns at once; from here on it is a vote
        say(Report("joined", time.monotonic(), comm.epoch, comm.members, comm.peer_id))
        while True:
            command = pipe.recv()
            if command == "vote":
                comm.update_topology(timeout=PATIENCE_S)
                say(Report("voted", time.monotonic(), comm.epoch, comm.members))
            else:
                say(Report("forked", time.monotonic(), detail=str(_fork(command))))
    except EOFError:
        comm.close()
    except Exception as error:
        say(Report("failed", time.monotonic(), detail=repr(error)))
        raise
    finally:
        memory.close()


def _reside(mib: int) -> mmap.mmap:
    """Memory that is really there, in small pages: the slowest kind to give back when the process dies."""
    memory = mmap.mmap(-1, max(1, mib) << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    if mib:
        memory[:: mmap.PAGESIZE] = b"\1" * (len(memory) // mmap.PAGESIZE)
    return memory


def _fork(how: str) -> int:
    """A child that outlives its parent. Through Python it lets go of the parent's sockets; behind its back it can't."""
    if how == "raw_fork":
        import ctypes

        child = ctypes.PyDLL(None).fork()
    else:
        child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    return int(child)


# ------------------------------------------------------------------------------------------------------ the table


@dataclass
class Row:
    """One line of a result. `samples` are measured in this run; what is quoted comes from elsewhere, and says so."""

    name: str
    unit: str
    samples: list[float]
    target: float
    target_text: str
    quoted: dict[str, str] = field(default_factory=dict)
    note: str = ""

    @property
    def median(self) -> float:
        """The middle sample."""
        return statistics.median(self.samples)

    @property
    def p99(self) -> float:
        """The 99th percentile by nearest rank: with fewer than 100 samples the largest."""
        return sorted(self.samples)[math.ceil(0.99 * len(self.samples)) - 1]

    @property
    def met(self) -> bool:
        """Whether the median is within the target; a count that must be zero is within it only at zero."""
        return self.median < self.target or self.median == self.target == 0


def shown(value: float) -> str:
    """A figure in as many digits as it deserves."""
    return (
        f"{value:.2f}" if 0 < value < 10 else f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"
    )


def print_table(headings: list[str], lines: list[list[str]]) -> None:
    """Prints aligned columns: the first to the left, the others to the right."""
    widths = [max(len(cells[i]) for cells in [headings, *lines]) for i in range(len(headings))]
    for cells in [headings, ["-" * width for width in widths], *lines]:
        first, *others = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        ]
        print("  ".join([first, *others]).rstrip())


def write_json(path: str, rows: list[Row], **more: object) -> None:
    """Writes the rows, with every sample, to a file."""
    results = [{**asdict(row), "median": row.median, "p99": row.p99, "met": row.met} for row in rows]
    Path(path).write_text(json.dumps({**more, "results": results}, indent=2) + "\n")


def progress(text: str) -> None:
    """One line on the terminal that the next one overwrites; nothing where nobody watches."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
