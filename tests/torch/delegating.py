"""What peers whose data Gloo moves do in tests: sent there, and run there."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from ray_pccl import Communicator, PCCLError, ReduceOp
from ray_pccl.ring import fault_points
from ray_pccl.ring.delegate import Session
from ray_pccl.ring.delegated import DelegatedAttempt


def session(comm: Communicator) -> Session | None:
    """Gloo's group in this process, if there is one."""
    assert comm._running is not None
    delegate = comm._running._plane._delegate
    assert delegate is not None
    return delegate._session


def has_session(comm: Communicator) -> bool:
    """Whether Gloo has a group here."""
    return session(comm) is not None


def bits_of_sums(comm: Communicator, count: int, dtype: str, op: ReduceOp) -> str:
    """A digest of the reduction of values whose sum depends on the order in which they are added."""
    import torch

    generator = torch.Generator().manual_seed(comm.rank)
    values = torch.randn(count, generator=generator, dtype=torch.float32).to(getattr(torch, dtype))
    comm.all_reduce(values, op=op)
    return hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()


def average(comm: Communicator) -> list[float]:
    """Of the ranks, plus one."""
    array = np.full(1000, comm.rank + 1, np.float64)
    comm.all_reduce(array, op=ReduceOp.AVG)
    return sorted(set(array.tolist()))


def largest(comm: Communicator) -> list[bool]:
    """Whether MAX is a NaN where any is, wherever it comes from."""
    array = np.zeros(comm.world_size, np.float32)
    array[comm.rank] = np.nan
    comm.all_reduce(array, op=ReduceOp.MAX)
    return [bool(flag) for flag in np.isnan(array)]


def in_any_order(comm: Communicator, number: int) -> list[float]:
    """Each rank launches the same operations in an order of its own; their results, by tag."""
    tags = list(np.random.default_rng(comm.rank).permutation(number))
    tensors = {int(tag): np.full(100 * (int(tag) + 1), float(tag), np.float64) for tag in tags}
    handles = [comm.all_reduce_async(tensors[int(tag)], tag=int(tag)) for tag in tags]
    for handle in handles:
        handle.result(60)
    return [float(np.unique(tensors[tag]).item()) for tag in range(number)]


def errors_of_many(comm: Communicator, number: int) -> list[str]:
    """The errors of operations in flight together."""
    handles = [comm.all_reduce_async(np.ones(1000), tag=tag) for tag in range(number)]
    for handle in handles:
        handle.wait(60)
    return [type(handle.exception()).__name__ for handle in handles]


def cut_gloo(comm: Communicator) -> None:
    """Breaks the connections of Gloo, as a network would, and not ours."""
    running = session(comm)
    assert running is not None
    running._group.abort()


def strike(comm: Communicator, point: str, number: int = signal.SIGKILL) -> None:
    """A signal befalls this process when it next comes to a point."""

    def reached(name: str) -> None:
        if name == point:
            os.kill(os.getpid(), number)

    fault_points.install(reached)


def interrupted_after_the_grant(comm: Communicator, count: int) -> str:
    """The name of what a call raises that is interrupted when its turn in the library has come."""
    reached, may_run, raised = threading.Event(), threading.Event(), []

    def hold(name: str) -> None:
        if name == "delegate_running":
            reached.set()
            may_run.wait(20)

    def call() -> None:
        try:
            comm.all_reduce(np.ones(count, np.float32))
        except BaseException as error:
            raised.append(type(error).__name__)

    fault_points.install(hold)
    thread = threading.Thread(target=call)
    thread.start()
    assert reached.wait(20) and thread.ident is not None
    interrupt = ctypes.pythonapi.PyThreadState_SetAsyncExc
    assert interrupt(ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt)) == 1
    thread.join(20)
    fault_points.install(None)
    may_run.set()
    return str(raised)


def name_of_session(comm: Communicator) -> int:
    """One that another group of Gloo in this process has not, while this one lives."""
    return id(session(comm))


def has_failed_for(comm: Communicator, graces: float) -> bool:
    """Whether Gloo failed in an operation that goes on, so many times the grace ago."""
    assert comm._running is not None
    plane = comm._running._plane
    assert plane._delegate is not None
    long_ago = time.monotonic() - graces * plane._delegate.grace_s
    running = [linked for linked in list(plane._linked.values()) if isinstance(linked, DelegatedAttempt)]
    return any(linked._failure is not None and linked._failed_at < long_ago for linked in running)


def belongings(comm: Communicator) -> tuple[int, int, int]:
    """How many threads, in Python and below, how many descriptors, and how much memory this process has."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    return len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir())), resident


def sessions_left(comm: Communicator) -> list[str]:
    """The threads of groups that are over, or of their end; the one that is used now is none of them."""
    current = session(comm)
    used = None if current is None else current._thread
    names = ("ray_pccl-gloo", "ray_pccl-abort")
    return [thread.name for thread in threading.enumerate() if thread.name in names and thread is not used]


def come_and_go(comm: Communicator, times: int) -> None:
    """Joins, reduces once with the other, leaves, again and again."""
    for _ in range(times):
        comm.connect(30)
        assert add(comm) == 2
        comm.close()


def welcome(comm: Communicator, times: int) -> list[float]:
    """Admits one that comes and goes, and reduces once with it, each time; the sums."""
    sums = []
    for _ in range(times):
        while comm.world_size < 2:
            comm.update_topology()
        sums.append(add(comm))
        while comm.world_size > 1:
            time.sleep(0.001)
    return sums


def add(comm: Communicator) -> float:
    """The sum of a one from each."""
    array = np.ones(100_000, np.float32)
    comm.all_reduce(array)
    return float(np.unique(array).item())


def what_it_raises(comm: Communicator, name: str, count: int, **given: Any) -> tuple[str, str]:
    """The error of a collective, and its text; empty if it returned."""
    try:
        getattr(comm, name)(np.ones(count, np.float32), **given)
    except PCCLError as error:
        return type(error).__name__, str(error)
    return "", ""
