"""How fast all-reduce is, beside gloo, Open MPI and MPICH, in one run and turn by turn.

    python benchmarks/allreduce.py                                  everything
    python benchmarks/allreduce.py --quick --against gloo           a first look
    python benchmarks/allreduce.py --memory                         what ours takes beyond the user's tensors

Each library has worker processes of its own that stay for a whole contest: a number of peers and a size. They take
turns, ours, gloo, Open MPI, MPICH, and ours again; who is not on turn is blocked on a pipe. A turn is a loop of calls
without barriers, timed one by one after some to warm up. On first use, what others need is installed: `build/rivals`.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from memory import measure_memory, print_memory
from peers import MasterProcess, progress
from report import Contest, Turn, draw, machine, print_contests, to_json
from rivals import Contestant, ours, rivals
from teams import Team, TeamFailed
from work import IN_FLIGHT, MIB, Work, parse_size

ROUNDS, QUICK_ROUNDS = 7, 2
TYPES = [Work(64 * MIB), Work(64 * MIB, bfloat16=True), Work(64 * MIB, quantized=True)]
"""What is compared with itself: float32, bfloat16, and float32 that travels in 8 bits."""


@contextlib.contextmanager
def started(contestants: list[Contestant], peers: int) -> Iterator[dict[str, Team]]:
    """The teams of those that start, by key; of the others the reason is printed."""
    teams: dict[str, Team] = {}
    with contextlib.ExitStack() as ends:
        for contestant in contestants:
            progress(f"{peers} peers: starting {contestant.name}")
            try:
                teams[contestant.key] = contestant.start(peers)
            except TeamFailed as failure:
                left_out(contestant.name, peers, failure)
            else:
                ends.callback(teams[contestant.key].end)
        yield teams


def left_out(name: str, peers: int, reason: object) -> None:
    """Says who does not take part, and why."""
    progress("")
    print(f"{name} with {peers} peers is left out: {reason}", file=sys.stderr)


def hold_contest(contest: Contest, teams: dict[str, Team], rounds: int, quick: bool) -> None:
    """Fills the contest with times. A team that fails is ended and struck from `teams`."""
    turns = [turn for turn in contest.turns if turn.key in teams]
    needed = sum(turn.work.held_bytes * contest.peers * 2 for turn in turns)  # libraries make copies
    if needed > available_bytes():
        left_out(contest.title, contest.peers, f"it needs {needed >> 20} MiB of memory, more than there is")
        return
    for number in range(-1, rounds):
        for turn in (turn for turn in turns if turn.key in teams):
            progress(f"{contest.peers} peers, {contest.title}: round {number + 1} of {rounds}, {turn.name}")
            team = teams[turn.key]
            used_before = {other: other.cpu_seconds() for other in teams.values() if other is not team}
            began = time.monotonic()
            try:
                if number < 0:
                    team.call("hold", turn.work)
                    team.call("check", turn.work)
                    continue
                by_rank = team.call("time", turn.work, *turn.work.iterations(quick))
            except TeamFailed as failure:
                left_out(f"{turn.name}, {contest.title},", contest.peers, failure)
                teams.pop(turn.key).end()
                continue
            turn.seconds += [max(times) for times in zip(*by_rank, strict=True)]
            turn.wall_s += time.monotonic() - began
            for other, before in used_before.items():
                used = turn.others_cpu_s.get(other.name, 0.0) + other.cpu_seconds() - before
                turn.others_cpu_s[other.name] = round(used, 3)
            turn.version = team.version
    for turn in (turn for turn in turns if turn.key in teams):
        teams[turn.key].call("drop", turn.work)


def available_bytes() -> int:
    """How much memory is free for us."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) << 10


def planned(peers: int, contestants: list[Contestant], sizes: list[int], also: list[str]) -> list[Contest]:
    """All contests for one number of peers."""

    def contest(work: Work, takers: list[Contestant]) -> Contest:
        return Contest(peers, work.size_text, [Turn(taker.key, taker.name, work) for taker in takers])

    contests = [contest(Work(nbytes), contestants) for nbytes in sizes]
    if "in-flight" in also:
        takers = [taker for taker in contestants if taker.key in ("ours-auto", "gloo")]
        contests.append(contest(Work(4 * MIB, count=IN_FLIGHT), takers))
    if "types" in also:
        names = ["float32", "bfloat16", "8-bit"]
        turns = [Turn("ours-auto", name, work) for name, work in zip(names, TYPES, strict=True)]
        contests.append(Contest(peers, "64MiB, by type", turns))
    return contests


def run(arguments: argparse.Namespace, endpoint: str) -> list[Contest]:
    """All contests, one number of peers after another."""
    contestants = [ours(transport, endpoint) for transport in arguments.transport] + rivals(arguments.against)
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    done: list[Contest] = []
    for peers in arguments.peers:
        with started(contestants, peers) as teams:
            for contest in planned(peers, contestants, arguments.sizes, arguments.also):
                hold_contest(contest, teams, rounds, arguments.quick)
                done.append(contest)
    progress("")
    return done


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="How fast all-reduce is beside others, or what memory it takes.")
    names = comma_separated
    parser.add_argument("--peers", type=names, default="2,4", help="numbers of peers (default: %(default)s)")
    parser.add_argument("--sizes", type=names, default="4KiB,256KiB,4MiB,64MiB,256MiB", help="(default: %(default)s)")
    parser.add_argument("--against", type=names, default="gloo,mpi", help="gloo, openmpi, mpich, mpi for both, or none")
    parser.add_argument("--transport", type=names, default="auto,tcp", help="ours: auto, tcp (default: %(default)s)")
    parser.add_argument("--also", type=names, help="in-flight, types, or none (default: both; with --quick none)")
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    parser.add_argument("--quick", action="store_true", help="few rounds and iterations: figures that are no figures")
    parser.add_argument("--json", metavar="FILE", help="also write the results to a file")
    parser.add_argument("--plot", metavar="FILE", help="also draw the times into a PNG file")
    arguments = parser.parse_args()
    if arguments.also is None:
        arguments.also = [] if arguments.quick or "auto" not in arguments.transport else ["in-flight", "types"]
    try:
        arguments.peers = [int(text) for text in arguments.peers]
        arguments.sizes = [parse_size(text) for text in arguments.sizes]
        rivals(arguments.against)
    except ValueError as error:
        parser.error(str(error))
    for option, known in {"transport": {"auto", "tcp"}, "also": {"in-flight", "types"}}.items():
        if unknown := set(getattr(arguments, option)) - known:
            parser.error(f"--{option} takes {' and '.join(sorted(known))}, not {', '.join(sorted(unknown))}")
    if arguments.also and "auto" not in arguments.transport:
        parser.error("--also needs --transport auto")
    return arguments


def comma_separated(text: str) -> list[str]:
    """``a,b`` as a list; ``none`` as an empty one."""
    return [] if text == "none" else [part.strip() for part in text.split(",")]


def main() -> int:
    """Returns 0 if every target was met, else 1."""
    arguments = parsed()
    with MasterProcess() as master:
        if arguments.memory:
            growths = measure_memory(arguments.peers, [ours(name, master.endpoint) for name in arguments.transport])
            print_memory(growths)
            if arguments.json:
                to_json(arguments.json, machine([]), memory=growths)
            return 0 if growths and all(growth.met for growth in growths) else 1
        contests = run(arguments, master.endpoint)
    print_contests(contests)
    facts = machine([turn for contest in contests for turn in contest.timed])
    if arguments.json:
        to_json(arguments.json, facts, contests=contests)
    if arguments.plot:
        draw(arguments.plot, contests)
    return 0 if all(contest.met for contest in contests) else 1


if __name__ == "__main__":
    sys.exit(main())
