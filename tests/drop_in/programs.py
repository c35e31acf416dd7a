"""What each rank does in the tests of operations: makes tensors, calls one function, and says what became of them."""

from __future__ import annotations

import itertools
import threading
import warnings
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import ray_pccl.util.collective as col
from ray_pccl.util.collective import types
from ray_pccl.util.collective.types import ReduceOp
from tests.drop_in.workers import TYPES, refused, tensor, values
from tests.ring.test_tensors import DeviceArray

OPS = {"SUM": sum, "PRODUCT": lambda v: int(np.prod(v)), "MIN": min, "MAX": max, "AVG": lambda v: sum(v) / len(v)}
"""What is due of the ranks' values."""


def own(library: str, rank: int) -> str:
    """The library of a rank's tensors."""
    return ("numpy", "torch")[rank % 2] if library == "mixed" else library


def reduced(rank: int, name: str, library: str, op: Any = ReduceOp.SUM, root: int | None = None) -> dict[str, Any]:
    """What a tensor of each type, of rank plus one, holds after `allreduce`, or after `reduce` to a root."""
    found = {}
    for dtype in TYPES[library]:
        if op.name == "AVG" and "int" in dtype:
            continue
        given = tensor(own(library, rank), dtype, rank + 1)
        if root is None:
            col.allreduce(given, name, op)
        else:
            col.reduce(given, root, name, op)
        found[dtype] = values(given)
    return found


def broadcast(rank: int, name: str, library: str, root: int) -> dict[str, Any]:
    found = {}
    for dtype in TYPES[library]:
        given = tensor(own(library, rank), dtype, rank + 1)
        col.broadcast(given, root, name)
        found[dtype] = values(given)
    return found


def gathered(rank: int, size: int, name: str, inputs: str, outputs: list[str]) -> dict[str, Any]:
    """What is in each place of the list, into which tensors of different libraries may be gathered."""
    found = {}
    for dtype in TYPES["torch"]:
        given = tensor(inputs, dtype, rank + 1, (2, 3))
        places = [tensor(outputs[place % len(outputs)], dtype, 0, (2, 3)) for place in range(size)]
        col.allgather(places, given, name)
        found[dtype] = [values(place) for place in places]
        assert values(given) == {rank + 1}
    return found


def scattered(rank: int, size: int, name: str, inputs: list[str], output: str, op: Any) -> dict[str, Any]:
    """What this rank's part is; the tensor for a place is rank plus one plus four times the place."""
    found = {}
    for dtype in TYPES["torch"]:
        if op.name == "AVG" and "int" in dtype:
            continue
        given = [tensor(inputs[p % len(inputs)], dtype, rank + 1 + 4 * p, (2, 3)) for p in range(size)]
        mine = tensor(output, dtype, 0, (2, 3))
        col.reducescatter(mine, given, name, op)
        found[dtype] = values(mine)
        assert [values(one) for one in given] == [{rank + 1 + 4 * p} for p in range(size)], "inputs stay as they were"
    return found


def into_an_input(rank: int, name: str) -> tuple[Any, Any]:
    """A reducescatter whose output is one of its inputs."""
    given = [np.full(3, rank + 1.0), np.full(3, 10.0 * (rank + 1))]
    col.reducescatter(given[rank], given, name)
    return values(given[rank]), values(given[1 - rank])


def passed_on(rank: int, name: str, library: str, route: list[int]) -> dict[str, Any]:
    """What a rank holds after a tensor went from the first rank of the route to each of the others in turn."""
    found = {}
    for dtype in TYPES[library]:
        given = tensor(own(library, rank), dtype, rank + 1)
        for source, dest in itertools.pairwise(route):
            if rank == source:
                col.send(given, dest, name)
            elif rank == dest:
                col.recv(given, source, name)
        found[dtype] = values(given)
    return found


def crossed(rank: int, first: str, second: str) -> list[Any]:
    """Two messages from one actor to another over two groups, received in the other order than they are sent in.

    In the second group the two actors have each other's rank.
    """
    held = [np.zeros(2), np.zeros(2)]
    if rank == 0:
        sending = threading.Thread(target=col.send, args=(np.full(2, 5.0), 1, first))
        sending.start()
        col.send(np.full(2, 7.0), 0, second)
        sending.join()
    else:
        col.recv(held[1], 1, second)
        col.recv(held[0], 0, first)
    return [values(one) for one in held]


def of_one_list(rank: int, size: int, name: str) -> dict[str, Any]:
    """All functions for several GPUs, with lists of one tensor."""
    found = {}
    found["allreduce"] = [np.full(3, rank + 1.0)]
    col.allreduce_multigpu(found["allreduce"], name, ReduceOp.MAX)
    found["reduce"] = [torch.full((3,), rank + 1.0)]
    col.reduce_multigpu(found["reduce"], 1, 0, name)
    found["broadcast"] = [np.full(3, rank + 1.0)]
    col.broadcast_multigpu(found["broadcast"], 1, 0, name)
    found["allgather"] = [np.zeros(3) for _ in range(size)]
    col.allgather_multigpu([found["allgather"]], [np.full(3, rank + 1.0)], name)
    found["reducescatter"] = [np.zeros(3)]
    col.reducescatter_multigpu(found["reducescatter"], [[np.full(3, 10.0 * p) for p in range(size)]], name)
    found["part"] = [np.full((2, 2), rank + 1.0)]
    if rank == 0:
        col.send_multigpu(found["part"][0], 1, 0, name, n_elements=3)
    else:
        col.recv_multigpu(found["part"][0], 0, 0, name, n_elements=3)
    return {what: [sorted(values(one)) for one in tensors] for what, tensors in found.items()}


def in_given(rank: int, name: str, given: Any) -> tuple[bool, Any, list[str]]:
    """Whether what Ray handed to the actor could be written, what is in it after an `allreduce`, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        col.allreduce(given, name)
    return given.flags.writeable, values(given), [str(warning.message) for warning in caught]


def on_devices(rank: int, name: str) -> dict[str, Any]:
    """Operations on arrays that nothing but `get()` and `set()` reaches, as those of CuPy."""

    def array(value: float) -> DeviceArray:
        return DeviceArray(np.full(3, value))

    found: dict[str, list[DeviceArray]] = {"allreduce": [array(rank + 1)], "allgather": [array(0), array(0)]}
    found |= {"reducescatter": [array(0)], "send and recv": [array(rank + 1)]}
    cupy = SimpleNamespace(ndarray=DeviceArray)
    with patch.object(types, "cupy_available", lambda: True), patch.object(types, "cp", cupy, create=True):
        col.allreduce(*found["allreduce"], name)
        col.allgather(found["allgather"], array(rank + 1), name)
        col.reducescatter(*found["reducescatter"], [array(0), array(10)], name)
        (col.send if rank == 0 else col.recv)(*found["send and recv"], 1 - rank, name)
    refused(RuntimeError, col.allreduce, array(1), name, text="Unrecognized tensor type")
    return {what: [values(one.get()) for one in arrays] for what, arrays in found.items()}


def odd_shapes(rank: int, name: str) -> list[Any]:
    """Tensors of no elements, of no dimensions, not contiguous, large, and a parameter that requires grad."""
    strided = np.zeros((4, 6), np.float32)
    strided[:, ::2] = rank + 1
    parameter = torch.nn.Parameter(torch.full((3,), rank + 1.0))
    tensors = [np.zeros(0), np.array(rank + 1.0), strided[:, ::2], np.full(1 << 20, rank + 1.0), parameter]
    for one in tensors:
        col.allreduce(one, name)
    places = [np.ones((2, 0)), np.ones((2, 0))]
    col.allgather(places, np.ones((2, 0)), name)
    return [values(one.detach() if one is parameter else one) for one in tensors] + [values(strided[:, 1::2])]
