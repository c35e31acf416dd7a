"""What the tests of DiLoCo have peers do, in the peers' own processes."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import xxhash

from ray_pccl import Communicator
from ray_pccl.torch import DiLoCo, OuterInfo


@dataclass
class Course:
    """A training with DiLoCo that runs, as the test sees it."""

    seen: list[tuple[OuterInfo, str]] = field(default_factory=list)
    """Every outer step, and a digest of what all hold alike after it."""
    goal: int = 1 << 60
    joined_at: int = -1
    joined_bits: str = ""
    model_bits: str = ""
    """Of the model, in the end."""
    error: str = ""
    thread: threading.Thread | None = None


_now = Course()


def bits(diloco: DiLoCo) -> str:
    """A digest of what all members hold alike."""
    digest = xxhash.xxh3_128(str(diloco.steps).encode())
    state = diloco.outer_optimizer.state
    for flat in diloco.outer:
        digest.update(flat.detach().numpy().tobytes())
        momentum = state[flat].get("momentum_buffer") if flat in state else None
        digest.update(b"" if momentum is None else momentum.numpy().tobytes())
    return digest.hexdigest()


def begin(comm: Communicator, seed: int, arguments: dict[str, Any]) -> None:
    """Trains in a thread, on data of its own."""
    torch.set_num_threads(1)
    _now.thread = threading.Thread(target=_run, args=(comm, seed, arguments), daemon=True)
    _now.thread.start()


def make(comm: Communicator, seed: int, arguments: dict[str, Any]) -> DiLoCo:
    torch.manual_seed(seed)
    layers = torch.nn.Linear(4, 24), torch.nn.BatchNorm1d(24), torch.nn.Tanh(), torch.nn.Linear(24, 1)
    model = torch.nn.Sequential(*layers)
    return DiLoCo(comm, model, torch.optim.AdamW(model.parameters(), lr=1e-2), **arguments)


def backward(diloco: DiLoCo, generator: torch.Generator) -> None:
    points = torch.rand(16, 4, generator=generator)
    (diloco.model(points) - points.sum(1, keepdim=True)).square().mean().backward()


def _run(comm: Communicator, seed: int, arguments: dict[str, Any]) -> None:
    try:
        generator = torch.Generator().manual_seed(seed)
        diloco = make(comm, seed, arguments)
        diloco.join()
        _now.joined_at, _now.joined_bits = diloco.steps, bits(diloco)
        while diloco.steps < _now.goal:
            backward(diloco, generator)
            info = diloco.step()
            if info is not None:
                _now.seen.append((replace(info, tx_bytes=0), bits(diloco)))
        diloco.finish()
        flat = torch.cat([parameter.detach().flatten() for parameter in diloco.model.parameters()])
        _now.model_bits = xxhash.xxh3_128(flat.numpy().tobytes()).hexdigest()
    except Exception as error:
        _now.error = f"{type(error).__name__}: {error}"


def look(comm: Communicator) -> tuple[int, int]:
    """The outer step at which it joined, -1 before, and that which it is at."""
    return _now.joined_at, _now.seen[-1][0].step if _now.seen else _now.joined_at


def set_goal(comm: Communicator, goal: int) -> None:
    _now.goal = goal


def finish(comm: Communicator) -> Course:
    """What the training was like, once it has ended."""
    _now.thread.join(50)
    assert not _now.thread.is_alive(), f"it is still at outer step {len(_now.seen)}"
    return replace(_now, thread=None)
