"""How long a group takes to recover: from a fault to the moment when every survivor holds the new epoch, or the result.

    python benchmarks/recovery.py            all of it, 20 trials each
    python benchmarks/recovery.py --quick    a smoke test: 3 trials, a short time under load

Three peers, each a process of its own, and a master as another; the last part runs the master as a detached actor on a
local Ray. Every figure is measured in this run, unless its column says "quoted".
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers import GONE, PATIENCE_S, SPAWN, MasterProcess, Peer, Row, Trio, print_table, progress, shown, write_json
from reducing_peers import TailRow, reduction_trials

from ray_pccl import Settings

QUOTED_KILL = {"torchft": "5050 default, 210 tuned", "pccl": "135-145"}
QUOTED_HANG = {"torchft": "60000", "pccl": "never"}
QUOTED_MASTER = {"torchft": "replicas exit", "pccl": "run ends"}
NOTHING = {"torchft": "-", "pccl": "-"}
FOOTNOTES = """\
Times in milliseconds. p99 by nearest rank: with fewer than 100 trials, the slowest one. A target is for the median.
SIGKILL, SIGSTOP: from just before the signal to the later of the two survivors' EPOCH events.
SIGKILL in an all-reduce: to the moment when both survivors hold the right result of the operation that was struck, or
of all 16 in flight. It struck within an operation in every trial that counts.
master SIGKILL: from just before the signal to the return of connect() in a new peer, with a master that Ray restarts;
in every trial the members' next epoch was the one that admitted the new peer, so the restart itself took none.
Quoted columns were not measured here: torchft 0.2 and PCCL 1.0.0, in another run on a similar machine, one of three
killed, from the fault to the survivors' next result (PCCL: 4 MiB). Compare orders of magnitude, not digits."""


def kill_trials(
    endpoint: str, name: str, trials: int, *, target_ms: float, resident_mib: int = 0, fork: str | None = None
) -> Row:
    """SIGKILL of one of three, again and again, each time a new process."""

    def prepare(victim: Peer) -> None:
        if resident_mib:
            assert victim.resident_mib() >= resident_mib, "the victim does not hold what it should"
        if fork is not None:
            victim.fork(fork)

    samples = fault_trials(endpoint, name, trials, signal.SIGKILL, prepare, resident_mib)
    return Row(name, "ms", samples, target_ms, f"< {shown(target_ms)}", QUOTED_KILL if fork is None else NOTHING)


def stop_trials(endpoint: str, trials: int) -> Row:
    """SIGSTOP of one of three: a freeze that lasts."""
    target_ms = 1000 * Settings.from_env().heartbeat_timeout_s + 100
    samples = fault_trials(endpoint, "SIGSTOP", trials, signal.SIGSTOP, lambda _: None, 0)
    return Row("SIGSTOP", "ms", samples, target_ms, f"< {shown(target_ms)}", QUOTED_HANG)


def reduction_kill_trials(endpoint: str, trials: int) -> list[Row]:
    """SIGKILL of one of three in the middle of an all-reduce, and of many at the same time."""
    one, many = "SIGKILL in a 4 MiB all-reduce", "SIGKILL in 16 x 4 MiB in flight"
    samples, note = reduction_trials(endpoint, one, trials, 1)
    rows: list[Row] = [TailRow(one, "ms", samples, 50, "< 50, p99 < 250", QUOTED_KILL, note, 250)]
    samples, note = reduction_trials(endpoint, many, trials, 16)
    return [*rows, Row(many, "ms", samples, 150, "< 150", NOTHING, note)]


def fault_trials(
    endpoint: str,
    name: str,
    trials: int,
    number: signal.Signals,
    prepare: Callable[[Peer], None],
    resident_mib: int,
) -> list[float]:
    """Milliseconds from the signal until both survivors hold an epoch without the victim."""
    trio = Trio(endpoint, name)
    samples = []
    try:
        for trial in range(trials):
            progress(f"{name}: trial {trial + 1} of {trials}")
            victim = trio.admit(resident_mib=resident_mib)
            prepare(victim)
            time.sleep(random.uniform(0.05, 0.25))  # so that no trial is in step with the master's or sentinel's beat
            struck = victim.send_signal(number)
            held = [survivor.epoch_without(victim.peer_id).at for survivor in trio.survivors]
            samples.append(1000 * (max(held) - struck))
            victim.end()
    finally:
        trio.end()
    return samples


# ---------------------------------------------------------------------------------------------- a machine under load


def load_trial(endpoint: str, seconds: float) -> Row:
    """Counts evictions of healthy peers while twice as many busy loops as cores run beside them."""
    trio = Trio(endpoint, "load")
    third = trio.admit()
    peers = [*trio.survivors, third]
    epoch = third.reports[-1].epoch
    burners = [SPAWN.Process(target=_burn, daemon=True) for _ in range(2 * (os.cpu_count() or 1))]
    evicted: set[str] = set()
    try:
        for burner in burners:
            burner.start()
        ends = time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0:
            progress(f"all cores loaded: {left:.0f} s to go, {len(evicted)} evictions")
            time.sleep(min(1.0, left))
            for peer in peers:
                evicted |= {report.peer_id for report in peer.drain() if report.what in GONE}
        if not evicted:  # the group still works, in the same epoch
            for peer in peers:
                peer.vote()
            assert {peer.voted().epoch for peer in peers} == {epoch}, "the epoch changed, though nobody was evicted"
    finally:
        for burner in burners:
            burner.kill()
        third.end()
        trio.end()
    name = f"false evictions, {len(burners)} busy loops, {seconds:g} s"
    return Row(name, "evictions", [float(len(evicted))], 0, "0", NOTHING)


def _burn() -> None:
    while True:
        pass


# -------------------------------------------------------------------------------------------- the master's own death


class RayMember:
    """A member on Ray: votes in a loop, as a training loop would, and remembers every epoch it was in."""

    def __init__(self) -> None:
        import threading

        from ray_pccl import Communicator, MembershipChange

        self.comm = Communicator("restart", min_world_size=2, settings=Settings.from_env(last_call_s=0.0))
        self.epochs: list[tuple[int, tuple[str, ...]]] = []

        def on_event(event: Any) -> None:
            if event.change is MembershipChange.EPOCH:
                self.epochs.append((event.epoch, event.members))

        self.comm.on_membership(on_event)
        self._loop = threading.Thread(target=self._vote_for_ever, daemon=True)

    def connect(self) -> None:
        """Joins, and votes from then on."""
        self.comm.connect(timeout=PATIENCE_S)
        self._loop.start()

    def _vote_for_ever(self) -> None:
        while True:
            self.comm.update_topology(timeout=PATIENCE_S)
            time.sleep(0.005)

    def seen(self) -> list[tuple[int, tuple[str, ...]]]:
        """All epochs so far, with their members."""
        return self.epochs


class RayNewcomer:
    """A peer that comes, is admitted, and leaves again."""

    def join(self) -> tuple[float, int, str]:
        """When it had joined, the epoch that admitted it, and its name."""
        from ray_pccl import Communicator

        self.comm = Communicator("restart", min_world_size=2, settings=Settings.from_env(last_call_s=0.0))
        self.comm.connect(timeout=PATIENCE_S)
        return time.monotonic(), self.comm.epoch, self.comm.peer_id

    def leave(self) -> None:
        """Makes room for the next trial."""
        self.comm.close()


def master_trials(trials: int) -> Row:
    """SIGKILL of the master, a detached Ray actor, until a new peer has joined the group."""
    import logging

    # Ray reports every process that dies. Here that is the point, and no news.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed")
    import ray

    import ray_pccl

    progress("starting a local Ray")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    samples = []
    try:
        master = ray_pccl.start_master()
        member_class, newcomer_class = ray.remote(RayMember), ray.remote(RayNewcomer)
        members = [member_class.options(num_cpus=0).remote() for _ in range(2)]
        newcomer = newcomer_class.options(num_cpus=0).remote()
        ray.get([member.connect.remote() for member in members], timeout=PATIENCE_S)
        for trial in range(trials):
            progress(f"master SIGKILL: trial {trial + 1} of {trials}")
            pid = _patiently(lambda: ray.get(master.pid.remote(), timeout=PATIENCE_S))
            before = _agreed_epoch(members)
            struck = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            joined, epoch, peer_id = ray.get(newcomer.join.remote(), timeout=PATIENCE_S)
            samples.append(1000 * (joined - struck))
            for following, who in [_next_epoch(member, before) for member in members]:
                assert following == epoch == before + 1, f"from epoch {before} to {following}, not to {epoch}"
                assert len(who) == 3 and peer_id in who, f"peer {peer_id} was not simply admitted: {who}"
            ray.get(newcomer.leave.remote(), timeout=PATIENCE_S)
        ray_pccl.stop_master()
    finally:
        ray.shutdown()
    return Row("master SIGKILL, a new peer joined", "ms", samples, 3000, "< 3000", QUOTED_MASTER)


def _next_epoch(member: Any, before: int) -> tuple[int, tuple[str, ...]]:
    """The first epoch that the member saw after `before`."""
    import ray

    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if later := [seen for seen in ray.get(member.seen.remote()) if seen[0] > before]:
            return later[0]
        time.sleep(0.005)
    raise TimeoutError(f"a member saw no epoch after {before}")


def _agreed_epoch(members: list[Any]) -> int:
    """The epoch of the two members alone, once both of them are in it."""
    import ray

    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        last = [seen[-1] for seen in ray.get([member.seen.remote() for member in members]) if seen]
        if len(last) == 2 and last[0] == last[1] and len(last[0][1]) == 2:
            return int(last[0][0])
        time.sleep(0.01)
    raise TimeoutError("the two members did not get to the same epoch")


def _patiently(call: Callable[[], Any]) -> Any:
    """The actor may be in a restart still: asks again until it answers."""
    from ray.exceptions import RayActorError

    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call()
        except RayActorError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.05)


# -------------------------------------------------------------------------------------------------------- the whole


def run(trials: int, load_seconds: float, *, with_ray: bool = True) -> list[Row]:
    """All measurements, one after another."""
    rows = []
    with MasterProcess() as master:
        rows.append(kill_trials(master.endpoint, "SIGKILL, small process", trials, target_ms=20))
        for gib in (1, 4):
            if available_gib() > gib + 1:
                name = f"SIGKILL, {gib} GiB resident"
                rows.append(kill_trials(master.endpoint, name, trials, target_ms=50, resident_mib=gib << 10))
            else:
                print(f"SIGKILL, {gib} GiB resident: left out, there is not enough free memory", file=sys.stderr)
        for fork, name in (("fork", "a forked child outlives it"), ("raw_fork", "the child holds its sockets")):
            rows.append(kill_trials(master.endpoint, f"SIGKILL, {name}", trials, target_ms=20, fork=fork))
        rows += reduction_kill_trials(master.endpoint, trials)
        rows.append(stop_trials(master.endpoint, trials))
        rows.append(load_trial(master.endpoint, load_seconds))
    if with_ray:
        rows.append(master_trials(trials))
    progress("")
    return rows


def available_gib() -> float:
    """How much memory is free for us."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) / (1 << 20)


def print_rows(rows: list[Row]) -> None:
    """The table, ours beside what is quoted."""
    headings = ["fault", "trials", "median", "p99", "target", "met", "torchft (quoted)", "PCCL (quoted)"]
    lines = [
        [
            row.name,
            str(len(row.samples)),
            shown(row.median),
            shown(row.p99),
            row.target_text,
            "yes" if row.met else "NO",
            row.quoted["torchft"],
            row.quoted["pccl"],
        ]
        for row in rows
    ]
    print_table(headings, lines)
    print(f"\n{FOOTNOTES}")


def main() -> int:
    """Returns 0 if every target was met, else 1."""
    parser = argparse.ArgumentParser(description="How fast a group recovers from a fault, beside quoted figures.")
    parser.add_argument("--trials", type=int, default=20, help="trials of each fault (default: %(default)s)")
    parser.add_argument("--load-seconds", type=float, default=60.0, help="time under load (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a smoke test: 3 trials, 5 s under load")
    parser.add_argument("--no-ray", action="store_true", help="leave out the part that needs a local Ray")
    parser.add_argument("--json", metavar="FILE", help="also write every sample to a file")
    arguments = parser.parse_args()
    trials, load_seconds = (3, 5.0) if arguments.quick else (arguments.trials, arguments.load_seconds)
    rows = run(trials, load_seconds, with_ray=not arguments.no_ray)
    print_rows(rows)
    if arguments.json:
        write_json(arguments.json, rows, trials=trials, cores=os.cpu_count())
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
