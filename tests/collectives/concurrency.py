"""Programs with many operations in flight."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from ray_pccl import Communicator, Handle, ReduceInfo, ReduceOp, Status

KIB = 1 << 10
COUNTS = (0, 1, 100, 16 * KIB, 16 * KIB + 1, 64 * KIB, 64 * KIB + 1, 300 * KIB)
"""Of 4 bytes each: below, at and above the thresholds."""
PATIENCE_S = 30.0


def _start(comm: Communicator, kind: str, count: int, tag: int, retry: bool) -> tuple[Handle, Callable[[], str]]:
    """An operation, and what tells whether it went wrong."""
    rank, size = comm.rank, comm.world_size
    mine = np.full(count, rank + 1 + tag, np.float32)
    total = size * (size + 1) / 2 + size * tag
    retried: dict[str, Any] = {"retry": retry, "tag": tag}
    match kind:
        case "all_reduce":
            out = np.zeros_like(mine)
            handle, expected = comm.all_reduce_async(mine, out, **retried), np.full(count, total)
        case "in place":
            out = mine
            handle, expected = comm.all_reduce_async(mine, **retried), np.full(count, total)
        case "reduce":
            root = tag % size
            out = np.zeros_like(mine)
            handle = comm.reduce_async(mine, out, root=root, **retried)
            expected = np.full(count, total if rank == root else 0)
        case "broadcast":
            root = tag % size
            out = mine
            handle, expected = comm.broadcast_async(mine, root=root, **retried), np.full(count, root + 1 + tag)
        case "barrier":
            out = expected = np.zeros(0)
            handle = comm.barrier_async(**retried)
        case _:
            out = np.zeros(size * count, np.float32)
            handle = comm.all_gather_async(mine, out, tag=tag)
            expected = np.repeat(np.arange(size) + 1.0 + tag, count)

    def complaint() -> str:
        return "" if np.array_equal(out, expected) else f"{kind} of {count} with tag {tag} gave {np.unique(out)}"

    return handle, complaint


KINDS = ("all_reduce", "in place", "reduce", "broadcast", "barrier", "all_gather")


def in_flight(comm: Communicator, number: int, kinds: tuple[str, ...], count: int) -> list[str]:
    """So many at once, launched in another order on each peer."""
    order = list(range(number))
    random.Random(comm.rank).shuffle(order)
    started = [_start(comm, kinds[tag % len(kinds)], count, tag, True) for tag in order]
    return _complaints(started)


def _complaints(started: list[tuple[Handle, Callable[[], str]]]) -> list[str]:
    found = []
    for handle, complaint in started:
        handle.result(PATIENCE_S)
        found.append(complaint())
    return [text for text in found if text]


def storm(comm: Communicator, seed: int, batches: int) -> list[str]:
    """Batches of all kinds and sizes at once, in any order, with tags that come again."""
    plan, own = random.Random(seed), random.Random(seed * 100 + comm.rank)
    complaints: list[str] = []
    for _ in range(batches):
        tags = plan.sample(range(200), plan.randint(1, 24))
        batch = [(plan.choice(KINDS), plan.choice(COUNTS), tag, plan.random() < 0.5) for tag in tags]
        own.shuffle(batch)
        complaints += _complaints([_start(comm, *one) for one in batch])
    return complaints


def many_tags(comm: Communicator, first: int, number: int) -> list[str]:
    """One operation after another, each with a tag that was never used before."""
    complaints = []
    for tag in range(first, first + number):
        array = np.full(3, comm.rank + tag, np.int64)
        comm.all_reduce(array, tag=tag)
        expected = sum(rank + tag for rank in range(comm.world_size))
        if not (array == expected).all():
            complaints.append(f"tag {tag} gave {array} for {expected}")
    return complaints


def one_stays_open(comm: Communicator, count: int) -> list[str]:
    """The last rank enters one operation only when hundreds of others have come and gone."""
    late = comm.rank == comm.world_size - 1
    started = [] if late else [_start(comm, "all_reduce", count, 9999, True)]
    complaints = many_tags(comm, 10_000, 300)
    started += [_start(comm, "all_reduce", count, 9999, True)] if late else []
    complaints += _complaints(started)
    return complaints + many_tags(comm, 10_300, 50)


def same_tags_again(comm: Communicator) -> list[str]:
    """200 tags in turn, several times over: entries of the board are taken from one and given to another."""
    complaints = []
    for _ in range(4):
        complaints += many_tags(comm, 0, 200)
    return complaints


# ------------------------------------------------------------------------------------------------------------ handles


def handle_that_succeeds(comm: Communicator) -> list[str]:
    array = np.ones(5, np.float32)
    handle = comm.all_reduce_async(array)
    ok, status, info = handle.wait()
    found = []
    if not (ok is True and status is Status.SUCCESS and isinstance(info, ReduceInfo)):
        found.append(f"wait() said {ok, status, info}")
    if not handle.done() or handle.exception() is not None or handle.result() != info or handle.wait()[2] != info:
        found.append("asked again, it says something else")
    if array[0] != comm.world_size:
        found.append(f"the sum was {array[0]}")
    return found


def wait_that_runs_out(comm: Communicator, count: int, gate: str) -> list[str]:
    """Rank 0 waits too shortly, three times: the operation does not care, and commits when the others come."""
    array = np.ones(count, np.float32)
    found: list[str] = []
    if comm.rank == 0:
        handle = comm.all_reduce_async(array, tag=5)
        for _ in range(3):
            if handle.wait(0.02) != (False, Status.RUNNING, None) or handle.done():
                found.append("it ended alone")
        try:
            handle.result(0.02)
            found.append("it has a result")
        except TimeoutError:
            pass
        if not (array == 1).all():
            found.append("the input has changed")
        comm.store.set(gate, b"open")
        handle.result(PATIENCE_S)
    else:
        comm.store.wait([gate])
        comm.all_reduce(array, tag=5, retry=False)
    if not (array == comm.world_size).all():
        found.append(f"the sum was {array[:1]}")
    return found


def handle_that_is_dropped(comm: Communicator, count: int, gate: str) -> list[str]:
    """Rank 0 forgets its handle before anyone else comes."""
    array = np.ones(count, np.float32)
    if comm.rank == 0:
        comm.all_reduce_async(array, tag=6)
        gc.collect()
        comm.store.set(gate, b"open")
    else:
        comm.store.wait([gate])
        comm.all_reduce(array, tag=6, retry=False)
        if not (array == comm.world_size).all():
            return [f"the sum was {array[:1]}"]
    comm.barrier(tag=7)
    return []


def handles_that_fail(comm: Communicator) -> list[str]:
    """Each peer calls another op: the handles say so, and raise nothing before they are asked for their result."""
    handle = comm.all_reduce_async(np.ones(4), op=list(ReduceOp)[comm.rank % 5], tag=3)
    ok, status, info = handle.wait(10)
    found = [] if (ok, status, info) == (False, Status.MISMATCH, None) else [f"wait() said {ok, status, info}"]
    error = handle.exception()
    try:
        handle.result()
        found.append("result() raised nothing")
    except type(error) as raised:  # type: ignore[misc]
        if raised is not error:
            found.append("result() raised something else")
    return found


def too_many(comm: Communicator, number: int) -> None:
    """Starts operations that nobody else enters: they end by their short timeouts, for everyone."""
    started = []
    try:
        for tag in range(number):
            started.append(comm.barrier_async(tag=1000 + tag, timeout=1.0))
    finally:
        for handle in started:
            handle.wait()
