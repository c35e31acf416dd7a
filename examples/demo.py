"""A group on Ray that goes on: one of four peers is killed, then the master, then a newcomer is let in.

    python examples/demo.py        (or: make demo)

Each peer is an actor that does what a training loop does: at every step it lets in who waits, and sums a tensor of
4 MiB with all the others. What the peers see is printed with the milliseconds since the fault that caused it. The demo
ends with an error if anything that it claims did not hold.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

# Ray reports every process that dies. Here that is the point, and no news.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed")
import numpy as np
import ray

import ray_pccl
from ray_pccl import Communicator, MembershipChange, MembershipEvent, PCCLError, Settings

GROUP = "demo"
PEERS = 4
PATIENCE_S = 30.0
ELEMENTS = 1 << 20
CHECKPOINT = b"weights of step 1200"

Seen = tuple[float, MembershipEvent]


@ray.remote(num_cpus=0, max_concurrency=4)
class Peer:
    """One member. Its event times are of the clock that all processes of a machine share."""

    def __init__(self) -> None:
        # The group forms as soon as all four are there; two of them would wait 10 s for the others.
        settings = Settings.from_env(last_call_s=10.0)
        self.comm = Communicator(GROUP, min_world_size=2, max_world_size=PEERS, settings=settings)
        self.steps = 0
        self.events: list[Seen] = []
        self.sums: list[tuple[float, int]] = []
        """When a sum came back that had another number of contributors than the one before."""
        self.comm.on_membership(lambda event: self.events.append((time.monotonic(), event)))

    def join(self) -> tuple[float, int, tuple[str, ...]]:
        """Joins and starts to work; when that was, and the epoch and members it found."""
        self.comm.connect(timeout=PATIENCE_S)
        joined = time.monotonic(), self.comm.epoch, self.comm.members
        threading.Thread(target=self._work, daemon=True).start()
        return joined

    def _work(self) -> None:
        ones = np.ones(ELEMENTS, np.float32)
        total = np.empty_like(ones)
        contributors = 0
        try:
            while True:
                self.comm.update_topology()
                info = self.comm.all_reduce(ones, total)  # whoever dies in it: the sum of the survivors comes back
                if not (total == info.world_size).all():
                    os.abort()  # a wrong number: the demo fails without this peer
                if info.world_size != contributors:
                    contributors = info.world_size
                    self.sums.append((time.monotonic(), contributors))
                self.steps += 1
                time.sleep(0.002)
        except PCCLError:
            pass  # the demo is over

    def look(self) -> tuple[int, tuple[str, ...], int, list[Seen]]:
        """Epoch, members, steps done, and all events so far."""
        return self.comm.epoch, self.comm.members, self.steps, self.events

    def summed(self, contributors: int, since: float) -> float | None:
        """When the first sum of so many contributors came back."""
        return next((at for at, count in self.sums if at >= since and count == contributors), None)

    def name(self) -> tuple[str, int]:
        """Its unique name, and its process."""
        return self.comm.peer_id, os.getpid()

    def put(self, value: bytes) -> None:
        """Keeps a value in the group's store."""
        self.comm.store.set("checkpoint", value)

    def get(self) -> bytes:
        """Reads it."""
        return self.comm.store.get("checkpoint", timeout=PATIENCE_S)


def say(since: float | None, at: float, text: str) -> None:
    """One line: milliseconds since the cause, and what happened."""
    print(f"{1000 * (at - since):>10.1f} ms  {text}" if since is not None else f"\n{text}", flush=True)


def first(peer: Any, since: float, change: MembershipChange, wanted: Callable[[MembershipEvent], bool]) -> Seen:
    """The first event of this kind that the peer saw after `since`. Waits for it."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for at, event in ray.get(peer.look.remote())[3]:
            if at >= since and event.change is change and wanted(event):
                return at, event
        time.sleep(0.01)
    raise TimeoutError(f"a peer saw no {change.value!r} event within {PATIENCE_S:g} s")


def all_saw(
    peers: list[Any], since: float, change: MembershipChange, wanted: Callable[[MembershipEvent], bool] = lambda _: True
) -> tuple[float, list[MembershipEvent]]:
    """When the last of the peers saw such an event, and what each of them saw."""
    seen = [first(peer, since, change, wanted) for peer in peers]
    return max(at for at, _ in seen), [event for _, event in seen]


def all_summed(peers: list[Any], since: float, contributors: int) -> float:
    """When the last of the peers had a sum of so many contributors."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        times = ray.get([peer.summed.remote(contributors, since) for peer in peers])
        if None not in times:
            return max(times)
        time.sleep(0.01)
    raise TimeoutError(f"no sum of {contributors} within {PATIENCE_S:g} s")


def form(peers: list[Any]) -> tuple[int, float]:
    """The group forms. Its epoch, and the milliseconds it took."""
    began = time.monotonic()
    joined = ray.get([peer.join.remote() for peer in peers], timeout=PATIENCE_S)
    at = max(when for when, _, _ in joined)
    assert len({(epoch, members) for _, epoch, members in joined}) == 1, "the members disagree on their first epoch"
    epoch = joined[0][1]
    say(began, at, f"{len(peers)} peers have found each other: epoch {epoch}")
    say(began, all_summed(peers, began, len(peers)), f"all have summed 4 MiB with {len(peers)} contributions")
    ray.get(peers[0].put.remote(CHECKPOINT))
    say(began, time.monotonic(), f"one of them keeps {CHECKPOINT!r} in the group's store")
    return epoch, 1000 * (at - began)


def kill_a_peer(peers: list[Any], epoch: int) -> tuple[int, float]:
    """One peer dies. The survivors' epoch, and the milliseconds until all of them held it."""
    *survivors, victim = peers
    name, pid = ray.get(victim.name.remote())
    say(None, 0, f"SIGKILL to one of {len(peers)} peers (process {pid})")
    struck = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    at, deaths = all_saw(survivors, struck, MembershipChange.LOST, lambda event: event.peer_id == name)
    say(struck, at, f"all survivors know why: {deaths[0].reason}")
    at, epochs = all_saw(survivors, struck, MembershipChange.EPOCH)
    assert {(event.epoch, len(event.members)) for event in epochs} == {(epoch + 1, len(survivors))}
    assert all(name not in event.members for event in epochs)
    say(struck, at, f"all {len(survivors)} hold epoch {epoch + 1}, without it")
    at = all_summed(survivors, struck, len(survivors))
    say(struck, at, f"and the right sum of {len(survivors)} contributions, the one that died not among them")
    return epoch + 1, 1000 * (at - struck)


def kill_the_master(master: Any, members: list[Any], newcomer: Any, epoch: int) -> tuple[int, float]:
    """The master dies while a newcomer asks to be let in. The last epoch, and the milliseconds until it was in."""
    pid = ray.get(master.pid.remote())
    say(None, 0, f"SIGKILL to the master (process {pid}); at the same time a newcomer wants to join")
    struck = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    joining = newcomer.join.remote()
    at, _ = all_saw(members, struck, MembershipChange.MASTER_LOST)
    say(struck, at, "all members have noticed, and keep their group")
    at, back = all_saw(members, struck, MembershipChange.MASTER_BACK)
    assert {event.epoch for event in back} == {epoch}, "the restart changed the epoch"
    say(struck, at, f"Ray has restarted it, all members are known to it again, in epoch {epoch} as before")
    joined, admitted_in, who = ray.get(joining, timeout=PATIENCE_S)
    assert admitted_in == epoch + 1 and len(who) == len(members) + 1, "the newcomer was not simply admitted"
    say(struck, joined, f"the members have voted the newcomer in: epoch {admitted_in}, {len(who)} members")
    assert ray.get(master.pid.remote()) != pid, "this is the old master"
    return admitted_in, 1000 * (joined - struck)


def check_that_it_goes_on(members: list[Any], epoch: int, more_steps: int = 20) -> None:
    """All members do more steps together, agree on everything, and have their stored value."""
    began = time.monotonic()
    before = [steps for _, _, steps, _ in ray.get([member.look.remote() for member in members])]
    while True:
        now = ray.get([member.look.remote() for member in members])
        if all(looked[2] - steps >= more_steps for looked, steps in zip(now, before, strict=True)):
            break
        assert time.monotonic() - began < PATIENCE_S, "the group does not go on"
        time.sleep(0.02)
    assert {(e, who) for e, who, _, _ in now} == {(epoch, now[0][1])}, "the members disagree"
    assert len(now[0][1]) == len(members)
    say(None, 0, "Afterwards")
    all_summed(members, 0.0, len(members))
    say(began, time.monotonic(), f"{more_steps} more steps of all {len(members)} members, in epoch {epoch}")
    assert ray.get([member.get.remote() for member in members]) == [CHECKPOINT] * len(members)
    say(began, time.monotonic(), f"every member, the newcomer too, reads {CHECKPOINT!r} from the store")


def main() -> None:
    """The whole story. Raises if anything in it was not so."""
    started = time.monotonic()
    print("A local Ray starts ...", flush=True)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        began = time.monotonic()
        master = ray_pccl.start_master()
        say(None, 0, "A master and four peers")
        say(began, time.monotonic(), "the master runs, as a detached actor")
        peers = [Peer.remote() for _ in range(PEERS)]
        newcomer = Peer.remote()
        ray.get([peer.name.remote() for peer in [*peers, newcomer]])
        epoch, formed_ms = form(peers)
        epoch, peer_ms = kill_a_peer(peers, epoch)
        members = peers[:-1]
        epoch, master_ms = kill_the_master(master, members, newcomer, epoch)
        check_that_it_goes_on([*members, newcomer], epoch)
        ray_pccl.stop_master()
    finally:
        ray.shutdown()
    print("\nIn short")
    print(f"{formed_ms:>10.1f} ms  for four peers to form a group")
    print(f"{peer_ms:>10.1f} ms  from the death of a peer until all survivors held their sum without it")
    print(f"{master_ms:>10.1f} ms  from the death of the master until a newcomer was in; the members kept their epoch")
    print(f"{time.monotonic() - started:>10.1f} s   for everything, Ray's start included")


if __name__ == "__main__":
    main()
