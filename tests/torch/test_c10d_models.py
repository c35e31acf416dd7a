"""What trains on process groups, on ours: DDP, FSDP2 and DTensor against one process that sees all the data."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ray_pccl.torch
from tests.torch.zygote import Zygote

BATCH = 6
STEPS = 4


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 17), nn.Tanh(), nn.Linear(17, 3))


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 10, generator=generator), torch.randn(BATCH, 3, generator=generator)


def train(model: nn.Module, mine: Callable[[torch.Tensor], torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        inputs, targets = (mine(tensor) for tensor in data(step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def reference() -> dict[str, torch.Tensor]:
    model = network()
    train(model, lambda tensor: tensor)
    return model.state_dict()


def shard(rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
    size = dist.get_world_size()
    return lambda tensor: tensor.chunk(size)[rank]


def matches(found: dict[str, torch.Tensor]) -> None:
    for name, expected in reference().items():
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)


def train_ddp(rank: int, options: dict[str, Any], hook: bool) -> None:
    # Small buckets: several reductions of one backward are in flight at a time.
    model = DistributedDataParallel(network(), bucket_cap_mb=0.001, **options)
    if hook:
        model.register_comm_hook(None, ray_pccl.torch.average_hook)
    train(model, shard(rank))
    matches(model.module.state_dict())


@pytest.mark.parametrize("hook", [False, True], ids=["by torch", "average_hook"])
@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True, "static_graph": True}], ids=["plain", "views"]
)
def test_ddp_trains_like_one_process(zygote: Zygote, options: dict[str, Any], hook: bool) -> None:
    zygote.run(train_ddp, 3, options, hook)


def train_fsdp(rank: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, shard(rank))
    matches({name: value.full_tensor() for name, value in model.state_dict().items()})


@pytest.mark.parametrize("size", [2, 3])
def test_fsdp2_trains_like_one_process(zygote: Zygote, size: int) -> None:
    zygote.run(train_fsdp, size)


def use_dtensors(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    torch.manual_seed(3)
    first, second = torch.randn(8, 12), torch.randn(12, 4)
    left = distribute_tensor(first, mesh, [Shard(0), Shard(1)])
    right = distribute_tensor(second, mesh, [Replicate(), Shard(0)])
    product = left @ right
    assert isinstance(product, DTensor)
    torch.testing.assert_close(product.full_tensor(), first @ second)
    moved = product.redistribute(mesh, [Shard(1), Replicate()])
    torch.testing.assert_close(moved.full_tensor(), first @ second)
    torch.testing.assert_close(left.sum(dim=0).full_tensor(), first.sum(dim=0))
    assert dist.get_process_group_ranks(mesh.get_group("columns")) == ([0, 1] if rank < 2 else [2, 3])

    model, line = network(), mesh["columns"]
    plain = copy.deepcopy(model)
    parallelize_module(model, line, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    inputs, _ = data(0)
    torch.testing.assert_close(model(inputs), plain(inputs))


def test_dtensors_on_a_mesh_compute_what_plain_tensors_do(zygote: Zygote) -> None:
    zygote.run(use_dtensors, 4)


def functional(rank: int) -> None:
    from torch.distributed import _functional_collectives as functional_collectives

    size = dist.get_world_size()
    summed = functional_collectives.all_reduce(torch.full((3,), float(rank)), "sum", dist.group.WORLD)
    assert (summed + 0).tolist() == [float(sum(range(size)))] * 3
    gathered = functional_collectives.all_gather_tensor(torch.full((2,), float(rank)), 0, dist.group.WORLD)
    assert (gathered + 0).tolist() == [float(place) for place in range(size) for _ in range(2)]
    part = functional_collectives.reduce_scatter_tensor(torch.arange(2.0 * size), "sum", 0, dist.group.WORLD)
    assert (part + 0).tolist() == [size * 2.0 * rank, size * (2.0 * rank + 1)]
    mixed = functional_collectives.all_to_all_single(torch.full((size,), float(rank)), None, None, dist.group.WORLD)
    assert (mixed + 0).tolist() == [float(place) for place in range(size)]


def test_functional_collectives_work(zygote: Zygote) -> None:
    zygote.run(functional, 3)
