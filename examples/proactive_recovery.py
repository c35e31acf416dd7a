"""What it is worth to be told: a peer dies while the others wait for it, with and without the master's push.

    python examples/proactive_recovery.py

Three peers, each a process of its own, are in one group. Two of them call `update_topology()`, in which all members
meet, and wait there for the third, which is killed instead of calling it.

With the push (the default) the master asks the survivors at once to go on without it. With
``RAY_PCCL_PROACTIVE_RECOVERY=0`` it says nothing until a survivor has waited ``RAY_PCCL_PASSIVE_TIMEOUT_S`` and asks
by itself: the same death, seen at the same moment by the same master, costs as long as that timeout is.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection

from master_actor import serve
from ray_pccl import Communicator, MembershipChange, MembershipEvent

PASSIVE_TIMEOUT_S = 3.0
PATIENCE_S = 30.0
WITH_PUSH: dict[str, str] = {}
WITHOUT_PUSH = {"RAY_PCCL_PROACTIVE_RECOVERY": "0", "RAY_PCCL_PASSIVE_TIMEOUT_S": str(PASSIVE_TIMEOUT_S)}


def peer(pipe: Connection, endpoint: str, group: str, environment: dict[str, str], dies: bool) -> None:
    """The life of one peer. It reports what it sees, each time with the moment at which it saw it."""
    os.environ.update(environment)
    comm = Communicator(group, master=endpoint, min_world_size=3, max_world_size=3)
    comm.on_membership(lambda event: report_death(pipe, event))
    comm.connect(timeout=PATIENCE_S)
    comm.update_topology()  # the first call of a new member returns at once
    pipe.send(("ready", time.monotonic(), ""))
    if dies:
        signal.pause()
    comm.update_topology(timeout=PATIENCE_S)  # all members meet here: without the third, the two would wait
    pipe.send(("done", time.monotonic(), f"{comm.world_size} members in epoch {comm.epoch}"))
    pipe.recv()  # leave only when the other survivor has looked, too
    comm.close()


def report_death(pipe: Connection, event: MembershipEvent) -> None:
    """A membership callback: deaths come with their reason."""
    if event.change is MembershipChange.LOST:
        pipe.send(("lost", time.monotonic(), event.reason))


def trial(endpoint: str, group: str, environment: dict[str, str]) -> tuple[float, str, str]:
    """Seconds from the death until both survivors left the call, its reason as they heard it, and what they hold."""
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(3):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=peer, args=(theirs, endpoint, group, environment, rank == 2), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    for pipe in pipes:
        reports(pipe, "ready")
    time.sleep(0.5)  # by now the two wait in the call
    victim = processes[2].pid
    assert victim is not None
    killed = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    seen = [reports(pipe, "lost", "done") for pipe in pipes[:2]]
    for pipe in pipes[:2]:
        pipe.send("you may leave")
    for process in processes:
        process.join(PATIENCE_S)
    (reason,) = {report["lost"][1] for report in seen}  # both were told the same,
    (holds,) = {report["done"][1] for report in seen}  # and hold the same
    return max(report["done"][0] for report in seen) - killed, reason, holds


def reports(pipe: Connection, *kinds: str) -> dict[str, tuple[float, str]]:
    """Waits for one report of each kind, in any order: when it was, and its text."""
    seen: dict[str, tuple[float, str]] = {}
    while not seen.keys() >= set(kinds):
        if not pipe.poll(PATIENCE_S):
            raise TimeoutError(f"no report of {' and '.join(kinds)} within {PATIENCE_S:g} s")
        kind, at, text = pipe.recv()
        seen[kind] = at, text
    return seen


def main() -> None:
    """Both ways, side by side."""
    with serve() as endpoint:
        pushed_s, reason, after = trial(str(endpoint), "with-push", WITH_PUSH)
        waited_s, _, _ = trial(str(endpoint), "without-push", WITHOUT_PUSH)
    print("One of three peers is killed while the other two wait for it in update_topology().")
    print(f"Both survivors then hold: {after}. The reason they were given: {reason}.\n")
    print(f"{'':32}{'both survivors go on after':>28}")
    print(f"{'with the push (default)':32}{1000 * pushed_s:>25.1f} ms   the master told them at once")
    print(f"{'RAY_PCCL_PROACTIVE_RECOVERY=0':32}{1000 * waited_s:>25.1f} ms   they asked when they had waited", end="")
    print(f" {PASSIVE_TIMEOUT_S:g} s")
    print(f"\nThe push was {waited_s / pushed_s:.0f} times as fast.")


if __name__ == "__main__":
    main()
