"""One process of a backend of torch.distributed: sums tensors, and trains with DDP. `torch_step.py` has it started.

python torch_worker.py BACKEND SOCKET PEERS FOLDER RANK
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from work import Training, Work
from worker import LIBRARIES, Commands, Library, obey

from ray_pccl.torch import average_hook

RATE = 1e-4


class TorchCommands(Commands):
    """What the benchmark may have a process do: sums as ever, and trainings."""

    def __init__(self, library: Library) -> None:
        super().__init__(library)
        self._trainings: dict[Training, Trainee] = {}

    def hold(self, work: Work | Training) -> None:
        """Makes the tensors, or the model."""
        if isinstance(work, Work):
            super().hold(work)
        else:
            self._trainings[work] = Trainee(work, self._library.rank)

    def check(self, work: Work | Training) -> None:
        """Runs it once, and looks at every element of what came of it."""
        if isinstance(work, Work):
            super().check(work)
        else:
            self._trainings[work].check(self._library.size)

    def step(self, work: Work | Training) -> Callable[[], Any]:
        """One iteration."""
        return super().step(work) if isinstance(work, Work) else self._trainings[work].step

    def drop(self, work: Work | Training) -> None:
        """Lets go of them."""
        if isinstance(work, Work):
            super().drop(work)
        else:
            del self._trainings[work]


class Trainee:
    """A model in DDP. All ranks begin with the same weights, and have inputs of their own."""

    def __init__(self, work: Training, rank: int) -> None:
        self._work, self._rank = work, rank
        torch.manual_seed(7)
        layers: list[nn.Module] = []
        for _ in range(work.layers):
            layers += [nn.Linear(work.width, work.width), nn.ReLU()]
        self._ddp = DistributedDataParallel(nn.Sequential(*layers[:-1]), gradient_as_bucket_view=work.bucket_view)
        if work.averaging and dist.get_backend() == "pccl":
            self._ddp.register_comm_hook(None, average_hook)
        self._optimizer = torch.optim.SGD(self._ddp.parameters(), lr=RATE)
        self._input = self._input_of(rank)

    def _input_of(self, rank: int) -> torch.Tensor:
        return torch.randn(self._work.batch, self._work.width, generator=torch.Generator().manual_seed(rank))

    def step(self) -> None:
        """Forward, backward with the average over all ranks, and the optimiser's step."""
        self._optimizer.zero_grad(set_to_none=True)
        _loss(self._ddp, self._input).backward()
        self._optimizer.step()

    def check(self, size: int) -> None:
        """The gradients of a backward pass are the mean of those that each rank's input gives in one process."""
        self._optimizer.zero_grad(set_to_none=True)
        _loss(self._ddp, self._input).backward()
        parameters = list(self._ddp.parameters())
        averaged = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
        losses = [_loss(self._ddp.module, self._input_of(rank)) for rank in range(size)]
        expected = torch.autograd.grad(torch.stack(losses).mean(), parameters)
        for number, (found, due) in enumerate(zip(averaged, expected, strict=True)):
            torch.testing.assert_close(found, due, msg=lambda text, number=number: f"parameter {number}: {text}")


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def main() -> None:
    """A worker's life."""
    kind, address, *arguments = sys.argv[1:]
    torch.set_num_threads(1)

    def begin() -> tuple[int, str, Commands, Callable[[], object]]:
        library = LIBRARIES[kind](*arguments)
        return library.rank, library.version, TorchCommands(library), library.end

    obey(address, begin)


if __name__ == "__main__":
    main()
