"""What must be true of the results of one call of the driver's, whoever of its actors was harmed meanwhile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError

from ray_pccl import PeerLostError
from tests.chaos.driver_faults import Victim
from tests.chaos.driver_worker import Job

ROOTED = ("reduce", "broadcast")
ALIKE = ("allreduce", "allgather", "broadcast")
"""Kinds whose results are the same on all."""


@dataclass
class Outcome:
    """What one actor got."""

    victim: Victim
    result: Any
    """Its ObjectRef."""
    record: dict[str, Any]
    """What the actor read off it; or the error."""
    harmed: bool = False
    """Whether it failed because of what was done to itself."""

    @property
    def failed(self) -> bool:
        """Whether it got an error."""
        return "error" in self.record

    def __str__(self) -> str:
        what = "{error}: {text}" if self.failed else "{slots}"
        return f"{self.victim}: {what.format(**self.record)}"


def check(
    job: Job,
    submitted: float,
    outcomes: Sequence[Outcome],
    asked: Sequence[Victim],
    root: Victim | None,
    deadline_s: float,
) -> list[str]:
    """What can't be; empty if all is well. Takes note of who ails, so calls are to be checked in their order."""
    found: list[str] = []
    failed = [outcome for outcome in outcomes if outcome.failed]
    returned = [outcome for outcome in outcomes if not outcome.failed]
    for outcome in failed:
        outcome.harmed = outcome.victim.ailing or outcome.victim.was_harmed()
        found += _check_error(job, outcome, deadline_s)
    excused = _is_excused(job, asked, root)
    for outcome in failed:
        if outcome.harmed:
            outcome.victim.ailing = True
        elif not excused:
            found.append(
                f"{outcome.victim} was not harmed, and got {outcome.record['error']}: {outcome.record['text']}"
            )
        elif returned:
            found.append(f"{outcome.victim} got {outcome.record['error']}, others returned")
    for outcome in returned:
        outcome.victim.ailing, outcome.victim.sound_since = False, submitted
        found += _check_result(job, outcome, {victim.slot for victim in asked}, root)
    found += _check_agreement(job, returned)
    if found:
        found.append("all of its outcomes: " + "; ".join(map(str, outcomes)))
    return [f"{job}: {finding}" for finding in found]


def _is_excused(job: Job, asked: Sequence[Victim], root: Victim | None) -> bool:
    """Whether those who were not harmed may fail, too."""
    needed = asked if job.on_loss == "raise" else [root] if job.call.kind in ROOTED and root is not None else []
    return any(victim.ailing or victim.was_harmed() for victim in needed)


def _check_error(job: Job, outcome: Outcome, deadline_s: float) -> Iterable[str]:
    """What the driver sees of a failed result: an error that is ours, and Ray's."""
    try:
        value = ray.get(outcome.result, timeout=deadline_s)
    except Exception as error:
        if not isinstance(error, PeerLostError) or not isinstance(error, ActorDiedError):
            yield f"{outcome.victim} raises {type(error).__mro__[:3]} in the driver: {error!s:.300}"
        return
    if job.call.kind != "barrier":
        yield f"{outcome.victim} got {outcome.record}, but the driver has a value: {value!r:.200}"


def _check_result(job: Job, outcome: Outcome, slots: set[int], root: Victim | None) -> Iterable[str]:
    record, victim = outcome.record, outcome.victim
    held = record["slots"]
    if record["garbled"]:
        yield f"{victim}: the result makes no sense: {record['garbled']}, decoded {held}"
        return
    if not record["intact"]:
        yield f"{victim}: its contribution was changed"
    if job.call.kind == "barrier":
        return
    if job.call.kind == "broadcast":
        if root is None or held != (root.slot,):
            yield f"{victim}: a broadcast of {root} brought {held}"
        return
    if len(set(held)) != len(held):
        yield f"{victim}: something was counted twice: {held}"
    if not set(held) <= slots:
        yield f"{victim}: {held} holds strangers, where {sorted(slots)} were asked"
    if victim.slot not in held:
        yield f"{victim}: its own contribution is not in {held}"
    if job.on_loss == "raise" and set(held) != slots:
        yield f"{victim}: with on_loss='raise' it got the result of {held} alone, where {sorted(slots)} were asked"


def _check_agreement(job: Job, returned: Sequence[Outcome]) -> Iterable[str]:
    for what in ("slots", "digest") if job.call.kind in ALIKE else ("slots",):
        answers: dict[Any, list[str]] = defaultdict(list)
        for outcome in returned:
            answers[outcome.record[what]].append(str(outcome.victim))
        if len(answers) > 1:
            yield f"they do not agree on the {what}: {dict(answers)}"
    if job.call.kind in ("barrier", "broadcast"):
        return
    for outcome in returned:
        for other in returned:
            if other.victim.slot not in outcome.record["slots"]:
                yield f"{other.victim} returned, but {outcome.victim} does not count it"
