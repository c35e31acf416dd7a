"""What a collective over ObjectRefs costs a driver: against `ray.util.collective` (gloo), and against the naive way.

    python benchmarks/driver.py            all of it, about two minutes
    python benchmarks/driver.py --quick    a smoke test: few iterations, sizes up to 4 MiB

One local Ray, 2 and 4 actors. Every line is measured in this run, the contestants in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.util.collective as gloo
from peers import print_table, progress, shown

import ray_pccl

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"4 KiB": 4 * KIB, "4 MiB": 4 * MIB, "64 MiB": 64 * MIB}
ITERATIONS = {4 * KIB: 30, 4 * MIB: 10, 64 * MIB: 4}
ROUNDS = 5
FOOTNOTES = """\
Milliseconds, medians over all rounds. ours: from ready refs of @collective methods, allreduce_refs and ray.wait for all
results. gloo: a call to each actor, which all-reduces in place, and ray.wait. naive: from ready refs in plasma, ray.get
and a sum in the driver, and ray.put of it, which no actor has yet. bare: a call to each actor that does nothing.
A ratio is our median divided by theirs, and below 1 where ours is faster."""


@ray.remote(num_cpus=0)
class Worker:
    """Holds a tensor, and does with it what each contestant needs."""

    def __init__(self, nbytes: int) -> None:
        self.tensor = np.ones(nbytes // 4, np.float32)
        self.own = np.ones(nbytes // 4, np.float32)

    @ray_pccl.collective
    def kept(self) -> Any:
        """The tensor, which stays here."""
        return self.tensor

    def stored(self) -> Any:
        """The tensor, which Ray puts into its store."""
        return self.tensor

    def nothing(self) -> None:
        """Does nothing."""

    def first(self, value: Any) -> float:
        """An element of a value that was passed."""
        return float(value[0])

    def init_gloo(self, world_size: int, rank: int, name: str) -> None:
        """Joins a group of Ray's own."""
        gloo.init_collective_group(world_size, rank, "gloo", name)

    def allreduce_gloo(self, name: str) -> None:
        """Reduces in place."""
        gloo.allreduce(self.own, name)


@dataclass
class Contest:
    """Contestants that take turns at one size and number of actors."""

    size: str
    actors: int
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def median_ms(self, name: str) -> float:
        """The middle one of a contestant."""
        return 1000 * statistics.median(self.seconds[name])

    def ratio(self, name: str) -> float:
        """Ours to theirs."""
        return self.median_ms("ours") / self.median_ms(name)


def run_in_turns(contest: Contest, contestants: dict[str, Callable[[], Any]], iterations: int, rounds: int) -> Contest:
    """Times each contestant, one after another, round after round."""
    for call in contestants.values():
        call()
    for _ in range(rounds):
        for name, call in contestants.items():
            for _ in range(iterations):
                started = time.perf_counter()
                result = call()
                contest.seconds.setdefault(name, []).append(time.perf_counter() - started)
                del result
    return contest


def reductions(size: str, nbytes: int, count: int, rounds: int, iterations: int) -> Contest:
    """The all-reduces of one size."""
    name = f"{size}-{count}".replace(" ", "")
    workers = [Worker.remote(nbytes) for _ in range(count)]
    group = ray_pccl.create_group(workers, name)
    ray.get([worker.init_gloo.remote(count, rank, name) for rank, worker in enumerate(workers)])
    kept = [worker.kept.remote() for worker in workers]
    stored = [worker.stored.remote() for worker in workers]
    wait_for(kept)
    wait_for(stored)
    assert float(ray.get(ray_pccl.allreduce_refs(kept))[0][0]) == count

    def ours() -> Any:
        reduced = group.allreduce_refs(kept)
        wait_for(reduced)
        return reduced

    def naive() -> Any:
        values = ray.get(stored)
        total = values[0].copy()
        for value in values[1:]:
            total += value
        return ray.put(total)

    contestants = {
        "ours": ours,
        "gloo": lambda: wait_for([worker.allreduce_gloo.remote(name) for worker in workers]),
        "naive": naive,
        "bare": lambda: wait_for([worker.nothing.remote() for worker in workers]),
    }
    contest = run_in_turns(Contest(size, count), contestants, iterations, rounds)
    group.destroy()
    for worker in workers:
        ray.kill(worker)
    return contest


def passed_back(nbytes: int, size: str, rounds: int) -> Contest:
    """A value that goes back to the actor that made it."""
    (worker,) = workers = [Worker.remote(nbytes)]
    contestants = {
        "ours": lambda: wait_for([worker.first.remote(worker.kept.remote())]),
        "plasma": lambda: wait_for([worker.first.remote(worker.stored.remote())]),
    }
    contest = run_in_turns(Contest(size, 1), contestants, 5, rounds)
    ray.kill(workers[0])
    return contest


def wait_for(refs: Sequence[Any]) -> None:
    """Until all are ready."""
    ray.wait(list(refs), num_returns=len(refs))


def targets(contest: Contest) -> list[tuple[str, float, float]]:
    """What a contest is to show: against whom, our ratio, and the bound."""
    if contest.size == "64 MiB":
        bound = 0.7 if contest.actors == 2 else 1.0
        return [("gloo", contest.ratio("gloo"), 0.4), ("naive", contest.ratio("naive"), bound)]
    return [("bare", contest.ratio("bare"), 2.5)] if contest.size == "4 KiB" else []


def main() -> int:
    """Prints the tables; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke test")
    parser.add_argument("--json", help="a file to write the figures to")
    given = parser.parse_args()
    ray.init(address="local", num_cpus=4, log_to_driver=False, object_store_memory=3 << 30)
    sizes = {name: nbytes for name, nbytes in SIZES.items() if not given.quick or nbytes < 64 * MIB}
    rounds = 2 if given.quick else ROUNDS
    contests = []
    for count in (2, 4):
        for size, nbytes in sizes.items():
            progress(f"{size} on {count} actors")
            contests.append(reductions(size, nbytes, count, rounds, ITERATIONS[nbytes]))
    progress("a value passed back")
    back = passed_back(max(sizes.values()), list(sizes)[-1], rounds)
    print_table(
        ["allreduce_refs", "actors", "ours", "gloo", "naive", "bare", "/gloo", "/naive", "/bare"],
        [
            [
                each.size,
                str(each.actors),
                *(shown(each.median_ms(name)) for name in ("ours", "gloo", "naive", "bare")),
                *(f"{each.ratio(name):.2f}" for name in ("gloo", "naive", "bare")),
            ]
            for each in contests
        ],
    )
    print(FOOTNOTES)
    print(
        f"\n{back.size} passed back to its actor by ref: {back.median_ms('ours'):.2f} ms, through plasma "
        f"{back.median_ms('plasma'):.2f} ms ({back.ratio('plasma'):.3f})\n"
    )
    missed = 0
    for contest in contests:
        for other, ratio, bound in targets(contest):
            missed += ratio > bound
            verdict = "met" if ratio <= bound else "MISSED"
            print(f"{contest.size} on {contest.actors}: {ratio:.2f} of {other}, at most {bound:g}: {verdict}")
    if given.json:
        results = [
            {
                "size": each.size,
                "actors": each.actors,
                "medians_ms": {name: each.median_ms(name) for name in each.seconds},
            }
            for each in [*contests, back]
        ]
        Path(given.json).write_text(json.dumps({"results": results}, indent=2) + "\n")
    ray.shutdown()
    return 1 if missed and not given.quick else 0


if __name__ == "__main__":
    sys.exit(main())
