"""Peers that reduce in a loop, one of which is killed in the middle of it.

The survivors contribute 1 and 2, the victim 4, so that a sum tells whose inputs are in it. A survivor loops until a
result lacks the victim, and stamps that moment with `time.monotonic()`.
"""

from __future__ import annotations

import math
import multiprocessing.sharedctypes
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from peers import PATIENCE_S, SPAWN, Peer, Report, Row, Trio, progress

from ray_pccl import Communicator, MembershipChange, MembershipEvent, Settings

NBYTES = 4 << 20
VICTIMS_CONTRIBUTION = 4
SOME = 3
"""So many iterations are done before a loop counts as under way."""


@dataclass
class TailRow(Row):
    """A line that has a target for its slowest trials, too."""

    p99_target: float = math.inf

    @property
    def met(self) -> bool:
        """Whether median and 99th percentile are within their targets."""
        return super().met and self.p99 < self.p99_target


class ReducingPeer(Peer):
    """A peer that can be told to reduce in a loop. It differs from others in what its process runs."""

    def __init__(self, endpoint: str, group: str, contribution: int, in_flight: int) -> None:
        self._pipe, theirs = SPAWN.Pipe()
        self._within = multiprocessing.sharedctypes.RawValue("b", 0)
        arguments = (theirs, self._within, endpoint, group, contribution, in_flight)
        self.process = SPAWN.Process(target=_live, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.reports: list[Report] = []
        self.peer_id = ""
        self.children: list[int] = []

    def reduce(self) -> None:
        """Sends the peer into its loop; `reducing()` waits until it is under way, `reduced()` for its end."""
        self._pipe.send("reduce")

    def reducing(self) -> None:
        """Waits until the loop is under way."""
        self.wait(lambda report: report.what == "reducing")

    def reduced(self) -> Report:
        """Waits for the first results that lack the victim; they were right in every element."""
        return self.wait(lambda report: report.what == "reduced")

    def died_within(self) -> bool:
        """Whether the process, now dead, was in an operation when it died."""
        return bool(self._within.value)


class ReducingTrio(Trio):
    """Two members that stay, and a third that is new in every trial."""

    def __init__(self, endpoint: str, group: str, in_flight: int) -> None:
        self._endpoint, self._group, self._in_flight = endpoint, group, in_flight
        self.survivors: list[Any] = [ReducingPeer(endpoint, group, 1 << rank, in_flight) for rank in range(2)]
        for survivor in self.survivors:
            survivor.joined()

    def admit_reducing(self) -> ReducingPeer:
        """A new third member: it comes, the two vote, and all three reduce."""
        newcomer = ReducingPeer(self._endpoint, self._group, VICTIMS_CONTRIBUTION, self._in_flight)
        for survivor in self.survivors:
            survivor.wait(lambda report: report.what == MembershipChange.WAITING.value)
        for survivor in self.survivors:
            survivor.vote()
        newcomer.joined()
        for survivor in self.survivors:
            survivor.voted()
        everyone = [*self.survivors, newcomer]
        for peer in everyone:
            peer.reduce()
        for peer in everyone:
            peer.reducing()
        return newcomer


def reduction_trials(endpoint: str, name: str, trials: int, in_flight: int) -> tuple[list[float], str]:
    """Milliseconds from the SIGKILL until both survivors hold results without the victim, all of them right.

    A trial in which the victim was between two operations when it died is not counted, and made again; the text says
    how many there were.
    """
    trio = ReducingTrio(endpoint, name, in_flight)
    samples: list[float] = []
    between = 0
    try:
        while len(samples) < trials:
            progress(f"{name}: trial {len(samples) + 1} of {trials}")
            victim = trio.admit_reducing()
            time.sleep(random.uniform(0.02, 0.2))  # so that no two trials strike the same moment of an operation
            struck = victim.send_signal(signal.SIGKILL)
            results = [survivor.reduced() for survivor in trio.survivors]
            victim.end()
            first, second = results
            assert first.members == second.members, f"survivors disagree on contributors: {first} and {second}"
            assert first.detail == second.detail, f"survivors lost the victim in different rounds: {first} and {second}"
            if victim.died_within():
                samples.append(1000 * (max(result.at for result in results) - struck))
            else:
                between += 1
    finally:
        trio.end()
    return samples, f"{between} more trials struck between two operations, and are not counted"


# ------------------------------------------------------------------------------------------- inside a peer process


def _live(pipe: Connection, within: Any, endpoint: str, group: str, contribution: int, in_flight: int) -> None:
    """A peer's life: joins, obeys commands, ends with its pipe."""
    lock = threading.Lock()
    comm = Communicator(group, master=endpoint, min_world_size=2, settings=Settings.from_env(last_call_s=0.0))

    def say(report: Report) -> None:
        with lock:
            pipe.send(report)

    def on_event(event: MembershipEvent) -> None:
        say(Report(event.change.value, time.monotonic(), event.epoch, event.members, event.peer_id or ""))

    comm.on_membership(on_event)
    try:
        comm.connect(timeout=PATIENCE_S)
        comm.update_topology()
        say(Report("joined", time.monotonic(), comm.epoch, comm.members, comm.peer_id))
        while True:
            if pipe.recv() == "vote":
                comm.update_topology(timeout=PATIENCE_S)
                say(Report("voted", time.monotonic(), comm.epoch, comm.members))
            else:
                say(_reduce_until_loss(comm, within, contribution, in_flight, say))
    except EOFError:
        comm.close()
    except Exception as error:
        say(Report("failed", time.monotonic(), detail=repr(error)))
        raise


def _reduce_until_loss(
    comm: Any, within: Any, contribution: int, in_flight: int, say: Callable[[Report], None]
) -> Report:
    """Reduces until a result has two contributors instead of three; looks at every element of the last ones."""
    import numpy

    inputs = [numpy.full(NBYTES // 4, contribution * (tag + 1), numpy.float32) for tag in range(in_flight)]
    outputs = [numpy.empty_like(each) for each in inputs]
    round_number = 0
    while True:
        within.value = 1
        if in_flight == 1:
            infos = [comm.all_reduce(inputs[0], outputs[0])]
        else:
            handles = [
                comm.all_reduce_async(inputs[tag], outputs[tag], tag=tag, retry=True) for tag in range(in_flight)
            ]
            infos = [handle.result(PATIENCE_S) for handle in handles]
        within.value = 0
        at = time.monotonic()
        lost = [info for info in infos if info.world_size == 2]
        for tag, (info, output) in enumerate(zip(infos, outputs, strict=True)):
            expected = (tag + 1) * (7 if info.world_size == 3 else 3)
            wrong = (output != expected).any() if lost else output[tag] != expected
            assert not wrong, f"tag {tag} of round {round_number}: {output} with {info}, not {expected}"
        if lost:
            return Report("reduced", at, comm.epoch, tuple(lost[-1].contributors), detail=str(round_number))
        round_number += 1
        if round_number == SOME:
            say(Report("reducing", time.monotonic()))
