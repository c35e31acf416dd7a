"""One collective of this peer, and one attempt at it in one epoch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ray_pccl.control.messages import Failure
from ray_pccl.descriptors import QuantizationOptions, ReduceOp
from ray_pccl.errors import PCCLError
from ray_pccl.peer.ledger import Key, Ledger
from ray_pccl.ring.header import Header, Kind, backend_of, describe
from ray_pccl.ring.kernels import averager, combiner, storage_dtype
from ray_pccl.ring.quantization import Quantizer, quantizer

Array = np.ndarray[tuple[int], np.dtype[Any]]
Combine = Callable[[Array, Array, Array], None]
_REDUCING = (Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER)


class RefusedError(Exception):
    """This peer refuses the operation for good, as it may while it is not prepared; the others are to be told."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class Recipe:
    """All that follows from a header alone: how inputs are combined, and how much each rank shows to the others."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.packed = header.pack()
        """The header as it is shown to the others."""
        self.dtype = storage_dtype(header.datatype)
        self.combine: Combine | None = None
        self.average: Callable[[Array, int], None] | None = None
        self.quantizer: Quantizer | None = None
        if header.kind in _REDUCING:
            self.combine = combiner(header.op, header.datatype)
            if header.op is ReduceOp.AVG:
                self.average = averager(header.datatype)
            self.quantizer = quantizer(QuantizationOptions(header.quantized, header.algorithm), header.datatype)
        self._shown: dict[int, tuple[int, ...]] = {}

    def shown(self, size: int) -> tuple[int, ...]:
        """How many bytes each of so many ranks shows where everyone shows its whole input to everyone."""
        known = self._shown.get(size)
        if known is None:
            known = self._shown[size] = tuple(self._shown_by(rank, size) for rank in range(size))
        return known

    def _shown_by(self, rank: int, size: int) -> int:
        kind, count, root = self.header.kind, self.header.count, self.header.root
        if kind in (Kind.BROADCAST, Kind.SCATTER) and rank != root:
            return 0
        if self.quantizer is not None:
            return self.quantizer.packed_size(count)
        times = size if kind in (Kind.SCATTER, Kind.ALL_TO_ALL, Kind.REDUCE_SCATTER) else 1
        return times * count * self.dtype.itemsize


class Task:
    """What is to be done with which flat arrays of the storage type.

    `send` is what this rank contributes, `out` where its result is built; either may be None where the rank has none.
    """

    __slots__ = ("out", "recipe", "send")

    def __init__(self, recipe: Recipe, send: Array | None, out: Array | None) -> None:
        self.recipe = recipe
        self.send = send
        self.out = out


@dataclass(frozen=True, slots=True)
class Epoch:
    """The members that a result counts, by rank, and this peer among them."""

    number: int
    rank: int
    members: tuple[str, ...]
    size: int


class Attempt:
    """A task in one epoch. It ends by a commit, by an error, or because the epoch froze."""

    __slots__ = ("deadline", "epoch", "key", "ledger", "packed", "prepared", "rx", "stop", "task", "tx")

    def __init__(self, task: Task, key: Key, epoch: Epoch, ledger: Ledger, deadline: float) -> None:
        self.task = task
        self.key = key
        self.epoch = epoch
        self.packed = task.recipe.packed
        self.ledger = ledger
        self.deadline = deadline
        self.stop: PCCLError | None = None
        """Why it is not to go on; set by any thread."""
        self.prepared = False
        self.tx = self.rx = 0

    def check(self) -> None:
        """Raises why the attempt is not to go on, if it is not."""
        if self.stop is not None:
            raise self.stop.again()

    def prepare(self) -> None:
        """The result is complete: say so in the ledger, before anyone else hears of it."""
        self.ledger.prepare(self.key, time.monotonic(), self.epoch.number)
        self.prepared = True

    def mismatch(self, rank: int, header: bytes) -> RefusedError:
        """Another member means something else under this tag."""
        me, other = self.epoch.members[self.epoch.rank], self.epoch.members[rank]
        ours, theirs = describe(self.packed), describe(header)
        text = (
            f"members do not agree on operation {self.key[1]} of tag {self.key[0]}: peer {me} (rank {self.epoch.rank}) "
            f"called {ours}, peer {other} (rank {rank}) called {theirs}; call the same on all, or use another tag"
        )
        mine, its = backend_of(self.packed), backend_of(header)
        if mine != its:
            text = (
                f"members have different backends: peer {me} (rank {self.epoch.rank}) has backend={mine!r}, peer "
                f"{other} (rank {rank}) has backend={its!r}; give all members of a group the same. They called {ours} "
                f"and {theirs}"
            )
        return RefusedError(Failure("CollectiveMismatchError", text, {"calls": {me: ours, other: theirs}}))

    def too_late(self, entered: Callable[[int], bytes | None]) -> RefusedError:
        """Not everyone came: names who is in which call. `entered` tells the header that a rank has shown."""
        calls = {}
        for rank, peer_id in enumerate(self.epoch.members):
            header = self.packed if rank == self.epoch.rank else entered(rank)
            calls[peer_id] = describe(header) if header is not None else f"nothing under tag {self.key[0]}"
        who = "; ".join(f"peer {peer_id} is in {call}" for peer_id, call in calls.items())
        text = f"operation {self.key[1]} of tag {self.key[0]} was not entered by all members in time: {who}"
        return RefusedError(Failure("OperationTimeoutError", text, {"calls": calls}))
