"""How fast torch is on our backend: steps of DDP beside Gloo, all-reduce beside our own, recovery beside torchft.

    python benchmarks/torch_step.py                        all of it, less than eight minutes
    python benchmarks/torch_step.py --only ddp,allreduce   or recovery
    python benchmarks/torch_step.py --quick --against none few rounds, nothing installed: figures that are no figures

Whoever is compared takes turns in one run. Worker processes stay for a whole contest, and are blocked on a pipe while
another's turn is timed. torchft is installed on first use into `build/rivals`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allreduce import comma_separated, hold_contest, left_out, started
from peers import MasterProcess, Row, print_table, progress, shown
from report import Contest, Ratio, Turn, draw, machine, print_contests, to_json
from rivals import LOOPBACK, Contestant, environment, in_torch, ours
from teams import Team, TeamFailed
from work import Training, Work, parse_size

WORKER = Path(__file__).with_name("torch_worker.py")
TRAINEES = Path(__file__).with_name("torch_trainees.py")
MODEL = {"width": 2040, "layers": 6, "batch": 8}
SMALL_MODEL = {"width": 256, "layers": 2, "batch": 8}
ROUNDS, QUICK_ROUNDS = 7, 2
DDP_TARGET, ALL_REDUCE_TARGET, RECOVERY_TARGET_MS = 0.8, 1.2, 100.0
TRIALS, DEFAULT_TRIALS, QUICK_TRIALS = 12, 5, 2
PATIENCE_S = 15.0
"""A trial of recovery that takes longer counts as so long: it changes no median of ours, and theirs by little."""
TUNED: dict[str, Any] = {
    "lighthouse": ["--heartbeat_timeout_ms", "100", "--quorum_tick_ms", "10", "--join_timeout_ms", "1000"],
    "heartbeat_interval": 0.01,
    "timeout": 1.0,
}
"""One choice among others: lower timeouts recover sooner, and may take a busy replica for dead."""
PARTS = ("ddp", "allreduce", "recovery")
FOOTNOTES = """\
Milliseconds: medians over all iterations of all rounds; an iteration's time is that of its slowest rank.
A ratio is our median divided by the other, and below 1 where ours is faster.
DDP step: forward, backward and SGD step of a perceptron with {parameters:.1f} million parameters in float32, a batch
of {batch} and one thread a rank; against Gloo with the same settings. Views: gradient_as_bucket_view=True. Hook: ours
with ray_pccl.torch.average_hook, Gloo without.
Sizes: dist.all_reduce on the backend "pccl" against Communicator.all_reduce, both in place, on the same kind of tensor.
Gradients and sums were checked once, element by element, before the first round."""
RECOVERY_FOOTNOTES = """\
Milliseconds from the SIGKILL of one of three replicas that train (4.7 MB of gradients) to the first step that the later
of the two others has committed without it. A trial is given up after {patience:g} s, and counts as that."""
TORCHFT_FOOTNOTES = """\
torchft: its Manager with Gloo. Tuned: torchft_lighthouse {lighthouse},
Manager(heartbeat_interval={heartbeat_interval:g} s, timeout={timeout:g} s), ProcessGroupGloo(timeout={timeout:g} s).
Of one trial that was given up the stacks were looked at: one survivor waited in Gloo, the other in a quorum for it."""


# ----------------------------------------------------------------------------------------- steps, and sums of tensors


@dataclass
class Duel(Contest):
    """The first turn against the second, with a target."""

    target: float = math.inf

    def ratios(self) -> list[Ratio]:
        """The one, if both took part."""
        if len(self.timed) < 2:
            return []
        first, second = self.timed
        return [Ratio(first.name, second.name, first.median_s / second.median_s, self.target)]

    @property
    def met(self) -> bool:
        """Whether ours took part, and met the target."""
        return bool(self.turns[0].seconds) and all(ratio.met for ratio in self.ratios())


def planned(peers: int, contestants: list[Contestant], arguments: argparse.Namespace) -> list[Contest]:
    """All duels for one number of peers."""
    names = {contestant.key: contestant.name for contestant in contestants}

    def duel(title: str, work: Work | Training, rivals: str, target: float) -> Contest:
        keys = [key for key in ("pccl", rivals) if key in names]
        return Duel(peers, title, [Turn(key, names[key], work) for key in keys], target)

    contests = []
    if "ddp" in arguments.only:
        model = SMALL_MODEL if arguments.quick else MODEL
        contests.append(duel("DDP step", Training(**model), "gloo", DDP_TARGET))
        contests.append(duel("DDP step, views", Training(**model, bucket_view=True), "gloo", DDP_TARGET))
        contests.append(duel("DDP step, hook", Training(**model, averaging=True), "gloo", DDP_TARGET))
    if "allreduce" in arguments.only:
        for nbytes in arguments.sizes:
            work = Work(nbytes, in_place=True, in_torch=True)
            contests.append(duel(work.size_text, work, "ours-auto", ALL_REDUCE_TARGET))
    return contests


def run_contests(arguments: argparse.Namespace, endpoint: str) -> list[Contest]:
    """All duels, one number of peers after another."""
    contestants = [in_torch("pccl", "ours in torch", {"RAY_PCCL_MASTER": endpoint}, WORKER)]
    if "ddp" in arguments.only and arguments.against:
        contestants.append(in_torch("gloo", "gloo", LOOPBACK, WORKER))
    if "allreduce" in arguments.only:
        contestants.append(ours("auto", endpoint))
    done: list[Contest] = []
    for peers in arguments.peers:
        with started(contestants, peers) as teams:
            for contest in planned(peers, contestants, arguments):
                hold_contest(contest, teams, QUICK_ROUNDS if arguments.quick else ROUNDS, arguments.quick)
                done.append(contest)
    progress("")
    return done


# -------------------------------------------------------------------------------------------------------- recovery


def trainees(name: str, python: str | Path, kind: str, argument: str) -> Team:
    """The process that forks the replicas of one contestant."""
    return Team(name, 1, [[str(python), str(TRAINEES), kind, "SOCKET", argument]], {"OMP_NUM_THREADS": "1"})


def run_recovery(arguments: argparse.Namespace, endpoint: str) -> tuple[list[Row], dict[str, str]]:
    """Trials of all contestants, turn by turn; and what each of them is."""
    trials = QUICK_TRIALS if arguments.quick else arguments.trials
    rows = [Row("ours", "ms", [], RECOVERY_TARGET_MS, f"< {RECOVERY_TARGET_MS:g}")]
    wanted = [trials]
    with contextlib.ExitStack() as ends:
        progress("recovery: starting")
        teams = [trainees("ours", sys.executable, "ours", endpoint)]
        ends.callback(teams[0].end)
        if arguments.against:
            try:
                python = environment("torchft") / "bin" / "python"
                for name, knobs, count in (("torchft", {}, DEFAULT_TRIALS), ("torchft, tuned", TUNED, trials)):
                    teams.append(trainees(name, python, "torchft", json.dumps(knobs)))
                    ends.callback(teams[-1].end)
                    rows.append(Row(name, "ms", [], math.inf, "-"))
                    wanted.append(min(count, trials))
            except TeamFailed as failure:
                left_out("torchft", 3, failure)
        for trial in range(trials):
            for row, team, count in zip(rows, teams, wanted, strict=False):
                if trial < count:
                    progress(f"recovery: trial {trial + 1} of {count}, {row.name}")
                    _strike(row, team)
    progress("")
    return [row for row in rows if row.samples], {team.name: team.version for team in teams}


def _strike(row: Row, team: Team) -> None:
    try:
        (seconds,) = team.call("strike", PATIENCE_S)
    except TeamFailed as failure:
        left_out(f"a trial of {row.name}", 3, failure)
        return
    row.samples.append(1000 * (PATIENCE_S if seconds is None else seconds))


def print_recovery(rows: list[Row]) -> None:
    """A line for each contestant."""
    lines = []
    for row in rows:
        given_up = sum(sample >= 1000 * PATIENCE_S for sample in row.samples)
        met = "-" if math.isinf(row.target) else "yes" if row.met else "NO"
        fewest, most = min(row.samples), max(row.samples)
        figures = [shown(row.median), shown(fewest), shown(most), str(given_up)]
        lines.append([row.name, str(len(row.samples)), *figures, row.target_text, met])
    print_table(["recovery", "trials", "median", "fastest", "slowest", "given up", "target", "met"], lines)
    print(f"\n{RECOVERY_FOOTNOTES.format(patience=PATIENCE_S)}")
    if len(rows) > 1:
        print(TORCHFT_FOOTNOTES.format(**{**TUNED, "lighthouse": " ".join(TUNED["lighthouse"])}))


# ------------------------------------------------------------------------------------------------------- the whole


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="How fast torch is on our backend, and how soon it recovers.")
    names = comma_separated
    parser.add_argument("--only", type=names, default=",".join(PARTS), help="parts of it (default: %(default)s)")
    parser.add_argument("--peers", type=names, default="2,4", help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--sizes", type=names, default="256KiB,1MiB,4MiB,16MiB,64MiB", help="(default: %(default)s)")
    parser.add_argument("--trials", type=int, default=TRIALS, help="of recovery, each (default: %(default)s)")
    parser.add_argument("--against", choices=["all", "none"], default="all", help="gloo and torchft, or nobody")
    parser.add_argument("--quick", action="store_true", help="a small model, few rounds: figures that are no figures")
    parser.add_argument("--json", metavar="FILE", help="also write the results to a file")
    parser.add_argument("--plot", metavar="FILE", help="also draw the times of all-reduce into a PNG file")
    arguments = parser.parse_args()
    arguments.against = arguments.against == "all"
    try:
        arguments.peers = [int(text) for text in arguments.peers]
        arguments.sizes = [parse_size(text) for text in arguments.sizes]
    except ValueError as error:
        parser.error(str(error))
    if unknown := set(arguments.only) - set(PARTS):
        parser.error(f"--only takes {', '.join(PARTS)}, not {', '.join(sorted(unknown))}")
    return arguments


def main() -> int:
    """Returns 0 if every target was met, else 1."""
    arguments = parsed()
    contests: list[Contest] = []
    rows: list[Row] = []
    versions: dict[str, str] = {}
    with MasterProcess() as master:
        if {"ddp", "allreduce"} & set(arguments.only):
            contests = run_contests(arguments, master.endpoint)
            model = Training(**(SMALL_MODEL if arguments.quick else MODEL))
            print_contests(contests, FOOTNOTES.format(parameters=model.parameters / 1e6, batch=model.batch), "what")
        if "recovery" in arguments.only:
            rows, versions = run_recovery(arguments, master.endpoint)
            print()
            print_recovery(rows)
    facts = machine([turn for contest in contests for turn in contest.timed])
    facts["versions"] |= versions
    if arguments.json:
        to_json(arguments.json, facts, contests=contests, recovery=rows)
    if arguments.plot:
        draw(arguments.plot, contests)
    return 0 if all(contest.met for contest in contests) and all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
