"""Actors that use the drop-in as users do, and what the tests of this directory have them do."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import ray
import torch

import ray_pccl.util.collective as col

GET_TIMEOUT_S = 60.0
NOTICED = ("its process is exiting", "its connection to the master closed", "it is gone")
"""Whichever of them is first: the sentinel's word, the end of its connection, the epoch that began without it."""
NUMPY_TYPES = {
    **{name: np.dtype(name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")},
    **{name: np.dtype(name) for name in ("float16", "float32", "float64")},
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
TORCH_TYPES = {
    name: getattr(torch, name)
    for name in ("int8", "int16", "int32", "int64", "uint8", "float16", "bfloat16", "float32", "float64")
}
TYPES = {"numpy": NUMPY_TYPES, "torch": TORCH_TYPES, "mixed": TORCH_TYPES}
"""Of each library; mixed: even ranks have numpy arrays, odd ones torch tensors."""


class Worker:
    """Runs functions; several threads, so that it can be asked while it is blocked."""

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def pid(self) -> int:
        return os.getpid()


WorkerActor: Any = ray.remote(num_cpus=0, max_concurrency=4)(Worker)


def start(count: int) -> list[Any]:
    """That many actors, in no group."""
    workers = [WorkerActor.remote() for _ in range(count)]
    ray.get([worker.pid.remote() for worker in workers], timeout=GET_TIMEOUT_S)
    return workers


def get(reference: Any) -> Any:
    return ray.get(reference, timeout=GET_TIMEOUT_S)


def on(worker: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the function returns in one actor."""
    return get(worker.run.remote(function, *args, **kwargs))


def on_all(workers: Sequence[Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """What the function, given the place of its actor in the list first, returns in each of them."""
    started = [worker.run.remote(function, rank, *args, **kwargs) for rank, worker in enumerate(workers)]
    values: list[Any] = get(started)
    return values


def initialise(rank: int, world_size: int, name: str, backend: str = "gloo", **more: Any) -> None:
    col.init_collective_group(world_size, rank, backend, name, **more)


def destroy(name: str) -> None:
    col.destroy_collective_group(name)


@contextlib.contextmanager
def group_of(workers: Sequence[Any], name: str, **more: Any) -> Iterator[Sequence[Any]]:
    """Has the actors be a group, each with its place as its rank."""
    on_all(workers, initialise, len(workers), name, **more)
    try:
        yield workers
    finally:
        get([worker.run.remote(destroy, name) for worker in workers])


def tensor(library: str, dtype: str, value: float, shape: Any = 5) -> Any:
    """A tensor of the library with the same value everywhere."""
    if library == "torch":
        return torch.full([shape] if isinstance(shape, int) else list(shape), value, dtype=TORCH_TYPES[dtype])
    return np.full(shape, value).astype(NUMPY_TYPES[dtype])


def values(of: Any) -> set[float]:
    """The different values in a tensor."""
    flat = of.double().numpy() if isinstance(of, torch.Tensor) else of.astype(np.float64)
    return set(flat.reshape(-1).tolist())


def refused(kind: type[BaseException], call: Callable[..., Any], *args: Any, text: str = "", **kwargs: Any) -> str:
    """What the error says that a call has to raise. For actors: a failure of `pytest.raises` is no `Exception`."""
    try:
        call(*args, **kwargs)
    except kind as error:
        assert text in str(error), f"{text!r} is not in {error!r}"
        return str(error)
    raise AssertionError(f"{call.__name__}{args} raised no {kind.__name__}")


def summed(rank: int, name: str, value: float = 1.0) -> float:
    """The sum over a group of each one's value times its place in the list plus one."""
    array = np.full(4, value * (rank + 1), np.float32)
    col.allreduce(array, name)
    [total] = values(array)
    return total


def rank_and_size(name: str) -> tuple[int, int]:
    return col.get_rank(name), col.get_collective_group_size(name)


def is_initialised(name: str) -> bool:
    return col.is_group_initialized(name)
