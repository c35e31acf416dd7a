"""What is checked of a call's arguments before anyone else is bothered, with the exceptions that Ray has for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import ray

from ray_pccl.util.collective import types
from ray_pccl.util.collective.groups import Group


def inside_actor() -> None:
    """`RuntimeError` in a driver."""
    if ray._private.worker.global_worker.mode != ray.WORKER_MODE:
        raise RuntimeError("The collective APIs shall be only used inside a Ray actor or task.")


def single_tensor(tensor: Any) -> None:
    """`RuntimeError` for what is no tensor."""
    known = isinstance(tensor, np.ndarray)
    known = known or (types.torch_available() and isinstance(tensor, types.th.Tensor))
    known = known or (types.cupy_available() and isinstance(tensor, types.cp.ndarray))
    if not known:
        raise RuntimeError(
            f"Unrecognized tensor type '{type(tensor)}'. Supported types are: np.ndarray, torch.Tensor, cupy.ndarray."
        )


def tensor_list(tensors: Any) -> None:
    """`RuntimeError` for what is no list of at least one tensor."""
    if not isinstance(tensors, list):
        raise RuntimeError(f"The input must be a list of tensors. Got '{type(tensors)}'.")
    if not tensors:
        raise RuntimeError("Got an empty list of tensors.")
    for tensor in tensors:
        single_tensor(tensor)


def tensor_lists(lists: Any) -> None:
    """`RuntimeError` for what is no list of at least one list of tensors."""
    if not isinstance(lists, list):
        raise RuntimeError(f"The input must be a list of lists of tensors. Got '{type(lists)}'.")
    if not lists:
        raise RuntimeError(f"Did not receive tensors. Got: {lists}")
    for tensors in lists:
        tensor_list(tensors)


def rank_of(group: Group, rank: int) -> None:
    """`ValueError` for a rank that the group has not."""
    if rank < 0:
        raise ValueError(f"rank '{rank}' is negative.")
    if rank >= group.world_size:
        raise ValueError(f"rank '{rank}' must be less than world size '{group.world_size}'")


def other_rank_of(group: Group, rank: int) -> None:
    """`ValueError` for a rank that the group has not, `RuntimeError` for one's own."""
    rank_of(group, rank)
    if rank == group.rank:
        raise RuntimeError(f"The rank '{rank}' is self: a process has nothing to send to itself.")


def root_tensor(length: int, place: int) -> None:
    """`ValueError` for a place that a list of tensors has not."""
    if place < 0:
        raise ValueError(f"root_tensor '{place}' is negative.")
    if place >= length:
        raise ValueError(f"root_tensor '{place}' is greater than the number of GPUs: '{length}'")


def element_count(count: int) -> None:
    """`RuntimeError` for a negative number of elements."""
    if count < 0:
        raise RuntimeError(f"The n_elements '{count}' should be >= 0.")


def membership(ranks: list[int], actors: list[Any], world_size: int) -> None:
    """`RuntimeError` for a declaration that makes no sense."""
    if len(ranks) != len(actors):
        raise RuntimeError(
            f"Each actor should correspond to one rank. Got '{len(ranks)}' ranks but '{len(actors)}' actors"
        )
    if sorted(ranks) != list(range(len(ranks))):
        raise RuntimeError(f"Ranks must be a permutation from 0 to '{len(ranks)}'. Got '{ranks}'.")
    if world_size <= 0:
        raise RuntimeError(f"World size must be greater than zero. Got '{world_size}'.")
    if len(ranks) > world_size:
        raise RuntimeError(f"Ranks cannot be greater than world_size. Got '{ranks}', and world_size={world_size}.")
