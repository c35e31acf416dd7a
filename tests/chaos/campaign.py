"""Runs of many faults, group after group, and what came of them."""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos import checker
from tests.chaos.arena import Arena, HangError, Nursery
from tests.chaos.board import Word
from tests.chaos.faults import Reaper, Tally

TRANSPORTS = ("auto", "tcp")
GLOO = "gloo"
"""No transport, but a backend that has Gloo move the data; the rest goes over links, as with "tcp"."""
FAULTS_A_GROUP = 25


@dataclass
class Report:
    """What a campaign did and found."""

    tally: Tally = field(default_factory=Tally)
    operations: int = 0
    """Outcomes that peers wrote down."""
    outcomes: Counter[str] = field(default_factory=Counter)
    epochs: int = 0
    groups: int = 0
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.seconds:.0f} s: {self.groups} groups, {self.tally}; {self.operations} operations "
            f"{dict(self.outcomes)}, {self.epochs} epochs, {len(self.violations)} violations"
        )


class Campaign:
    """One group after the other, each with its own master, of alternating transports."""

    def __init__(
        self,
        directory: Path,
        seed: int,
        *,
        transports: Iterable[str] = TRANSPORTS,
        bug: str = "",
        faults_a_group: int = FAULTS_A_GROUP,
    ) -> None:
        self._directory = directory
        self._seed = seed
        self._transports = tuple(transports)
        self._bug = bug
        self._faults = faults_a_group
        self.report = Report()

    def run(
        self, enough: Callable[[Report], bool], progress: Callable[[Report], None] = lambda _report: None
    ) -> Report:
        """Goes on until it is enough, or something was found."""
        started = time.monotonic()
        nursery = Nursery()
        try:
            while not enough(self.report) and not self.report.violations:
                self._group(nursery)
                self.report.seconds = time.monotonic() - started
                progress(self.report)
        finally:
            nursery.close()
        return self.report

    def _group(self, nursery: Nursery) -> None:
        number = self.report.groups
        transport = self._transports[number % len(self._transports)]
        seed = self._seed * 10_000 + number
        directory = self._directory / f"{number:04d}-{transport}"
        directory.mkdir(parents=True)
        tally, hang = Tally(), ""
        evictable: list[str] = []
        with Arena(nursery, directory, transport, seed, self._bug) as arena:
            reaper = Reaper(arena, transport, random.Random(seed), tally, self.report.tally.at)
            try:
                for _ in range(self._faults):
                    reaper.strike()
                arena.wait_progress(10)
            except HangError as error:
                hang = str(error)
            self.report.epochs += max((victim.board[Word.EPOCH] for victim in arena.victims), default=0)
            evictable = [victim.name for victim in arena.victims if victim.harmed]
        self.report.tally += tally
        self.report.groups += 1
        self._check(directory, transport, seed, evictable, hang)

    def _check(self, directory: Path, transport: str, seed: int, evictable: list[str], hang: str) -> None:
        histories = checker.read(directory)
        records = [record for history in histories for record in history.records]
        self.report.operations += len(records)
        self.report.outcomes += Counter(record.get("error", "returned") for record in records)
        found = checker.check(histories, evictable) + ([hang] if hang else [])
        self.report.violations += [f"[{transport}, group seed {seed}, {directory}] {finding}" for finding in found]
        if found:
            (directory / "violations.txt").write_text("\n".join(found))
        else:
            shutil.rmtree(directory)  # the boards and logs of the dead are many
