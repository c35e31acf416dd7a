"""A group that works while you harm it: actors that sum in a loop, and a hand that kills, freezes and adds them.

Everything runs on a local Ray of its own. The actors keep when each sum came back, how long it took and who is in it;
the lab keeps what was done to them, and what the master told, over all the master's lives.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

# Ray reports every process that dies, and what it does about it. Here that is the point, and no news.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed|the task will be retried")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
logging.getLogger("ray.widgets.util").setLevel(logging.ERROR)  # in a notebook it asks for packages, as it is imported
import numpy as np
import ray

import ray_pccl
from ray_pccl import Communicator, Happening, HappeningKind, MembershipChange, MembershipEvent, PCCLError, Settings
from ray_pccl.testing import eventually

GROUP = "lab"
PATIENCE_S = 60.0
LETTERS = "ABCDEFGHIJKLMNOPQRST"
PAUSE_S = 0.01
"""Between two sums: the machine is to be busy, not full."""
SHORT = os.environ.get("RAY_PCCL_NOTEBOOKS") == "short"
"""Whether to be quick, as in CI: shorter waits, fewer trials. The story is the same."""


def start_ray(num_cpus: int = 2) -> None:
    """A local Ray that says nothing; actors may use what is defined in this module."""
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers do not look into this folder


def name_of(peer_id: str | None) -> str:
    """The label that a peer was given: what its id begins with."""
    return (peer_id or "").rpartition("-")[0]


class Sum(NamedTuple):
    """One all-reduce, as one peer saw it."""

    at: float
    """When it came back, in seconds since 1970."""
    took_ms: float
    names: tuple[str, ...]
    """Who is in it."""
    right: bool
    """Whether every element is the sum of what these contributed."""


class Peer:
    """One member. It sums in a thread of its own, so that it can be asked meanwhile."""

    def __init__(self, name: str, mebibytes: float, expected: int) -> None:
        self.sums: list[Sum] = []
        self.error = ""
        self._mine = np.full(int(mebibytes * (1 << 18)) + 1, share_of(name), np.float32)
        self._total = np.empty_like(self._mine)
        self._waiting: set[str] = set()
        settings = Settings.from_env(last_call_s=PATIENCE_S)  # the group forms when all that are expected are there
        self._comm = Communicator(GROUP, label=name, expected_world_size=expected, settings=settings)
        self._comm.on_membership(self._on_membership)
        threading.Thread(target=self._work, daemon=True).start()

    def pid(self) -> int:
        """The process to be harmed."""
        return os.getpid()

    def look(self, since: int) -> tuple[list[Sum], str]:
        """The sums after so many, and what went wrong."""
        return self.sums[since:], self.error

    def _on_membership(self, event: MembershipEvent) -> None:
        if event.change is MembershipChange.WAITING:
            self._waiting.add(str(event.peer_id))
        elif event.change is MembershipChange.WITHDRAWN:
            self._waiting.discard(str(event.peer_id))
        elif event.change is MembershipChange.EPOCH:
            self._waiting.difference_update(event.members)

    def _work(self) -> None:
        while not self.error:
            try:
                self._comm.connect(timeout=PATIENCE_S)
                while True:
                    self._sum()
                    time.sleep(PAUSE_S)
            except ray_pccl.PeerEvictedError:
                pass  # taken for dead, as after a freeze: comes back as a new peer
            except PCCLError as error:
                self.error = f"{type(error).__name__}: {error}"

    def _sum(self) -> None:
        # The last element says that someone waits. It is summed, too: so all members vote at the same step, and only
        # then. A vote needs the master; a sum does not.
        self._mine[-1] = bool(self._waiting)
        began = time.perf_counter()
        info = self._comm.all_reduce(self._mine, self._total)
        took_ms = 1000 * (time.perf_counter() - began)
        names = tuple(sorted(map(name_of, info.contributors)))
        right = bool((self._total[:-1] == sum(map(share_of, names))).all())
        self.sums.append(Sum(time.time(), took_ms, names, right))
        if self._total[-1] > 0:
            self._comm.update_topology()


def share_of(name: str) -> float:
    """What a peer contributes: A 1, B 2, C 4 and so on, so that a sum tells who is in it."""
    return float(1 << (ord(name) - ord("A")))


class Fault(NamedTuple):
    """What was done, and when."""

    at: float
    what: str


class Lab:
    """Peers named by letters, that sum `mebibytes` MiB again and again, and what is known of them.

    `look()` brings `sums`, by peer, and `happenings` up to date; every other method does so by itself.
    """

    def __init__(self, names: str = "ABCD", mebibytes: float = 1.0) -> None:
        start_ray()
        self._mebibytes = mebibytes
        self.master = ray_pccl.start_master()
        self.began = time.time()
        self.sums: dict[str, list[Sum]] = {}
        self.faults: list[Fault] = []
        self.happenings: list[Happening] = []
        self._actors: dict[str, Any] = {}
        self._pids: dict[str, int] = {}
        self._frozen: set[str] = set()
        self._boot = self._seen = 0
        self._start(names, len(names))
        self._until(lambda: all(self.sums[name] for name in names), "the group sums")

    # ------------------------------------------------------------------------------------------------ to do harm

    def kill(self, name: str, *, wait: bool = True) -> None:
        """SIGKILL: the process is gone at once. Returns when the survivors go on without it, if there are any."""
        self._require(name)
        self.look()
        del self._actors[name]
        was_in = self._strike("SIGKILL", name) and name not in self._frozen
        self._frozen.discard(name)
        if wait and was_in:
            self._until_without(name)

    def freeze(self, name: str, *, wait: bool = True) -> None:
        """SIGSTOP: the process is there and does nothing. Returns when the survivors go on without it."""
        self._require(name)
        self.look()
        self._frozen.add(name)
        if self._strike("SIGSTOP", name) and wait:
            self._until_without(name)

    def thaw(self, name: str) -> None:
        """SIGCONT: it wakes up, learns that it was put out, and asks to be let in. Returns when it is."""
        self._require(name)
        self._frozen.discard(name)
        self._strike("SIGCONT", name)
        self._until_with(name)

    def add(self, name: str) -> None:
        """A new actor comes, named by a capital letter. Returns when it is in the sums."""
        assert name not in self._actors and name in set(LETTERS), f"{name!r} is taken, or no letter from A to T"
        self.faults.append(Fault(time.time(), f"{name} comes"))
        self._start(name, 0)
        self._until_with(name)

    def kill_master(self, *, wait: bool = True) -> None:
        """SIGKILL to the master. Returns when Ray has restarted it and all members are known to it again."""
        self.look()
        pid = ray.get(self.master.pid.remote(), timeout=PATIENCE_S)
        self.faults.append(Fault(time.time(), "SIGKILL master"))
        os.kill(pid, signal.SIGKILL)
        if wait:
            self._until(lambda: self._after_fault(HappeningKind.RETURNED), "the master is back")

    def run(self, seconds: float) -> None:
        """Lets the group work."""
        time.sleep(seconds / 3 if SHORT else seconds)
        self.look()

    # --------------------------------------------------------------------------------------------------- to look

    def look(self) -> None:
        """Asks the master, and all peers that can answer."""
        report = ray_pccl.report(since=self._seen)
        if report.boot != self._boot:  # another life of the master: its timeline begins anew
            self._boot, self._seen = report.boot, 0
            report = ray_pccl.report()
        self.happenings += report.happenings
        self._seen = max([self._seen, *(each.number for each in report.happenings)])
        asked = [name for name in self._actors if name not in self._frozen]
        answers = [self._actors[name].look.remote(len(self.sums[name])) for name in asked]
        for name, (fresh, error) in zip(asked, ray.get(answers, timeout=PATIENCE_S), strict=True):
            self.sums[name] += fresh
            assert not error, f"peer {name} gave up: {error}"

    def all_sums(self) -> list[Sum]:
        """Those of all peers, in the order of time."""
        return sorted(each for sums in self.sums.values() for each in sums)

    def seconds(self, at: float) -> float:
        """Since the lab began."""
        return at - self.began

    def tell(self, since: Fault | None = None) -> None:
        """Prints what was done and what the master told, after a fault or from the beginning."""
        start = since.at if since else 0.0
        lines = [(fault.at, f"{'you':<10} {fault.what}") for fault in self.faults]
        lines += [(each.at, described(each)) for each in self.happenings]
        for at, line in sorted(lines):
            if at >= start:
                print(f"{self.seconds(at):8.3f} s  {line}")

    def end(self) -> None:
        """Stops the master, and Ray with all actors."""
        for name in list(self._frozen):
            os.kill(self._pids[name], signal.SIGKILL)
        ray_pccl.stop_master()
        ray.shutdown()

    def _start(self, names: str, expected: int) -> None:
        actor = ray.remote(num_cpus=0, max_concurrency=2)(Peer)
        made = {name: actor.remote(name, self._mebibytes, expected) for name in names}
        self._pids |= dict(zip(made, ray.get([each.pid.remote() for each in made.values()]), strict=True))
        self.sums |= {name: self.sums.get(name, []) for name in names}
        self._actors |= made

    def _require(self, name: str) -> None:
        assert name in self._actors, f"there is no peer {name!r}: there are {', '.join(sorted(self._actors))}"

    def _strike(self, what: str, name: str) -> bool:
        """Sends the signal; whether there is anybody left to notice."""
        self.faults.append(Fault(time.time(), f"{what} {name}"))
        os.kill(self._pids[name], signal.Signals[what])
        return bool(set(self._actors) - self._frozen - {name})

    def _after_fault(self, kind: HappeningKind) -> bool:
        return any(each.kind is kind and each.at >= self.faults[-1].at for each in self.happenings)

    def _until_without(self, name: str) -> None:
        self._until(lambda: self._summed(lambda names: name not in names), f"the sums are without {name}")
        self._until(lambda: self._after_fault(HappeningKind.RECOVERED), "the master told of the recovery")

    def _until_with(self, name: str) -> None:
        self._until(lambda: self._summed(lambda names: name in names), f"the sums are with {name}")

    def _summed(self, wanted: Callable[[tuple[str, ...]], bool]) -> bool:
        return any(each.at >= self.faults[-1].at and wanted(each.names) for each in self.all_sums())

    def _until(self, done: Callable[[], bool], what: str) -> None:
        def looked() -> bool:
            with contextlib.suppress(ray.exceptions.RayActorError):  # somebody has died this very moment
                self.look()
            return done()

        eventually(looked, PATIENCE_S, what)


def described(happening: Happening) -> str:
    """One happening in a line."""
    who = f"{name_of(happening.peer_id)} " if happening.peer_id else ""
    took = f" after {happening.took_ms:.1f} ms" if happening.took_ms is not None else ""
    reason = f": {happening.reason}" if happening.reason else ""
    return f"{happening.kind.value:<10} {who}(epoch {happening.epoch}, {happening.members} members){took}{reason}"
