"""The actors of the driver's chaos: what they contribute, and what they read off the results.

They are plain actors that hold a page (`board`) which the test can see also when they are dead: the process that they
are, whether they are in a method or in an operation, and the point at which they are to kill themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import ray

import ray_pccl
from ray_pccl import ReduceOp
from ray_pccl.driver import reducing
from ray_pccl.ring import fault_points
from tests.chaos.board import Action, Board, Word
from tests.chaos.workload import Call, Decoded, _read, contribution, decode, expected

EXTRA_BYTES = 512
"""The second leaf of a nest."""


class Mark(IntEnum):
    """Words of the page beyond those of `board.Word`."""

    PID = 16
    """0 until the actor is there."""
    STARTED = 17
    """When its process began, as the kernel counts: a pid may be another's by now."""
    IN_METHOD = 18


@dataclass(frozen=True)
class Job:
    """One collective of the driver's."""

    call: Call
    op: ReduceOp = ReduceOp.SUM
    nested: bool = False
    """A nest of two leaves, which are reduced in two operations if the first is large."""
    on_loss: str = "continue"
    delays: Mapping[int, float] = field(default_factory=dict)
    """For how long the method takes, by slot."""

    def leaves(self) -> dict[str, Call]:
        """What each leaf holds."""
        extra = {"b": replace(self.call, nbytes=EXTRA_BYTES, index=self.call.index + 50)} if self.nested else {}
        return {"w": self.call, **extra}

    def value(self, slot: int) -> dict[str, Any]:
        """What the actor in a slot contributes."""
        return {name: contribution(call, slot).copy() for name, call in self.leaves().items()}

    def for_parts(self, count: int) -> Job:
        """This one, of tensors that can be cut into so many parts."""
        nbytes = self.call.nbytes // (8 * count) * 8 * count
        return replace(self, call=replace(self.call, nbytes=nbytes), nested=False)

    def __str__(self) -> str:
        call = self.call
        nest = ", nested" if self.nested else ""
        return f"{call.kind} {self.op.name} {call.key} of {call.nbytes} bytes{nest}, on_loss={self.on_loss}"


def read(job: Job, value: Any, place: int, places: int) -> tuple[tuple[int, ...], str]:
    """Whose contributions a result holds, and what is wrong with it."""
    if job.call.kind == "barrier":
        return (), "" if value is None else f"a barrier gave {value!r}"
    if job.call.kind == "allgather":
        each = [_nest(job, item, lambda call, leaf: decode(call, leaf)) for item in value]
        wrong = [garbled for _, garbled in each if garbled]
        wrong += [f"{slots} is one actor's" for slots, _ in each if len(slots) != 1]
        return tuple(slot for slots, _ in each for slot in slots), "; ".join(wrong)
    if job.call.kind == "reducescatter":
        return _nest(job, value, lambda call, leaf: _decode_part(call, leaf, place, places))
    if job.op is ReduceOp.AVG:
        return _nest(job, value, _decode_average)
    return _nest(job, value, lambda call, leaf: decode(call, leaf))


def _nest(job: Job, value: Any, decode_leaf: Any) -> tuple[tuple[int, ...], str]:
    leaves = job.leaves()
    if type(value) is not dict or value.keys() != leaves.keys():
        return (), f"it is no nest of {list(leaves)}: {value!r:.200}"
    found = {name: decode_leaf(call, value[name]) for name, call in leaves.items()}
    wrong = [f"leaf {name}: {leaf.garbled}" for name, leaf in found.items() if leaf.garbled]
    if len({leaf.slots for leaf in found.values()}) > 1:
        wrong.append(f"the leaves differ: { {name: leaf.slots for name, leaf in found.items()} }")
    return found["w"].slots, "; ".join(wrong)


def _decode_average(call: Call, leaf: Any) -> Decoded:
    """An average is its contributors' sum, divided by how many they are: only one number of them fits."""
    found = Decoded((), f"no average: element 0 is {leaf[0]!r}")
    for count in range(1, 13):
        total = np.rint(leaf * count)
        if np.allclose(leaf * count, total, rtol=0, atol=1e-6):
            found = decode(call, total)
            if len(found.slots) == count and not found.garbled:
                return found
    return Decoded(found.slots, found.garbled or f"it was not divided by {len(found.slots)}")


def _decode_part(call: Call, part: Any, place: int, places: int) -> Decoded:
    size = call.count // places
    start = place * size
    if len(part) != size:
        return Decoded((), f"a part of {len(part)} elements instead of {size}")
    whole = np.zeros(call.count, call.dtype)
    whole[start : start + size] = part
    slots = _read(call, whole, start)
    if slots is None:
        return Decoded((), f"element {start} is {part[0]!r}")
    wrong = int(np.count_nonzero(part != expected(call, slots)[start : start + size]))
    return Decoded(slots, f"{wrong} of {size} elements of part {place}" if wrong else "")


def _digest(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return zlib.crc32(repr([_digest(item) for item in value]).encode())
    return zlib.crc32(value) if isinstance(value, np.ndarray) else zlib.crc32(repr(value).encode())


class _Body:
    """What sync and async actors share."""

    def __init__(self, slot: int, page: str) -> None:
        logging.basicConfig(filename=page + ".log", format="%(asctime)s.%(msecs)03d %(process)d %(name)s %(message)s")
        logging.getLogger("ray_pccl").setLevel(logging.INFO)
        self._slot = slot
        self._board = Board(Path(page))
        self._board[Word.IN_CALL] = self._board[Mark.IN_METHOD] = 0
        fault_points.install(self._strike)
        self._count_operations()
        self._board[Mark.STARTED] = started(os.getpid())
        self._board[Mark.PID] = os.getpid()

    def _strike(self, name: str) -> None:
        if self._board.visit(fault_points.NAMES.index(name)) is Action.KILL:
            os.kill(os.getpid(), signal.SIGKILL)

    def _count_operations(self) -> None:
        """So that the test knows whether it killed the actor in the middle of one."""
        board, original = self._board, reducing.Member.run

        def run(member: Any, *args: Any, **given: Any) -> Any:
            board[Word.IN_CALL] += 1
            try:
                return original(member, *args, **given)
            finally:
                board[Word.IN_CALL] -= 1

        reducing.Member.run = run  # type: ignore[method-assign]

    @contextlib.contextmanager
    def _in_method(self) -> Iterator[None]:
        self._board[Mark.IN_METHOD] += 1
        try:
            yield
        finally:
            self._board[Mark.IN_METHOD] -= 1

    def _record(self, job: Job, place: int, places: int, value: Any, own: Any) -> dict[str, Any]:
        slots, garbled = read(job, value, place, places)
        intact = own is None or all(np.array_equal(own[name], leaf) for name, leaf in job.value(self._slot).items())
        return {"slots": slots, "garbled": garbled, "digest": _digest(value), "intact": intact}


class Worker(_Body):
    """An actor with one thread, or with several."""

    @ray_pccl.collective
    def make(self, job: Job) -> Any:
        with self._in_method():
            time.sleep(job.delays.get(self._slot, 0))
            return job.value(self._slot)

    def look(self, job: Job, place: int, places: int, refs: list[Any]) -> dict[str, Any]:
        """Reads a result, and the contribution to it if there was one."""
        try:
            value, *own = ray.get(refs)
        except Exception as error:
            return _failure(error)
        return self._record(job, place, places, value, own[0] if own else None)


class AsyncWorker(_Body):
    """An actor with an event loop."""

    @ray_pccl.collective
    async def make(self, job: Job) -> Any:
        with self._in_method():
            await asyncio.sleep(job.delays.get(self._slot, 0))
            return job.value(self._slot)

    async def look(self, job: Job, place: int, places: int, refs: list[Any]) -> dict[str, Any]:
        """Reads a result, and the contribution to it if there was one."""
        try:
            value, *own = await asyncio.gather(*refs)
        except Exception as error:
            return _failure(error)
        return self._record(job, place, places, value, own[0] if own else None)


def _failure(error: Exception) -> dict[str, Any]:
    return {"error": type(error).__name__, "text": " ".join(str(error).split())[-300:]}


def started(pid: int) -> int:
    """When a process began, in clock ticks since the machine did; -1 if there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return -1
