"""From `ray.util.collective` to ray_pccl by changing an import: one program, run with both; and what a death does.

    python examples/migrating.py
    python examples/migrating.py --quick     without the death in Ray's own module

    -import ray.util.collective as col
    +import ray_pccl.util.collective as col

Both must give the same numbers. Then rank 3 is killed while the others wait for it in an all-reduce:
- with ray_pccl every survivor has an error within milliseconds, a `RuntimeError` as Ray's module would raise. They
  leave the group, make it anew with three ranks, and go on: this is asserted;
- with `ray.util.collective` (gloo) some survivors get an error, and others go on waiting. What happens here, within
  GLOO_S seconds, is printed, and nothing is asserted about it.

Without torch there is no gloo: then only ray_pccl is shown.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import os
import signal
import time
from typing import Any

# Ray reports every process that dies. Here that is the point, and no news.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed")
import numpy as np
import ray

import ray_pccl

RANKS = 4
GLOO_S = 3.0
PATIENCE_S = 60.0
THEIRS, OURS = "ray.util.collective", "ray_pccl.util.collective"


@ray.remote(num_cpus=0)
class Worker:
    """A program for `ray.util.collective`. The module comes by name, so that it can be run with both."""

    def join(self, module: str, rank: int, world_size: int) -> int:
        """Joins a group; the number of its process."""
        self.col = importlib.import_module(module)  # import ... as col
        self.rank = rank
        self.col.init_collective_group(world_size, rank, backend="gloo", group_name="program")
        return os.getpid()

    def program(self) -> dict[str, list[float]]:
        """Some of what the module has. Rank r brings r + 1."""
        col, group = self.col, "program"
        results = {}
        for op in ("SUM", "PRODUCT", "MIN", "MAX"):
            tensor = np.full(2, self.rank + 1, np.float32)
            col.allreduce(tensor, group, getattr(col.types.ReduceOp, op))
            results[f"allreduce {op}"] = tensor.tolist()
        tensor = np.full(2, self.rank + 1, np.float32)
        col.broadcast(tensor, src_rank=1, group_name=group)
        results["broadcast"] = tensor.tolist()
        everyone = [np.zeros(1, np.float32) for _ in range(RANKS)]
        col.allgather(everyone, np.full(1, self.rank + 1, np.float32), group)
        results["allgather"] = [float(part[0]) for part in everyone]
        part = np.zeros(1, np.float32)
        col.reducescatter(part, [np.full(1, self.rank + 1 + 10 * i, np.float32) for i in range(RANKS)], group)
        results["reducescatter"] = part.tolist()
        col.barrier(group)
        return results

    def allreduce(self) -> list[float]:
        """A sum of what all ranks bring."""
        tensor = np.full(2, self.rank + 1, np.float32)
        self.col.allreduce(tensor, "program")
        return list(tensor.tolist())

    def leave(self) -> None:
        """Leaves the group, so that it can be made anew."""
        self.col.destroy_collective_group("program")


DUE = {
    "allreduce SUM": [10, 10],
    "allreduce PRODUCT": [24, 24],
    "allreduce MIN": [1, 1],
    "allreduce MAX": [4, 4],
    "broadcast": [2, 2],
    "allgather": [1, 2, 3, 4],
}
"""What all ranks hold; with `reducescatter`, rank r has 10 + 40 r."""


def run(module: str, workers: list[Any]) -> int:
    """The program, on four actors; the process of the last one."""
    joining = [worker.join.remote(module, rank, RANKS) for rank, worker in enumerate(workers)]
    pids = ray.get(joining, timeout=PATIENCE_S)
    for rank, results in enumerate(ray.get([worker.program.remote() for worker in workers], timeout=PATIENCE_S)):
        assert results == DUE | {"reducescatter": [10 + 40 * rank]}, f"rank {rank} has {results}"
    print(f"{module}: {', '.join(f'{kind} {value}' for kind, value in DUE.items())}: right on all ranks", flush=True)
    return int(pids[-1])


def leave(workers: list[Any]) -> None:
    """All leave their group."""
    ray.get([worker.leave.remote() for worker in workers], timeout=PATIENCE_S)


def death(survivors: list[Any], pid: int, patience_s: float) -> list[tuple[float | None, str]]:
    """What each survivor of an all-reduce got, after how many milliseconds; None if nothing."""
    calls = [survivor.allreduce.remote() for survivor in survivors]
    ray.wait(calls, timeout=0.5)  # nobody can be through: the last one does not come
    struck = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    ended: dict[Any, float] = {}
    while len(ended) < len(calls) and time.monotonic() < struck + patience_s:
        ready, _ = ray.wait([call for call in calls if call not in ended], timeout=0.01)
        ended |= dict.fromkeys(ready, 1000 * (time.monotonic() - struck))
    return [(ended[call], outcome(call)) if call in ended else (None, "") for call in calls]


def outcome(call: Any) -> str:
    """What came of a call, in a line."""
    try:
        return f"result {ray.get(call)}"
    except Exception as error:
        cause = getattr(error, "cause", None) or error
        return f"{type(cause).__name__}: {str(cause).strip():.90}".replace("\n", " ")


def show(module: str, outcomes: list[tuple[float | None, str]], patience_s: float) -> None:
    """One line a survivor."""
    print(f"\n{module}: rank 3 is killed while the others wait for it")
    for rank, (milliseconds, what) in enumerate(outcomes):
        when = f"still waits, after {patience_s:g} s" if milliseconds is None else f"{milliseconds:7.1f} ms  {what}"
        print(f"  rank {rank}: {when}", flush=True)


def go_on_after_a_death(workers: list[Any], pid: int) -> None:
    """With ray_pccl."""
    *survivors, _ = workers
    outcomes = death(survivors, pid, PATIENCE_S)
    show(OURS, outcomes, PATIENCE_S)
    assert all(ms is not None and ms < 5000 and what.startswith("PeerLost") for ms, what in outcomes), outcomes
    leave(survivors)
    joining = [worker.join.remote(OURS, rank, len(survivors)) for rank, worker in enumerate(survivors)]
    ray.get(joining, timeout=PATIENCE_S)
    sums = ray.get([worker.allreduce.remote() for worker in survivors], timeout=PATIENCE_S)
    assert sums == [[6.0, 6.0]] * len(survivors), sums
    print(f"  the three make their group anew, and go on: allreduce SUM {sums[0]}", flush=True)


def main() -> None:
    """Raises if ray_pccl does anything else than it says."""
    parser = argparse.ArgumentParser(description="One program with Ray's module and with ray_pccl's.")
    parser.add_argument("--quick", action="store_true", help="without the death in Ray's own module")
    quick = parser.parse_args().quick
    has_gloo = importlib.util.find_spec("torch") is not None
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    workers = [Worker.remote() for _ in range(RANKS)]
    if has_gloo:
        run(THEIRS, workers)
        leave(workers)
    go_on_after_a_death(workers, run(OURS, workers))
    if has_gloo and not quick:
        others = [Worker.remote() for _ in range(RANKS)]
        show(THEIRS, death(others[:-1], run(THEIRS, others), GLOO_S), GLOO_S)
    ray_pccl.stop_master()
    ray.shutdown()


if __name__ == "__main__":
    main()
