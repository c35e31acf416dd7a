"""What a sync of the shared state costs: against a plain copy, against hashing, and with two sources against one.

    python benchmarks/shared_state.py            1 GiB on one host, 256 MiB over links of 1 Gbit/s
    python benchmarks/shared_state.py --short    less of both, once

The part over links needs network namespaces, as `shaped_links.py` does; where they can't be had, it says so.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from peers import MasterProcess, print_table, progress
from report import machine
from shaped_links import NotPermitted, address, inside, interrupted, master_in, shaped_hosts
from teams import Team, TeamFailed
from work import MIB, Work, size_text

WORKER = Path(__file__).with_name("state_worker.py")
PEERS = 3
RATE = "1gbit"
HEAL_TARGET, AGREE_TARGET, SOURCES_TARGET = 1.5, 1.3, 1.7


@dataclass(frozen=True)
class Figure:
    """One line of the result."""

    name: str
    value: float
    unit: str
    target: float | None = None
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the target is."""
        return self.target is None or (self.value >= self.target if self.at_least else self.value <= self.target)

    def cells(self) -> list[str]:
        """For the table."""
        value = f"{self.value:.0f} ms" if self.unit == "ms" else f"{self.value:.2f}"
        if self.target is None:
            return [self.name, value, "-", "-"]
        return [self.name, value, f"{'>=' if self.at_least else '<='} {self.target:g}", "yes" if self.met else "NO"]


def on_one_host(work: Work, rounds: int) -> list[Figure]:
    """A newcomer among three, and three that agree: each against its yardstick, in turn."""
    copies, reused, heals, hashes, agreements = [], [], [], [], []
    with MasterProcess() as master, tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench-") as folder:
        command = [sys.executable, str(WORKER), "SOCKET", str(PEERS), master.endpoint, "state"]
        team = Team("ours", PEERS, [command] * PEERS)
        try:
            team.call("hold", work)
            kept = str(Path(folder) / "kept")
            _copy(team, work, kept)
            for number in range(rounds + 1):
                progress(f"one host, round {number} of {rounds}")
                file = Path(folder) / f"copy-{number}"
                copies.append(_copy(team, work, str(file)))
                file.unlink()
                heals.append(max(team.call("heal", work, PEERS - 1)))
                reused.append(_copy(team, work, kept))
                for _ in range(3):  # they are short, so easily disturbed
                    hashes.append(max(team.call("hash", work)))
                    agreements.append(max(team.call("agree", work)))
        finally:
            team.end()
    copy, again, heal, hashing, agreed = (_median_ms(times) for times in (copies, reused, heals, hashes, agreements))
    size = size_text(work.nbytes)
    return [
        Figure(f"{size} into a new shared memory file, and out by another process", copy, "ms"),
        Figure(f"{size} through a file that was used before", again, "ms"),
        Figure(f"{size}, a newcomer among {PEERS}", heal, "ms"),
        Figure("times the copy through a new file", heal / copy, "", HEAL_TARGET),
        Figure("times the copy through a used file", heal / again, ""),
        Figure(f"{size} hashed by {PEERS} processes at once", hashing, "ms"),
        Figure(f"{size}, all {PEERS} agree", agreed, "ms"),
        Figure("times the hashing", agreed / hashing, "", AGREE_TARGET),
    ]


def _copy(team: Team, work: Work, path: str) -> float:
    return max(team.call("copy_in", work, path)) + max(team.call("copy_out", work, path))


def _median_ms(seconds: Sequence[float]) -> float:
    """Of all but the first, which warms up."""
    return 1000 * statistics.median(seconds[1:])


def over_links(work: Work, rounds: int) -> list[Figure]:
    """A newcomer on a host of its own: its state from one other host, and from two."""
    seconds: dict[int, list[float]] = {1: [], 2: []}
    with shaped_hosts(RATE) as hosts, master_in(hosts[0], address(0)) as endpoint:
        command = [sys.executable, str(WORKER), "SOCKET", str(PEERS), endpoint, "state"]
        team = Team("ours", PEERS, [inside(host, *command) for host in hosts[:PEERS]])
        try:
            team.call("hold", work)
            for number in range(rounds + 1):
                for sources, times in seconds.items():
                    progress(f"links of {RATE}, round {number} of {rounds}, {sources} sources")
                    times.append(max(team.call("heal", work, sources)))
        finally:
            team.end()
    one, two = (_median_ms(times) for times in seconds.values())
    size = size_text(work.nbytes)
    return [
        Figure(f"{size} over {RATE} a host, one source", one, "ms"),
        Figure(f"{size} over {RATE} a host, two sources", two, "ms"),
        Figure("times as fast with two sources", one / two, "", SOURCES_TARGET, at_least=True),
    ]


def main() -> int:
    """Returns 0 if every target was met that could be measured here; else 1."""
    parser = argparse.ArgumentParser(description="What a sync of the shared state costs.")
    parser.add_argument("--short", action="store_true", help="64 MiB and 32 MiB, once")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to a file")
    arguments = parser.parse_args()
    local, remote, rounds = (
        (Work(64 * MIB), Work(32 * MIB), 1) if arguments.short else (Work(1024 * MIB), Work(256 * MIB), 5)
    )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupted)
    figures: list[Figure] = []
    left_out = ""
    try:
        figures += on_one_host(local, rounds)
        figures += over_links(remote, 1 if arguments.short else 3)
    except NotPermitted as reason:
        left_out = f"links were not measured, because network namespaces can't be had here: {reason}"
    except TeamFailed as failure:
        print(f"a peer failed: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    progress("")
    print_table(["shared state", "found", "target", "met"], [figure.cells() for figure in figures])
    print("\nMedians; the time of a sync is that of its slowest peer, and includes hashing, verification and commit.")
    print("It stages what it receives in new memory, so its yardstick is the copy through a new file.")
    if left_out:
        print(left_out)
    if arguments.json:
        results = [{**asdict(figure), "met": figure.met} for figure in figures]
        Path(arguments.json).write_text(json.dumps({"machine": machine([]), "results": results}, indent=2) + "\n")
    return 0 if all(figure.met for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
