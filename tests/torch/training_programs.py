"""What these tests have peers do, in the peers' own processes."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from ray_pccl import Communicator, PeerEvictedError
from ray_pccl.ring import fault_points
from ray_pccl.torch import ElasticSampler, ElasticTrainer, StepInfo
from ray_pccl.torch.state_trees import dismantle

SAMPLES, BATCH = 96, 4


@dataclass(frozen=True)
class Seen:
    """What a peer saw of a step."""

    info: StepInfo
    bits: str
    """A digest of everything that is shared, after the step."""
    positions: dict[str, tuple[int, ...]]
    """Which samples were used, by whom."""


@dataclass
class Training:
    """A training that runs, as the test sees it."""

    seen: list[Seen] = field(default_factory=list)
    error: str = ""
    goal: int = 1 << 60
    joined_at: int = -1
    joined_bits: str = ""
    rejoined_at: list[int] = field(default_factory=list)
    thread: threading.Thread | None = None


class RecordingSampler(ElasticSampler):
    """Remembers which positions a commit counted."""

    positions: dict[str, tuple[int, ...]]

    def commit(self, contributors: Any) -> None:
        self.positions = {peer: self.assigned(peer) for peer in contributors}
        super().commit(contributors)


_now = Training()


def bits(trainer: ElasticTrainer) -> str:
    """A digest of a trainer's whole state."""
    skeleton, tensors = dismantle(trainer.state_dict())
    digest = xxhash.xxh3_128(skeleton)
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


class Net(torch.nn.Module):
    """Parameters of two types, so that a step has two reductions, and a batch norm, whose buffers are a third."""

    def __init__(self) -> None:
        super().__init__()
        layers = torch.nn.Linear(3, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
        self.layers = torch.nn.Sequential(*layers)
        self.scale = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return self.layers(points) * self.scale.float()


def make(comm: Communicator, seed: int, **more: Any) -> ElasticTrainer:
    """A trainer with weights of its own, an optimiser with state, a scheduler and a sampler."""
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    return ElasticTrainer(comm, model, optimizer, scheduler, RecordingSampler(SAMPLES, BATCH, seed=7), **more)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    points = torch.rand(SAMPLES, 3, generator=torch.Generator().manual_seed(1))
    return points, points.prod(1, keepdim=True)


def backward(trainer: ElasticTrainer) -> torch.Tensor:
    points, targets = data()
    indices = trainer.sampler.next_batch()
    loss = (trainer.model(points[indices]) - targets[indices]).square().mean()
    loss.backward()
    return loss


def begin(comm: Communicator, seed: int, goal: int = 1 << 60) -> None:
    """Trains in a thread, to a number of steps."""
    torch.set_num_threads(1)
    _now.goal = goal
    _now.thread = threading.Thread(target=_run, args=(comm, seed), daemon=True)
    _now.thread.start()


def _run(comm: Communicator, seed: int) -> None:
    try:
        trainer = make(comm, seed)
        trainer.join()
        _now.joined_at, _now.joined_bits = trainer.steps, bits(trainer)
        while trainer.steps < _now.goal:
            try:
                loss = backward(trainer)
                info = trainer.step(loss)
            except PeerEvictedError:
                comm.connect()
                trainer.join()
                _now.rejoined_at.append(trainer.steps)
                continue
            _now.seen.append(Seen(info, bits(trainer), trainer.sampler.positions))
    except Exception as error:
        _now.error = f"{type(error).__name__}: {error}"


def look(comm: Communicator) -> tuple[int, int]:
    """The step at which it joined, -1 before, and that which it is at."""
    return _now.joined_at, _now.seen[-1].info.step if _now.seen else _now.joined_at


def rejoins(comm: Communicator) -> int:
    """How often it was healed after an eviction."""
    return len(_now.rejoined_at)


def prepare(comm: Communicator) -> None:
    """Has a peer import all that it will need."""


def set_goal(comm: Communicator, goal: int) -> None:
    _now.goal = goal


def finish(comm: Communicator) -> Training:
    """What the training was like, once it has ended."""
    _now.thread.join(50)
    assert not _now.thread.is_alive(), f"it is still at step {len(_now.seen)}"
    return dataclasses.replace(_now, thread=None)


def strike(comm: Communicator, point: str, nth: int) -> None:
    """Has this peer kill itself at the n-th time that it comes to a point."""
    left = [nth]

    def reached(name: str) -> None:
        if name == point:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    fault_points.install(reached)
