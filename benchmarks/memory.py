"""How much memory an all-reduce of ours takes beyond the user's tensors, as the kernel counts it."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peers import print_table, progress, shown
from rivals import Contestant
from teams import Team, TeamFailed
from work import MIB, Work

BOUND_MIB = 64.0
CALLS = 6
SCENARIOS = {
    "out of place, 64 MiB": Work(64 * MIB),
    "out of place, 256 MiB": Work(256 * MIB),
    "64 x 4 MiB in flight": Work(4 * MIB, count=64),
    "in place, 64 MiB": Work(64 * MIB, in_place=True),
    "in place, 256 MiB": Work(256 * MIB, in_place=True),
}
FOOTNOTES = f"""\
MiB of PSS (memory shared by several processes is divided among them) at the peak of {CALLS} calls, above what the
process had just before the first one, with its tensors in place: the larger of all peers. PSS is read again and again
meanwhile, so a peak shorter than one reading is missed. In place: the bound is one tensor more."""


@dataclass(frozen=True)
class Growth:
    """The largest growth of a peer, in one scenario."""

    scenario: str
    transport: str
    peers: int
    grown_mib: float
    bound_mib: float
    readings: int

    @property
    def met(self) -> bool:
        """Whether it is within the bound."""
        return self.grown_mib <= self.bound_mib


class PeakReader:
    """Reads the PSS of some processes over and over, as a context; `peaks_mib` are the largest values."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self.peaks_mib = [0.0] * len(pids)
        self.readings = 0

    def __enter__(self) -> PeakReader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _read(self) -> None:
        while not self._over.wait(0.001):
            with contextlib.suppress(OSError):  # a process that has ended: its team will say so
                self.peaks_mib = [max(peak, pss_mib(pid)) for peak, pid in zip(self.peaks_mib, self._pids, strict=True)]
                self.readings += 1


def pss_mib(pid: int) -> float:
    """The process's proportional share of the memory it has."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) / 1024


def measure_memory(numbers: Sequence[int], contestants: Sequence[Contestant]) -> list[Growth]:
    """All scenarios, each with fresh processes."""
    growths = []
    for peers in numbers:
        for contestant in contestants:
            for scenario, work in SCENARIOS.items():
                progress(f"{peers} peers, {contestant.name}: {scenario}")
                try:
                    team = contestant.start(peers)
                except TeamFailed as failure:
                    print(f"{contestant.name} is left out: {failure}", file=sys.stderr)
                    break
                try:
                    growths.append(_measure(team, scenario, work, peers))
                except TeamFailed as failure:
                    print(f"{contestant.name}, {scenario}: {failure}", file=sys.stderr)
                finally:
                    team.end()
    progress("")
    return growths


def _measure(team: Team, scenario: str, work: Work, peers: int) -> Growth:
    team.call("hold", work)
    before = [pss_mib(pid) for pid in team.pids]
    with PeakReader(team.pids) as reader:
        team.call("time", work, 0, CALLS)
    grown = max(peak - had for peak, had in zip(reader.peaks_mib, before, strict=True))
    bound = BOUND_MIB + (work.nbytes / MIB if work.in_place else 0)
    return Growth(scenario, team.name, peers, grown, bound, reader.readings)


def print_memory(growths: Sequence[Growth]) -> None:
    """The table."""
    lines = [
        [
            growth.scenario,
            growth.transport,
            str(growth.peers),
            shown(max(0.0, growth.grown_mib)),
            f"<= {shown(growth.bound_mib)}",
            "yes" if growth.met else "NO",
        ]
        for growth in growths
    ]
    print_table(["scenario", "transport", "peers", "grown by", "bound", "met"], lines)
    print(f"\n{FOOTNOTES}")
