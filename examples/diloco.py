"""DiLoCo: actors train alone for many steps, and average what they have learned in 8 bits; one dies, one joins.

    python examples/diloco.py                    some 25 seconds
    python examples/diloco.py --quick            fewer rounds
    python examples/diloco.py --library numpy    without torch (the default if there is none)

Synchronous training averages gradients at every step. Here, as in DiLoCo (Douillard et al., 2023), each actor makes
INNER steps by itself, with AdamW (with plain SGD in numpy). What it moved away from the shared weights is its
*pseudo-gradient*. These are averaged, a byte an element, and an outer SGD with Nesterov momentum makes a step along the
average. So the network carries one byte where synchronous training carries 4 * INNER.

The shared weights and the outer momentum are shared state: who joins is given them. AdamW's moments are everyone's own.
In the end the same model is trained synchronously, in one process, on as many samples. It is asserted that the loss of
DiLoCo on data that neither has seen is at most WORSE times as high, and that all actors hold the same bits.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

# Ray reports every process that dies. Here that is the point, and no news.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the actors share the cores
import numpy as np
import ray
from demo_training import BATCH, digest
from diloco_learners import LEARNERS, samples, unseen

import ray_pccl
from ray_pccl import (
    Communicator,
    DataType,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceOp,
    Settings,
    SharedState,
)

ACTORS = 4
INNER = 20
OUTER_RATE, OUTER_MOMENTUM = np.float32(0.7), np.float32(0.9)
WORSE = 1.1
PATIENCE_S = 60.0
BYTES = QuantizationOptions(DataType.UINT8, QuantizationAlgorithm.MIN_MAX)

# ------------------------------------------------------------------------------------------------------ an actor


class Round(NamedTuple):
    """What one actor saw of one outer step."""

    number: int
    contributors: int
    sent: int
    """Bytes that it handed to others for the average."""
    received: int
    """Bytes of shared state that it was given."""
    bits: str
    """A digest of the shared weights after the step."""


@ray.remote(num_cpus=0, max_concurrency=4)
class Island:
    """Trains alone, most of the time."""

    def __init__(self, number: int, library: str) -> None:
        self.number = number
        self.learner = LEARNERS[library]()
        self.weights = self.learner.get()
        if number >= ACTORS:
            self.weights[:] = 0  # who comes late has nothing yet
        self.momentum = np.zeros_like(self.weights)
        self.round = np.zeros(1, np.int64)
        self.rounds: list[Round] = []
        self.plain = 0
        self.error = ""
        self.enough = False
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _train(self, comm: Communicator) -> None:
        state = SharedState({"weights": self.weights, "momentum": self.momentum, "round": self.round})
        while True:
            comm.update_topology()  # admits who waits
            state.revision += 1
            received = comm.sync_shared_state(state).rx_bytes  # gives it the weights; nothing moves else
            self.learner.set(self.weights)
            for step in range(INNER):
                self.learner.step(*samples(self.number, int(self.round[0]) * INNER + step))
            moved = self.weights - self.learner.get()
            if self.round[0] == 0:  # for comparison only
                self.plain = comm.all_reduce(moved.copy(), op=ReduceOp.AVG).tx_bytes
            # Both are in flight at once, and retried if someone dies: the wish to stop is exact, the average is not.
            wish = np.array([float(self.enough)])
            stopping = comm.all_reduce_async(wish, op=ReduceOp.MAX, tag=1, retry=True)
            info = comm.all_reduce(moved, op=ReduceOp.AVG, quantization_options=BYTES)
            stopping.result()
            self.momentum *= OUTER_MOMENTUM
            self.momentum += moved
            self.weights -= OUTER_RATE * (moved + OUTER_MOMENTUM * self.momentum)
            number = int(self.round[0])
            self.round += 1
            self.rounds.append(Round(number, info.world_size, info.tx_bytes, received, digest(self.weights)))
            if wish[0]:
                return

    def _run(self) -> None:
        try:
            # The group forms as soon as all four are there; fewer would wait for the others.
            settings = Settings.from_env(last_call_s=PATIENCE_S)
            with Communicator("diloco", expected_world_size=ACTORS, settings=settings) as comm:
                self._train(comm)
        except BaseException as error:
            self.error = f"{type(error).__name__}: {error}"

    def in_float32(self) -> int:
        """The bytes that an average of all four in float32 took."""
        return self.plain

    def train(self) -> None:
        """Begins."""
        self.thread.start()

    def look(self) -> tuple[list[Round], str]:
        """All rounds so far, and what went wrong."""
        return self.rounds, self.error

    def finish(self) -> Any:
        """Has all stop after a round that they agree on: the weights."""
        self.enough = True
        self.thread.join(PATIENCE_S)
        return self.weights

    def pid(self) -> int:
        """Its process."""
        return os.getpid()


# ------------------------------------------------------------------------------------------------------ the driver


class Run:
    """What the driver knows of the training."""

    def __init__(self, library: str) -> None:
        self.library = library
        self.actors = {number: Island.remote(number, library) for number in range(ACTORS)}
        self.late = Island.remote(ACTORS, library)
        self.seen: dict[int, list[Round]] = {}

    def until(self, what: str, done: Callable[[], bool]) -> None:
        """Waits for the training to come so far."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {what}"
            time.sleep(0.02)
            self.look()

    def look(self) -> None:
        """Asks all living actors how far they are."""
        for number, actor in self.actors.items():
            self.seen[number], error = ray.get(actor.look.remote(), timeout=PATIENCE_S)
            assert not error, f"actor {number}: {error}"

    def reach(self, number: int) -> None:
        """Waits until all living actors have made a round."""
        self.until(f"round {number}", lambda: all(self.last(actor) >= number for actor in self.actors))

    def last(self, number: int) -> int:
        """The last round of an actor."""
        rounds = self.seen.get(number)
        return rounds[-1].number if rounds else -1

    def train(self, rounds: int) -> Any:
        """All of it: the weights that everyone holds in the end."""
        pids = ray.get([actor.pid.remote() for actor in [*self.actors.values(), self.late]])
        ray.get([actor.train.remote() for actor in self.actors.values()])
        self.reach(rounds // 3)
        victim = ACTORS - 1
        del self.actors[victim]
        os.kill(pids[victim], signal.SIGKILL)
        self.until("they go on", lambda: self.seen[0][-1].contributors == ACTORS - 1)
        lost = next(r.number for r in self.seen[0] if r.contributors == ACTORS - 1)
        print(f"one of {ACTORS} was killed while it trained: from round {lost} on, {ACTORS - 1} average", flush=True)
        self.reach(lost + rounds // 6)
        self.actors[ACTORS] = self.late
        ray.get(self.late.train.remote())
        self.until("one has joined", lambda: self.last(ACTORS) >= 0)
        joined = self.seen[ACTORS][0]
        assert joined.received > 0, "it had nothing, and was given nothing"
        print(f"one joined in round {joined.number}, and was given {joined.received} bytes of state", flush=True)
        self.reach(max(rounds, joined.number + rounds // 3))
        ends = ray.get([actor.finish.remote() for actor in self.actors.values()], timeout=PATIENCE_S)
        self.look()
        assert len({digest(weights) for weights in ends}) == 1, "the actors hold different weights"
        return ends[0]

    def check(self) -> None:
        """After each round all held the same bits, and only who came late was ever given any state."""
        bits: dict[int, str] = {}
        for number, rounds in self.seen.items():
            for place, seen in enumerate(rounds):
                assert bits.setdefault(seen.number, seen.bits) == seen.bits, f"round {seen.number} has two results"
                assert seen.received == 0 or (number, place) == (ACTORS, 0), f"actor {number} went apart"
        print(f"{len(bits)} rounds of {INNER} steps: the same bits on all actors after each")


def synchronous(library: str, count: int) -> Any:
    """The baseline: the same model and inner optimiser, one step for every average over all actors."""
    learner = LEARNERS[library]()
    for step in range(count // (ACTORS * BATCH)):
        parts = [samples(number, step) for number in range(ACTORS)]
        points, labels = (np.concatenate(column) for column in zip(*parts, strict=True))
        learner.step(points, labels)  # the gradient of all four batches is the average of theirs
    return learner


def main() -> None:
    """Raises if anything that it claims did not hold."""
    parser = argparse.ArgumentParser(description="DiLoCo on actors that come and go.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    default = "torch" if importlib.util.find_spec("torch") else "numpy"
    parser.add_argument("--library", choices=LEARNERS, default=default, help="what trains (default: %(default)s)")
    arguments = parser.parse_args()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        ray_pccl.start_master()
        run = Run(arguments.library)
        weights = run.train(rounds=30 if arguments.quick else 90)
        plain = ray.get(run.actors[0].in_float32.remote())
        ray_pccl.stop_master()
    finally:
        ray.shutdown()
    run.check()
    history = run.seen[0]
    count = sum(seen.contributors for seen in history) * INNER * BATCH
    learner = LEARNERS[arguments.library]()
    before = learner.loss(*unseen())
    learner.set(weights)
    after = learner.loss(*unseen())
    baseline = synchronous(arguments.library, count).loss(*unseen())
    print(f"the loss on unseen data fell from {before:.3f} to {after:.3f}: {count} samples, {len(history)} averages")
    print(f"synchronous training comes to {baseline:.3f}: {count} samples, {count // (ACTORS * BATCH)} averages")
    assert after < WORSE * baseline, f"{after} is more than {WORSE} times {baseline}"
    small = next(seen.sent for seen in history if seen.contributors == ACTORS)
    print(
        f"an actor sent {small} bytes for an average in 8 bits, {plain} in float32: {plain / small:.1f} times as many,"
    )
    print(f"and {INNER * plain / small:.0f} times as many if it averaged after every step")
    assert plain > 3.5 * small


if __name__ == "__main__":
    main()
