"""A job for a cluster: `allreduce_refs` over actors on all nodes, step after step, whatever becomes of the nodes.

    ray dashboard on-premise.yaml &
    ray job submit --address http://localhost:8265 --working-dir examples/cluster -- python job.py

One actor on each node holds a gradient, which stays there; the driver has them averaged. When a node is cut off, or its
power goes, the master notices within a second or two, and the average is over those that are left: nothing waits for
Ray to find out, which takes a minute. Each step prints who contributed, and checks the numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import ray_pccl

ELEMENTS = 1 << 18
PATIENCE_S = 60.0
LOOK_S = 0.2


@ray.remote(num_cpus=0)
class Worker:
    """A plain actor on a node of its own."""

    def __init__(self, number: int, of: int) -> None:
        self._value = float(2**number)  # so that an average tells of whom it is
        self._who = np.zeros(of)
        self._who[number] = 1.0

    @ray_pccl.collective
    def gradient(self, step: int) -> dict[str, Any]:
        """What it contributes to a step."""
        return {"gradient": np.full(ELEMENTS, self._value + step, np.float32), "who": self._who}

    def apply(self, average: dict[str, Any]) -> tuple[float, float, list[int]]:
        """What came out: the average's smallest and largest element, and who contributed."""
        gradient = average["gradient"]
        return float(gradient.min()), float(gradient.max()), [int(place) for place in np.flatnonzero(average["who"])]


def step(group: Any, number: int) -> list[tuple[float, float, list[int]]]:
    """What each member applied in one step. Members that are lost on the way are not waited for."""
    members = group.members()  # as the master counts them
    averages = group.allreduce_refs([member.gradient.remote(number) for member in members], op=ray_pccl.ReduceOp.AVG)
    pending = {member: member.apply.remote(average) for member, average in zip(members, averages, strict=True)}
    applied = []
    deadline = time.monotonic() + PATIENCE_S
    while pending:
        done, _ = ray.wait(list(pending.values()), num_returns=len(pending), timeout=LOOK_S)
        for member in [member for member, ref in pending.items() if ref in done]:
            with contextlib.suppress(ray_pccl.PeerLostError, ray.exceptions.RayActorError):
                applied.append(ray.get(pending.pop(member)))
        if pending and (left := group.members()):
            pending = {member: ref for member, ref in pending.items() if member in left}
        if time.monotonic() > deadline:
            raise TimeoutError(f"step {number} did not end within {PATIENCE_S:g} s")
    return applied


def check(applied: list[tuple[float, float, list[int]]], number: int) -> str:
    """That all hold the average over those who contributed; a line that says so."""
    assert applied, f"nobody was left in step {number}"
    low, high, who = applied[0]
    right = float(np.float32(np.mean([2.0**each for each in who]) + number))
    assert all(each == applied[0] for each in applied), f"in step {number} members hold different averages: {applied}"
    assert np.isclose(low, right, rtol=1e-6) and low == high, f"in step {number} the average is {low}, not {right}"
    return f"step {number}: {len(who)} contributors {who}, average {low:.6g}, right"


def main() -> None:
    """The job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pause", type=float, default=0.2, help="seconds between two steps")
    options = parser.parse_args()
    ray.init(address="auto", log_to_driver=False)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    workers = [
        Worker.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(place, len(nodes))
        for place, node in enumerate(nodes)
    ]
    group = ray_pccl.create_group(workers, name="job")
    group.wait_ready()
    print(f"{len(workers)} actors on {len(nodes)} nodes", flush=True)
    for number in range(options.steps):
        began = time.monotonic()
        line = check(step(group, number), number)
        print(f"{line}, {(time.monotonic() - began) * 1000:.0f} ms", flush=True)
        time.sleep(options.pause)
    print("done", flush=True)


if __name__ == "__main__":
    main()
