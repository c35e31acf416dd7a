"""Groups of actors that a driver asks for collectives while they are killed: one round after another."""

from __future__ import annotations

import collections
import gc
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray

import ray_pccl
from ray_pccl import PCCLError
from ray_pccl.driver.master import describe
from ray_pccl.testing import eventually
from tests.chaos.driver_calls import DEADLINE_S, Calls, Flight, HangError, Report
from tests.chaos.driver_faults import Reaper, Victim
from tests.chaos.driver_worker import AsyncWorker, Worker
from tests.chaos.workload import SLOTS

SIZE = 4
WHOLE_S = 60.0
"""Within this time the actors are back, whatever happened."""
FREED_S = 10.0
LOG_LINES = 40
STYLES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sync": (Worker, {"max_restarts": -1}),
    "async": (AsyncWorker, {"max_restarts": -1}),
    "threaded": (Worker, {"max_restarts": -1, "max_concurrency": 16}),
    "replaced": (Worker, {"max_restarts": 0}),
}
"""Kinds of actors; those that Ray does not restart are replaced by others."""
FAULTS = (
    *("idle", "idle", "method", "method", "collective", "collective", "point", "point", "point"),
    *("anywhere", "two", "stale", "master", "master_and_actor", "stop"),
)
"""What happens in a round, in an order that the seed decides: 14 kills of actors."""
KILL_EVERY_S = 2.0
IN_FLIGHT = 100
"""So many calls may wait for the results of those who died, while the others go on."""


class Round:
    """One group, from its first call to its last."""

    def __init__(self, style: str, directory: Path, seed: int, report: Report) -> None:
        self._style, self._directory, self._report = style, directory, report
        self._chance = random.Random(f"{seed}/{style}")
        self._launched = self._step = 0
        self._slots = collections.deque(range(SLOTS))
        """Those that are free, from the one that was so for longest."""
        self._past: dict[str, Victim] = {}
        self._victims = [self._launch() for _ in range(SIZE)]
        self._name = f"chaos-{style}"
        self._group = ray_pccl.create_group([victim.actor for victim in self._victims], self._name)
        self._calls = Calls(self._group, self._chance, report, self.state)
        chance = random.Random(f"{seed}/{style}/faults")
        self._reaper = Reaper(lambda: self._victims, ray_pccl.start_master(), chance, report.tally)
        self._ready()

    def _launch(self, *, is_new: bool = False) -> Victim:
        kind, options = STYLES[self._style]
        slot = self._slots.popleft()
        self._launched += 1
        page = self._directory / f"{self._style}-{self._launched:03d}.board"
        victim_class: Any = ray.remote(num_cpus=0, **options)(kind)
        return Victim(slot, victim_class.remote(slot, str(page)), page, is_new=is_new)

    # ------------------------------------------------------------------------------------------------ its course

    def strike_all(self, faults: Sequence[str], progress: Callable[[str], None]) -> None:
        """One fault after another, each in the middle of calls, with some calm steps in between."""
        for kind in self._chance.sample(faults, len(faults)):
            self._recover()
            if kind == "stale":
                self._strike_between()
            else:
                self._strike_within(kind)
            if self._report.violations:
                return
            progress(f"{self._style}, step {self._step}, {kind}: {self._report.tally}")

    def kill_every(self, pause_s: float, seconds: float, progress: Callable[[str], None]) -> None:
        """Calls as fast as they come, while one actor dies every `pause_s`, whatever is going on."""
        over = threading.Event()

        def reap() -> None:
            due = time.monotonic() + pause_s
            while not over.wait(due - time.monotonic()):
                due += pause_s
                eventually(self._reaper.alive, WHOLE_S)
                self._reaper.strike("anywhere")

        flights: collections.deque[Flight] = collections.deque()
        with ThreadPoolExecutor(1, "reaper") as thread:
            reaping, ends = thread.submit(reap), time.monotonic() + seconds
            try:
                while time.monotonic() < ends and not self._report.violations:
                    if len(flights) < IN_FLIGHT and (not flights or flights[-1].has_begun()):
                        flights.append(self._calls.submit(self._calls.job(self._step, 0), self._present()))
                        self._step += 1
                        if self._step % 100 == 0:
                            progress(f"{self._style}, step {self._step}: {self._report.tally}")
                    while flights and flights[0].is_over():
                        self._calls.collect(flights.popleft())
            finally:
                over.set()
            reaping.result()
        for flight in flights:
            self._calls.collect(flight)

    def _recover(self) -> None:
        """Calls until enough take part that one or two can be lost."""
        ends = time.monotonic() + WHOLE_S
        self._make_step()
        while sum(victim.alive and not victim.ailing for victim in self._victims) < SIZE - 1:
            if time.monotonic() >= ends:
                raise HangError(f"actors do not come back:\n{self.state()}")
            self._make_step()

    def _strike_within(self, kind: str) -> None:
        striking = threading.Thread(target=self._reaper.strike, args=(kind,), name="reaper")
        striking.start()
        if kind == "idle":
            striking.join()
        self._make_step(self._chance.choice((1, 2, 4)))
        while striking.is_alive():
            self._make_step()

    def _strike_between(self) -> None:
        """Values are made, one of their actors dies, and comes back; then they are reduced."""
        job = self._calls.job(self._step, 0, "allreduce")
        self._step += 1
        victims = self._present()
        given = self._calls.make(job, victims)
        made, _ = ray.wait(list(given.values()), num_returns=len(given), timeout=DEADLINE_S)
        if len(made) < len(given):
            raise HangError(f"methods do not return:\n{self.state()}")
        self._reaper.strike("idle")
        self._report.tally.kinds["stale"] += 1
        self._make_step()
        if self._style != "replaced":  # else whoever is new has no value
            self._ready()
        self._calls.collect(self._calls.submit(job, [each for each in self._present() if each.id in given], given))

    def _make_step(self, calls: int = 1) -> None:
        """Calls in flight together, and what becomes of them."""
        self._replace()
        flights = [self._calls.submit(self._calls.job(self._step, i), self._present()) for i in range(calls)]
        self._step += 1
        for flight in flights:
            self._calls.collect(flight)

    def _present(self) -> list[Victim]:
        known = self._past | {victim.id: victim for victim in self._victims}
        return [known[actor._actor_id.hex()] for actor in self._group.actors]

    def _replace(self) -> None:
        """Has newcomers join for actors that Ray does not restart."""
        if self._style != "replaced":
            return
        for victim in [each for each in self._victims if each.harms and not each.alive]:
            if self._chance.random() < 0.3 and victim in self._present():
                self._group.remove([victim.actor])
            newcomer = self._launch(is_new=True)
            self._group.add([newcomer.actor])
            self._past[victim.id] = victim
            self._slots.append(victim.slot)
            self._victims = [*(each for each in self._victims if each is not victim), newcomer]

    # --------------------------------------------------------------------------------------------------- its end

    def finish(self) -> None:
        """The group becomes whole again, all take part in a call, and nothing is kept for refs that are gone."""
        self._replace()
        self._ready()
        job = self._calls.job(self._step, 0, "allreduce")
        outcomes = self._calls.collect(self._calls.submit(job, self._present()))
        whole = {victim.slot for victim in self._victims}
        if any(outcome.failed or set(outcome.record["slots"]) != whole for outcome in outcomes):
            self._report.violations.append(f"not whole again: {'; '.join(map(str, outcomes))}\n{self.state()}")
        outcomes.clear()
        # What ray.get() raises is in a cycle with its frames, and they hold refs: here, and in the actors' own methods.
        gc.collect()
        ray.get([victim.actor.__ray_call__.remote(_collect_garbage) for victim in self._victims], timeout=DEADLINE_S)
        with ThreadPoolExecutor(SIZE) as threads:

            def held() -> list[Any]:
                asked = [threads.submit(ray_pccl.store_stats, victim.actor) for victim in self._victims]
                return [answer.result(DEADLINE_S) for answer in asked]

            eventually(lambda: all(stats.objects == stats.bytes == 0 for stats in held()), FREED_S, lambda: str(held()))
        self._report.epochs += sum(status.epoch for status in describe() if status.group == self._name)
        self._report.rounds.append(self._style)

    def _ready(self) -> None:
        try:
            self._group.wait_ready(WHOLE_S)
        except PCCLError as error:
            raise HangError(f"{error}\n{self.state()}") from None

    def close(self) -> None:
        """Ends it, whatever it has come to."""
        for victim in [*self._victims, *self._past.values()]:
            ray.kill(victim.actor, no_restart=True)
        self._group.destroy()

    def state(self) -> str:
        """Who is what, and where everyone is."""
        roster = {
            actor.id[:8]: f"{actor.state.value}, life {actor.life}" for actor in self._group._roster.actors.values()
        }
        lines = [f"the driver's view: {roster}", f"the master's: {describe()}"]
        for victim in self._victims:
            log = Path(f"{victim.page}.log")
            said = log.read_text().splitlines()[-LOG_LINES:] if log.exists() else []
            lines += [f"--- {victim}, harmed {victim.harms[-3:]}, now {time.monotonic():.1f}", victim.stack(), *said]
        return "\n".join(lines)


def _collect_garbage(_actor: Any) -> None:
    gc.collect()


def run_round(style: str, directory: Path, seed: int, report: Report, course: Callable[[Round], None]) -> None:
    """A round, with what it found in the report."""
    began = time.monotonic()
    course_of = Round(style, directory, seed, report)
    try:
        course(course_of)
        if not report.violations:
            course_of.finish()
    except HangError as error:
        report.violations.append(f"[{style}] {error}")
    finally:
        report.seconds += time.monotonic() - began
        course_of.close()
