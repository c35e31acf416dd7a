"""What came of the contests: ratios, targets, a table, a file, a picture."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from peers import Row, print_table, shown
from rivals import environment
from teams import TeamFailed
from work import KIB, MIB, Training, Work

PLOT = Path(__file__).with_name("plot.py")
MPI = ("openmpi", "mpich")
FOOTNOTES = """\
Milliseconds: medians over all iterations of all rounds; an iteration's time is that of its slowest rank.
A ratio is our median divided by theirs, and below 1 where ours is faster. MPI: the faster of the two in that line.
The others sum out of place; gloo's call works in place only, and is timed without the copy it would take. Our time
includes the commit. 16x4MiB: 16 calls in flight. By type: 64 MiB of each; 8-bit is float32 that travels in 8 bits.
Every result was checked once, element by element, before the first round."""


@dataclass
class Turn:
    """One contestant in one contest: the seconds of each iteration."""

    key: str
    name: str
    work: Work | Training
    seconds: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    others_cpu_s: dict[str, float] = field(default_factory=dict)
    """Processor time that each who was not on turn has used meanwhile: next to nothing, or the contest is unfair."""
    version: str = ""

    @property
    def median_s(self) -> float:
        """The middle one."""
        return statistics.median(self.seconds)

    def as_dict(self) -> dict[str, Any]:
        """For a file."""
        low, middle, high = statistics.quantiles(self.seconds, n=4)
        figures = {"median_s": middle, "q1_s": low, "q3_s": high, "iterations": len(self.seconds)}
        return {"key": self.key, "name": self.name, **figures, "wall_s": self.wall_s, "others_cpu_s": self.others_cpu_s}


@dataclass(frozen=True)
class Ratio:
    """Our time divided by another one's."""

    ours: str
    rival: str
    value: float
    target: float

    @property
    def met(self) -> bool:
        """Whether the target is."""
        return self.value <= self.target


@dataclass
class Contest:
    """The same work for all, except where ours competes with itself."""

    peers: int
    title: str
    turns: list[Turn]

    @property
    def timed(self) -> list[Turn]:
        """Those that have taken part."""
        return [turn for turn in self.turns if turn.seconds]

    @property
    def met(self) -> bool:
        """Whether ours took part, in all its forms, and met every target."""
        took_part = all(turn.seconds for turn in self.turns if turn.key.startswith("ours"))
        return took_part and all(ratio.met for ratio in self.ratios())

    def ratios(self) -> list[Ratio]:
        """All that have a target."""
        by_key = {turn.key: turn for turn in self.timed}
        if len(by_key) < len(self.timed):
            return self._ratios_by_type()
        found = []
        for ours in (turn for turn in self.timed if turn.key.startswith("ours")):
            against_gloo, against_mpi = targets(ours.key, ours.work)
            gloo = [by_key["gloo"].median_s] if "gloo" in by_key else []
            mpi = [by_key[key].median_s for key in MPI if key in by_key]
            for rival, medians, target in (("gloo", gloo, against_gloo), ("MPI", mpi, against_mpi)):
                if medians and target is not None:
                    found.append(Ratio(ours.name, rival, ours.median_s / min(medians), target))
        return found

    def _ratios_by_type(self) -> list[Ratio]:
        plain, *others = self.timed
        limits = {"bfloat16": 1.3, "8-bit": 1.8}
        return [Ratio(turn.name, plain.name, turn.median_s / plain.median_s, limits[turn.name]) for turn in others]


def targets(key: str, work: Work) -> tuple[float | None, float | None]:
    """The largest ratio to gloo, and to the faster MPI; None where there is no target."""
    if work.count > 1:
        return (0.4, None) if key == "ours-auto" else (None, None)
    if key == "ours-tcp":
        return (0.5 if work.nbytes <= 256 * KIB else 1.0), None
    if work.nbytes <= 4 * KIB:
        return 0.05, 1.0
    return (0.4, 1.0) if work.nbytes <= 4 * MIB else (0.35, 0.5)


def print_contests(contests: Sequence[Contest], footnotes: str = FOOTNOTES, what: str = "size") -> None:
    """A table of times, a line per contest, and one of the ratios that have a target."""
    names = list(dict.fromkeys(turn.name for contest in contests for turn in contest.timed))
    lines = []
    for contest in contests:
        medians = {turn.name: shown_ms(turn.median_s) for turn in contest.timed}
        lines.append([contest.title, str(contest.peers), *(medians.get(name, "-") for name in names)])
    print_table([what, "peers", *names], lines)
    ratios = [(contest, ratio) for contest in contests for ratio in contest.ratios()]
    if ratios:
        print()
        print_table(
            [what, "peers", "ours", "to", "ratio", "target", "met"],
            [
                [
                    contest.title,
                    str(contest.peers),
                    ratio.ours,
                    ratio.rival,
                    f"{ratio.value:.3f}",
                    f"<= {ratio.target:g}",
                    "yes" if ratio.met else "NO",
                ]
                for contest, ratio in ratios
            ],
        )
    print(f"\n{footnotes}")
    for contest in contests:
        for turn in contest.timed:
            for other, used_s in turn.others_cpu_s.items():
                if used_s > 0.05 * turn.wall_s + 0.02:  # the kernel counts in hundredths
                    where = f"{contest.title}, {contest.peers} peers, {turn.wall_s:.2f} s"
                    print(f"UNFAIR to {turn.name} ({where}): {other} used {used_s:.2f} s of processor meanwhile")


def shown_ms(seconds: float) -> str:
    """Milliseconds, in more digits where they are few."""
    return f"{1000 * seconds:.4f}" if seconds < 0.001 else shown(1000 * seconds)


def machine(turns: Sequence[Turn]) -> dict[str, Any]:
    """What the figures depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    commit = subprocess.run(
        ["git", "-C", str(PLOT.parent), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return {
        "cores": os.cpu_count(),
        "processor": model,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": commit.stdout.strip() or "unknown",
        "versions": {turn.key: turn.version for turn in turns},
    }


def to_json(
    path: str,
    facts: dict[str, Any],
    *,
    contests: Sequence[Contest] = (),
    memory: Sequence[Any] = (),
    recovery: Sequence[Row] = (),
) -> None:
    """Writes everything to a file."""
    results = [
        {
            "peers": contest.peers,
            "title": contest.title,
            "nbytes": contest.turns[0].work.nbytes,
            "count": contest.turns[0].work.count,
            "times": [turn.as_dict() for turn in contest.timed],
            "ratios": [{**vars(ratio), "met": ratio.met} for ratio in contest.ratios()],
        }
        for contest in contests
    ]
    growths = [{**vars(growth), "met": growth.met} for growth in memory]
    rows = [{**asdict(row), "median": row.median, "met": row.met} for row in recovery]
    content = {
        "machine": facts,
        **({"results": results} if results else {}),
        **({"memory": growths} if growths else {}),
        **({"recovery": rows} if rows else {}),
    }
    Path(path).write_text(json.dumps(content, indent=2) + "\n")


def _is_plain(work: Work | Training) -> bool:
    return isinstance(work, Work) and work == Work(work.nbytes, in_place=work.in_place, in_torch=work.in_torch)


def draw(path: str, contests: Sequence[Contest]) -> None:
    """Draws the contests of one size each; says why if matplotlib can't be had."""
    try:
        python = environment("plot") / "bin" / "python"
    except TeamFailed as failure:
        print(f"nothing is drawn: {failure}", file=sys.stderr)
        return
    plain = [contest for contest in contests if all(_is_plain(turn.work) for turn in contest.turns)]
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "results.json")
        to_json(file, {}, contests=plain)
        subprocess.run([str(python), str(PLOT), file, path], check=True)
