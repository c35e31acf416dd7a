"""What the demo trains, and how: a small network in numpy, and the loop of an actor in a group that changes.

`Trainer._train` is all that an elastic training loop needs. The network tells three spirals apart. Batch `step` of
actor `number` is always the same: so a run can be replayed in one process, from the list of who contributed to which
step alone. `replay` does that, and the demo compares.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import ray

from ray_pccl import Communicator, MembershipChange, MembershipEvent, ReduceOp, Settings, SharedState

ACTORS = 4
GROUP = "demo"
PATIENCE_S = 30.0
PAUSE_S = 0.015
"""After each step, so that a laptop has cores left for its user."""

Array = np.ndarray[Any, np.dtype[Any]]

CLASSES, HIDDEN, BATCH = 3, 64, 64
SHAPES = ((2, HIDDEN), (HIDDEN,), (HIDDEN, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,))
RATE, MOMENTUM = np.float32(0.015), np.float32(0.9)


def batch(number: int, step: int) -> tuple[Array, Array]:
    """The points that an actor trains on at a step, and the spiral each is of."""
    random = np.random.default_rng([number, step])
    labels = random.integers(CLASSES, size=BATCH)
    along = random.random(BATCH)
    angle = 2 * np.pi * labels / CLASSES + 6 * along + random.normal(scale=0.2, size=BATCH)
    points = (0.2 + 2 * along)[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return points.astype(np.float32), labels


class Model:
    """Two hidden layers, and SGD with momentum. All parameters lie in one array, and so do their gradients."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        layers = [random.normal(size=s) / np.sqrt(s[0]) if len(s) == 2 else np.zeros(s) for s in SHAPES]
        self.weights = np.concatenate([layer.ravel() for layer in layers]).astype(np.float32)
        self.velocity = np.zeros_like(self.weights)
        self.step = np.zeros(1, np.int64)

    def gradient(self, points: Array, labels: Array) -> tuple[float, Array]:
        """The mean loss of a batch (cross entropy), and its gradient."""
        w1, b1, w2, b2, w3, b3 = self._layers()
        first = np.tanh(points @ w1 + b1)
        second = np.tanh(first @ w2 + b2)
        scores = second @ w3 + b3
        chances = np.exp(scores - scores.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        picked = np.arange(len(labels)), labels
        loss = float(-np.log(chances[picked]).mean())
        chances[picked] -= 1
        d3 = chances / len(labels)
        d2 = (d3 @ w3.T) * (1 - second**2)
        d1 = (d2 @ w2.T) * (1 - first**2)
        parts = (points.T @ d1, d1.sum(0), first.T @ d2, d2.sum(0), second.T @ d3, d3.sum(0))
        return loss, np.concatenate([part.ravel() for part in parts])

    def apply(self, gradient: Array) -> None:
        """One step down."""
        self.velocity *= MOMENTUM
        self.velocity += gradient
        self.weights -= RATE * self.velocity
        self.step += 1

    def _layers(self) -> list[Array]:
        ends = np.cumsum([np.prod(shape) for shape in SHAPES])
        return [part.reshape(shape) for part, shape in zip(np.split(self.weights, ends[:-1]), SHAPES, strict=True)]


def digest(weights: Array) -> str:
    """The same for the same bits."""
    return hashlib.blake2b(weights, digest_size=16).hexdigest()


def replay(seed: int, contributors: Iterable[tuple[int, ...]]) -> tuple[Model, list[float]]:
    """The same training in one process: the model at the end, and the loss of each step."""
    model, losses = Model(seed), []
    for step, numbers in enumerate(contributors):
        parts = [model.gradient(*batch(number, step)) for number in numbers]
        losses.append(sum(loss for loss, _ in parts) / len(parts))
        model.apply(np.sum([gradient for _, gradient in parts], axis=0) / np.float32(len(parts)))
    return model, losses


# ---------------------------------------------------------------------------------------------------- an actor


class Step(NamedTuple):
    """What one actor saw of one step."""

    number: int
    at: float
    """When it held the average. All processes of a machine share this clock."""
    loss: float
    contributors: tuple[int, ...]
    epoch: int
    bits: str
    """A digest of its weights after the step."""


@ray.remote(num_cpus=0, max_concurrency=4)
class Trainer:
    """One actor. Its training runs in a thread, so that the driver can ask how far it is."""

    def __init__(self, number: int, seed: int) -> None:
        self.number = number
        self.model = Model(seed)
        # The group forms as soon as all four are there; two of them would wait for the others.
        settings = Settings.from_env(last_call_s=PATIENCE_S)
        self.comm = Communicator(
            GROUP, min_world_size=2, expected_world_size=ACTORS, label=f"{number}", settings=settings
        )
        self.comm.on_membership(self._note)
        self.events: list[tuple[float, MembershipEvent]] = []
        self.steps: list[Step] = []
        self.waiting: set[str | None] = set()
        self.asked = 0.0
        self.received = 0
        self.enough = False
        self.error = ""
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _note(self, event: MembershipEvent) -> None:
        """Called with every change of the group, from a thread of the communicator."""
        self.events.append((time.monotonic(), event))
        if event.change is MembershipChange.WAITING:
            self.waiting.add(event.peer_id)
        if event.change is MembershipChange.WITHDRAWN:
            self.waiting.discard(event.peer_id)
        self.waiting.difference_update(event.members)

    def _train(self, comm: Communicator) -> None:
        model = self.model
        state = SharedState({"weights": model.weights, "velocity": model.velocity, "step": model.step})
        someone_waits = True  # perhaps we are new ourselves
        while True:
            if someone_waits:
                comm.update_topology()  # admits who waits,
                state.revision += 1
                self.received += comm.sync_shared_state(state).rx_bytes  # who then gets what the others hold
            step = int(model.step[0])
            loss, gradient = model.gradient(*batch(self.number, step))
            # Whether someone waits, and whether it is enough, travels along: so all see the same, at the same step, and
            # nobody has to ask the master. That is why the training goes on while there is none.
            flags = [loss, len(self.waiting), self.enough]
            shared = np.concatenate([gradient, np.array(flags, np.float32)])
            info = comm.all_reduce(shared, op=ReduceOp.AVG)  # whoever dies in it: the survivors' average
            now = time.monotonic()
            *_, loss, someone_waits, enough = shared.tolist()
            model.apply(shared[: -len(flags)])
            who = tuple(sorted(int(peer_id.partition("-")[0]) for peer_id in info.contributors))
            self.steps.append(Step(step, now, loss, who, comm.epoch, digest(model.weights)))
            if enough:
                return
            time.sleep(PAUSE_S)

    def _run(self) -> None:
        try:
            self.asked = time.monotonic()
            self.comm.connect(timeout=PATIENCE_S)
            self._train(self.comm)
            self.comm.close()
        except BaseException as error:
            self.error = f"{type(error).__name__}: {error}"

    def pid(self) -> int:
        """Its process."""
        return os.getpid()

    def train(self) -> None:
        """Begins."""
        self.thread.start()

    def look(self, since: int) -> tuple[list[Step], str]:
        """The steps from a place in the list on, and what went wrong."""
        return self.steps[since:], self.error

    def tell(self) -> tuple[list[tuple[float, MembershipEvent]], float, int]:
        """All events, when it asked to join, and the bytes of state it received."""
        return self.events, self.asked, self.received

    def finish(self) -> Any:
        """Has all actors stop after a step that they agree on. The weights, when it has."""
        self.enough = True
        self.thread.join(PATIENCE_S)
        return self.model.weights
