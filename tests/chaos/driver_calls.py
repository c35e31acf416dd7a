"""What a driver asks a group for, and how the results are collected: each within a deadline, and each checked."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from ray_pccl import Group, ReduceOp
from ray_pccl.driver.groups import owners
from tests.chaos.driver_checker import Outcome, check
from tests.chaos.driver_faults import Tally, Victim
from tests.chaos.driver_worker import Job
from tests.chaos.workload import KIB, MIB, SLOTS, Call

DEADLINE_S = 40.0
"""No result may take this long."""
LOOK_S = 0.02
_KINDS = {"allreduce": 60, "allgather": 8, "reducescatter": 8, "broadcast": 8, "reduce": 8, "barrier": 8}
_BYTES = {4 * KIB: 4, 200 * KIB: 3, 1 * MIB: 2, 4 * MIB: 1}


class HangError(AssertionError):
    """Something did not happen in time."""


@dataclass
class Report:
    """What was done and found."""

    tally: Tally = field(default_factory=Tally)
    calls: Counter[str] = field(default_factory=Counter)
    results: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    epochs: int = 0
    rounds: list[str] = field(default_factory=list)
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.seconds:.0f} s: rounds {self.rounds}: {self.tally}; {self.calls.total()} calls {dict(self.calls)}, "
            f"{self.results} results, {dict(self.errors)}, {self.epochs} epochs, {len(self.violations)} violations"
        )


@dataclass
class Flight:
    """A call whose results are awaited."""

    job: Job
    submitted: float
    asked: Sequence[Victim]
    root: Victim | None
    results: list[tuple[Victim, Any, Any]]
    """Who, the ref of its result, and the ref of what it reads off it."""

    def has_begun(self) -> bool:
        """Whether someone has its result. Waits for that for a moment."""
        return bool(self._looked(1, LOOK_S))

    def is_over(self) -> bool:
        """Whether all have, or should."""
        return len(self._looked(len(self.results), 0)) == len(self.results) or self.patience() <= 0

    def patience(self) -> float:
        """For how many seconds it may go on."""
        return self.submitted + DEADLINE_S - time.monotonic()

    def _looked(self, count: int, timeout: float) -> list[Any]:
        looks = [look for _, _, look in self.results]
        return ray.wait(looks, num_returns=count, timeout=timeout, fetch_local=False)[0]


class Calls:
    """The calls to one group."""

    def __init__(self, group: Group, chance: random.Random, report: Report, state: Callable[[], str]) -> None:
        self._group = group
        self._chance = chance
        self._report = report
        self._state = state

    def job(self, step: int, index: int, kind: str = "") -> Job:
        """Any call, or any of a kind."""
        chance = self._chance
        kind = kind or chance.choices(list(_KINDS), list(_KINDS.values()))[0]
        average = kind == "allreduce" and chance.random() < 0.3
        nbytes = chance.choices(list(_BYTES), list(_BYTES.values()))[0]
        call = Call(step, index, kind, nbytes, "float64" if average else "int64")
        on_loss = "raise" if chance.random() < 0.15 and kind != "broadcast" else "continue"
        slow = chance.random() < 0.5
        delays = {slot: chance.random() * 0.06 for slot in range(SLOTS)} if slow else {}
        return Job(call, ReduceOp.AVG if average else ReduceOp.SUM, chance.random() < 0.4, on_loss, delays)

    def make(self, job: Job, victims: Sequence[Victim]) -> dict[str, Any]:
        """The refs of what they contribute, by actor."""
        return {victim.id: victim.actor.make.remote(job) for victim in victims}

    def submit(self, job: Job, victims: Sequence[Victim], given: Mapping[str, Any] | None = None) -> Flight:
        """Makes the call, on values that were made before if they are given. The actors are in any order."""
        victims = self._chance.sample(victims, len(victims))
        group, kind, root = self._group, job.call.kind, None
        submitted = time.monotonic()
        results: list[Any]
        if kind == "barrier":
            results = group.barrier(on_loss=job.on_loss)
        elif kind == "broadcast":
            root = victims[0]
            given = self.make(job, [root])
            results = group.broadcast_ref(given[root.id])
        else:
            job = job.for_parts(len(victims)) if kind == "reducescatter" else job
            given = given or self.make(job, victims)
            refs = [given[victim.id] for victim in victims]
            if kind == "reduce":
                root = self._chance.choice(victims)
                results = [group.reduce_refs(refs, root.actor, job.op, on_loss=job.on_loss)]
            elif kind == "allgather":
                results = group.allgather_refs(refs, on_loss=job.on_loss)
            else:
                results = getattr(group, f"{kind}_refs")(refs, job.op, on_loss=job.on_loss)
        self._report.calls[kind] += 1
        return Flight(job, submitted, victims, root, self._looks(job, victims, results, given or {}))

    def _looks(
        self, job: Job, victims: Sequence[Victim], results: Sequence[Any], given: Mapping[str, Any]
    ) -> list[tuple[Victim, Any, Any]]:
        """Has every actor read its own result, so that no tensor comes to the driver."""
        known = {victim.id: (place, victim) for place, victim in enumerate(victims)}
        looks = []
        for actor_id, result in zip(owners(results), results, strict=True):
            place, victim = known[actor_id]
            refs = [result, given[actor_id]] if actor_id in given else [result]
            looks.append((victim, result, victim.actor.look.remote(job, place, len(victims), refs)))
        return looks

    def collect(self, flight: Flight) -> list[Outcome]:
        """Awaits the results of a call, and checks them."""
        outcomes = []
        for victim, result, look in flight.results:
            try:
                record = ray.get(look, timeout=max(1.0, flight.patience()))
            except GetTimeoutError:
                pending = [str(each) for each, _, look in flight.results if not ray.wait([look], timeout=0)[0]]
                raise HangError(f"{flight.job}: not within {DEADLINE_S:g} s: {pending}\n{self._state()}") from None
            except RayError as error:
                record = {"error": type(error).__name__, "text": " ".join(str(error).split())[:300]}
            outcomes.append(Outcome(victim, result, record))
        self._report.errors += Counter(outcome.record["error"] for outcome in outcomes if outcome.failed)
        self._report.results += sum(not outcome.failed for outcome in outcomes)
        found = check(flight.job, flight.submitted, outcomes, flight.asked, flight.root, DEADLINE_S)
        self._report.violations += found
        return outcomes
