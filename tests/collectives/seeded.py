"""Programs around the functions of `seed`."""

from __future__ import annotations

import contextlib
import io

import torch

from ray_pccl import Communicator, DataType, ReduceDescriptor, ReduceOp, ReduceOpDescriptor, ReduceOperandDescriptor
from tests.collectives import seed

SIZES = (1, 1000, 20_000, 70_000, 300_000)


def _tensors(comm: Communicator, number: int) -> list[torch.Tensor]:
    return [torch.full((SIZES[index % 5],), float(comm.rank + 1 + index)) for index in range(number)]


def _wrong(comm: Communicator, tensors: list[torch.Tensor], average: bool) -> list[str]:
    size = comm.world_size
    found = []
    for index, tensor in enumerate(tensors):
        expected = sum(rank + 1 + index for rank in range(size)) / (size if average else 1)
        if not torch.equal(tensor, torch.full_like(tensor, expected)):
            found.append(f"tensor {index} is {tensor[:3]}, not {expected}")
    return found


def recommended(comm: Communicator, number: int, max_in_flight: int) -> list[str]:
    tensors = _tensors(comm, number)
    ok, tx_bytes, rx_bytes = seed.all_reduce_multiple_with_retry(comm, tensors, ReduceOp.SUM, max_in_flight)
    moved = [] if ok and tx_bytes > 0 and rx_bytes > 0 else [f"it returned {ok, tx_bytes, rx_bytes}"]
    return moved + _wrong(comm, tensors, average=False)


def manual(comm: Communicator, number: int, max_in_flight: int) -> list[str]:
    tensors = _tensors(comm, number)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        ok = seed.all_reduce_multiple_with_retry__equivalent(comm, tensors, ReduceOp.AVG, max_in_flight)
    told = [] if ok and "Reduce completed" in said.getvalue() else [f"it returned {ok} and said {said.getvalue()}"]
    return told + _wrong(comm, tensors, average=True)


def alone(comm: Communicator) -> tuple[object, object]:
    with contextlib.redirect_stdout(io.StringIO()):
        return (
            seed.all_reduce_multiple_with_retry(comm, [torch.ones(3)], ReduceOp.SUM),
            seed.all_reduce_multiple_with_retry__equivalent(comm, [torch.ones(3)], ReduceOp.SUM),
        )


def loses_a_peer(comm: Communicator, by_hand: bool, value: float, number: int) -> tuple[bool, list[float]]:
    """Whether it succeeded, and each tensor's value."""
    tensors = [torch.full((SIZES[index % 5],), value) for index in range(number)]
    with contextlib.redirect_stdout(io.StringIO()):
        if by_hand:
            ok = seed.all_reduce_multiple_with_retry__equivalent(comm, tensors, ReduceOp.SUM)
        else:
            ok = seed.all_reduce_multiple_with_retry(comm, tensors, ReduceOp.SUM)[0]
    assert all((tensor == tensor[0]).all() for tensor in tensors)
    return ok, [float(tensor[0]) for tensor in tensors]


def numpy_descriptors(comm: Communicator, number: int, max_in_flight: int) -> list[str]:
    """Out of place, of numpy arrays; the info sums up."""
    import numpy as np

    descriptors = []
    for tag in range(number):
        send = np.full(1000, comm.rank + tag, np.float32)
        what = ReduceDescriptor(1000, ReduceOp.MAX, tag, ReduceOperandDescriptor(DataType.FLOAT))
        descriptors.append(ReduceOpDescriptor.from_numpy(send, np.zeros_like(send), what))
    info = comm.all_reduce_multiple_with_retry(iter(descriptors), max_in_flight=max_in_flight)
    last = comm.world_size - 1
    found = [f"tag {tag}" for tag, one in enumerate(descriptors) if not (one.recv == last + tag).all()]
    found += [f"input {tag}" for tag, one in enumerate(descriptors) if not (one.send == comm.rank + tag).all()]
    if (info.world_size, tuple(info.contributors)) != (comm.world_size, comm.members) or info.tx_bytes < 4000 * number:
        found.append(f"info {info}")
    return found
