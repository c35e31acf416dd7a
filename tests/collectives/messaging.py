"""Programs that send and receive."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from ray_pccl import Communicator, PCCLError
from tests.collectives.calls import Outcome
from tests.collectives.values import Tensor, contribution, rounded

COUNTS = (0, 1, 7, 16384, 16385, 65536, 65537, 1 << 18, (1 << 18) + 1, 1_200_001)


def around_the_ring(comm: Communicator, library: str, dtypes: tuple[str, ...]) -> list[str]:
    """Everyone sends to the next rank and receives from the one before, in all sizes."""
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    found = []
    for dtype in dtypes:
        for number, count in enumerate(COUNTS):
            layout = "strided" if number % 3 == 2 else "plain"
            send = Tensor(library, dtype, contribution(comm.rank, count, dtype, number), layout)
            recv = Tensor(library, dtype, np.zeros_like(contribution(0, count, dtype)), layout)
            sent = comm.send_async(send.tensor, right, tag=number)
            info = comm.recv(recv.tensor, left, tag=number)
            sent.result(30)
            if not np.array_equal(recv.get(), rounded(contribution(left, count, dtype, number), dtype)):
                found.append(f"{dtype}[{count}] {layout} came out wrong")
            if info.world_size != comm.world_size:
                found.append(f"recv said {info}")
    return found


def in_a_row(comm: Communicator, number: int) -> list[str]:
    """Rank 0 sends one after another with one tag; rank 1 gets them in that order."""
    found = []
    for value in range(number):
        if comm.rank == 0:
            comm.send(np.full(3, value), 1, tag=4)
        elif comm.rank == 1:
            array = np.zeros(3, np.int64)
            comm.recv(array, 0, tag=4)
            if not (array == value).all():
                found.append(f"message {value} was {array}")
    return found


def all_at_once(comm: Communicator, number: int, count: int) -> list[str]:
    """Messages between all pairs, both ways, while collectives run with the same tags."""
    others = [rank for rank in range(comm.world_size) if rank != comm.rank]
    received = {(rank, tag): np.zeros(count, np.int32) for rank in others for tag in range(number)}
    handles: list[Any] = []
    for rank, tag in received:
        handles.append(comm.recv_async(received[rank, tag], rank, tag=tag))
        handles.append(comm.send_async(np.full(count, 100 * comm.rank + tag, np.int32), rank, tag=tag))
    sums = [np.ones(count, np.float32) for _ in range(number)]
    handles += [comm.all_reduce_async(array, tag=tag) for tag, array in enumerate(sums)]
    for handle in handles:
        handle.result(30)
    found = [
        f"from {rank}, tag {tag}: {np.unique(array)}"
        for (rank, tag), array in received.items()
        if not (array == 100 * rank + tag).all()
    ]
    return found + [f"a sum of {array[:1]}" for array in sums if not (array == comm.world_size).all()]


def both_at_once(comm: Communicator, count: int) -> list[str]:
    """Both send before anyone receives: nobody waits for ever."""
    other = 1 - comm.rank
    array = np.zeros(count, np.int64)
    sender = threading.Thread(target=lambda: comm.send(np.full(count, comm.rank), other, tag=9))
    sender.start()
    comm.recv(array, other, tag=9)
    sender.join(20)
    return [] if (array == other).all() and not sender.is_alive() else [f"got {array[:3]}"]


def message(comm: Communicator, role: str, other: int, count: int, dtype: str, timeout: float, tag: int = 0) -> Outcome:
    """One message, and what came of it."""
    array = np.full(count, comm.rank + 1, dtype)
    entered = time.monotonic()
    try:
        info = getattr(comm, role)(array, other, tag=tag, timeout=timeout)
    except PCCLError as error:
        failure = {"error": type(error).__name__, "text": str(error), "details": error.details}
        return Outcome(entered=entered, ended=time.monotonic(), **failure)
    values = tuple(float(value) for value in np.unique(array))
    return Outcome(entered=entered, ended=time.monotonic(), info=info, results=values)


def is_waiting(comm: Communicator) -> bool:
    """Whether a message of this peer waits for its other end."""
    assert comm._running is not None
    messages = comm._running._plane.messages
    return bool(messages._sends or messages._receives)
