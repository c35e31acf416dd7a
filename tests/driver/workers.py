"""Actors of users who know nothing of collectives but a decorator, and what tests have them do."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray

import ray_pccl
from ray_pccl.testing import eventually
from ray_pccl.testing.ownership import send_signal

GET_TIMEOUT_S = 60.0
"""For what takes a fraction of a second, on a machine that is busy."""


class Gate:
    """Holds whoever comes to it, in any process, until it is opened. Pickles."""

    def __init__(self, directory: Path) -> None:
        self._opened = directory / "opened"
        self._reached = directory / "reached"

    def hold(self, value: Any = None) -> Any:
        """Waits for the gate, and returns the value."""
        self._reached.touch()
        eventually(self._opened.exists, GET_TIMEOUT_S, "the gate is opened")
        return value

    async def hold_async(self, value: Any = None) -> Any:
        self._reached.touch()
        while not self._opened.exists():
            await asyncio.sleep(0.01)
        return value

    def await_reached(self) -> None:
        """Waits until someone is held."""
        eventually(self._reached.exists, GET_TIMEOUT_S, "someone comes to the gate")

    def open(self) -> None:
        self._opened.touch()


class Worker:
    """Runs functions. What `make` returns stays here, what `run` returns travels as usual."""

    @ray_pccl.collective
    def make(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def pid(self) -> int:
        return os.getpid()


class AsyncWorker:
    """The same, with an event loop."""

    @ray_pccl.collective
    async def make(self, function: Callable[..., Any], *args: Any) -> Any:
        await asyncio.sleep(0)
        return function(*args)

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        await asyncio.sleep(0)
        return function(*args)

    @ray_pccl.collective
    async def make_held(self, gate: Gate, function: Callable[..., Any], *args: Any) -> Any:
        await gate.hold_async()
        return function(*args)

    async def await_inside(self, refs: list[Any], function: Callable[..., Any]) -> Any:
        return function(await refs[0])

    async def pid(self) -> int:
        return os.getpid()


class GroupedWorker(Worker):
    """A worker with a concurrency group besides the default one."""

    @ray.method(concurrency_group="side")
    def run_aside(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


WorkerActor: Any = ray.remote(num_cpus=0)(Worker)
AsyncActor: Any = ray.remote(num_cpus=0)(AsyncWorker)
ThreadedActor: Any = ray.remote(num_cpus=0, max_concurrency=4)(Worker)
GroupedActor: Any = ray.remote(num_cpus=0, concurrency_groups={"side": 2})(GroupedWorker)


def start(count: int, actor_class: Any = WorkerActor, **options: Any) -> list[Any]:
    """That many actors, in no group."""
    actors = [actor_class.options(**options).remote() if options else actor_class.remote() for _ in range(count)]
    get([actor.pid.remote() for actor in actors])
    return actors


def end(actors: list[Any]) -> None:
    """Ends them. Their processes are gone when this returns."""
    for actor in actors:
        ray.kill(actor)


def get(reference: Any, timeout: float = GET_TIMEOUT_S) -> Any:
    return ray.get(reference, timeout=timeout)


def pid_of(actor: Any) -> int:
    pid: int = get(actor.pid.remote())
    return pid


def run_driver(script: str, *arguments: str) -> str:
    """What another driver of this Ray prints. It gets the address of the GCS as its first argument."""
    done = subprocess.run(
        [sys.executable, "-c", script, ray.get_runtime_context().gcs_address, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def published(name: str) -> int:
    """How many actors of a group other processes can find."""
    from ray_pccl.driver import seats
    from ray_pccl.driver.master import describe

    found = [status.entries for status in describe(None, seats.PREFIX) if status.group == name]
    return sum(key.startswith(seats.HANDLES) for entries in found for key in entries)


def is_watched(name: str) -> bool:
    """Whether this actor's death will be seen for certain. For actors of the group."""
    connection = ray_pccl.get_communicator(name)._connection
    return connection is not None and connection.wait_watched(GET_TIMEOUT_S)


def kill(actor: Any) -> int:
    """SIGKILL for an actor's process, which is gone when this returns. Its pid."""
    pid = pid_of(actor)
    send_signal(pid, signal.SIGKILL)
    return pid


def identity(value: Any) -> Any:
    return value


def fail(text: str) -> Any:
    raise ValueError(text)


def made(place: int, size: int = 4, dtype: Any = np.float64) -> Any:
    """An array that tells who made it."""
    return np.arange(size).astype(dtype) + dtype(place)


def address_of(value: Any) -> int:
    """Where a tensor lies."""
    address: int = value.ctypes.data if isinstance(value, np.ndarray) else value.data_ptr()
    return address


_noted: list[int] = []


def made_and_noted(value: Any) -> Any:
    """Makes a tensor of this process's own, and notes where it lies."""
    own = value.copy() if isinstance(value, np.ndarray) else value.clone()
    _noted.append(address_of(own))
    return own


def is_noted(value: Any) -> bool:
    """Whether this is the tensor that was noted last."""
    return address_of(value) == _noted[-1]


def total(value: Any) -> float:
    """The sum of all elements."""
    return float(value.sum())


class Decorated:
    """Every way in which a method can be decorated."""

    def __init__(self) -> None:
        self.calls = 0

    @ray.method(num_returns=1, max_task_retries=2)
    @ray_pccl.collective
    def under_method(self, count: int, *, scale: float = 1.0) -> Any:
        """Makes an array."""
        return np.full(count, scale)

    @ray_pccl.collective
    @ray.method(num_returns=1)
    def over_method(self, count: int, *, scale: float = 1.0) -> Any:
        return np.full(count, scale)

    @ray.method(num_returns=2)
    @ray_pccl.collective
    def two(self) -> Any:
        return np.full(3, 1.0), {"w": np.full(3, 2.0)}

    @ray_pccl.collective
    def bare(self, count: int, *, scale: float = 1.0) -> Any:
        self.calls += 1
        return np.full(count, scale)

    def call_bare(self) -> str:
        return type(self.bare(3)).__name__

    def pid(self) -> int:
        return os.getpid()


class DecoratedAsync:
    """The same, with an event loop."""

    @ray.method(num_returns=1)
    @ray_pccl.collective
    async def under_method(self, count: int, *, scale: float = 1.0) -> Any:
        await asyncio.sleep(0)
        return np.full(count, scale)

    @ray_pccl.collective
    @ray.method(num_returns=1)
    async def over_method(self, count: int, *, scale: float = 1.0) -> Any:
        await asyncio.sleep(0)
        return np.full(count, scale)

    @ray_pccl.collective
    async def bare(self, count: int, *, scale: float = 1.0) -> Any:
        await asyncio.sleep(0)
        return np.full(count, scale)

    @ray_pccl.collective
    def not_async(self, count: int, *, scale: float = 1.0) -> Any:
        return np.full(count, scale)

    async def pid(self) -> int:
        return os.getpid()


DecoratedActor: Any = ray.remote(num_cpus=0)(Decorated)
DecoratedAsyncActor: Any = ray.remote(num_cpus=0)(DecoratedAsync)


_held: dict[str, Any] = {}


def hold(key: str, thing: Any) -> None:
    """Keeps something in this process, under a name."""
    _held[key] = thing


def drop(key: str) -> None:
    del _held[key]


def give_back() -> None:
    """Has the C library give the memory back that it holds for later: what is left is in use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
