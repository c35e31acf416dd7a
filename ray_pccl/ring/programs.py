"""Collectives over links: who sends which bytes to whom, and what happens when bytes arrive. No sockets, no threads.

A program is driven by arrivals. It sends through its port, which holds everything back until the receiver has entered
the same operation, so a message never arrives where nobody has memory for it, and operations in flight can't block
each other whatever the order they were launched in.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ray_pccl.errors import ProtocolError
from ray_pccl.ring.collect import collect, reduce_packed, show
from ray_pccl.ring.header import Kind
from ray_pccl.ring.quantization import BLOCK
from ray_pccl.ring.segment import Bytes
from ray_pccl.ring.task import Array, Epoch, Task

DIRECT_BYTES = 256 << 10
"""If each rank sends no more than this in all, everyone sends its input to everyone: fewer steps for more bytes."""
EAGER_BYTES = 8 << 10
"""Up to this size inputs are sent without waiting for the receiver: it keeps what it has not entered yet."""
_AHEAD_BYTES = 8 << 20
"""How far a chunk's start may be ahead of another's end."""
_PACKED_BLOCKS = 64
"""Blocks of a quantised piece: small enough to overlap computing and sending."""


class Port(Protocol):
    """What a program needs of the links."""

    def send(self, rank: int, slot: int, offset: int, view: memoryview) -> None:
        """Sends memory that stays as it is until the operation ends; cut into pieces if it is large."""

    def scratch(self, rank: int, length: int) -> memoryview:
        """Memory for one piece, until the next one arrives from the same rank."""


class Program:
    """One collective of this rank. `due` counts the bytes that are still to arrive."""

    def __init__(self, task: Task, epoch: Epoch, port: Port) -> None:
        self.task = task
        self.rank, self.size = epoch.rank, epoch.size
        self.right = (epoch.rank + 1) % epoch.size
        self.port = port
        self.due = 0
        self.rings = False
        """Whether all large data goes to the next rank, and to nobody else."""
        self.eager = False
        """Whether what it sends need not wait until the receiver has entered."""

    def begin(self) -> None:
        """Sends what does not depend on anyone."""

    def destination(self, rank: int, slot: int, offset: int, length: int) -> memoryview:
        """Where such a piece goes. `ProtocolError` if none like it is expected."""
        raise ProtocolError(f"no data is due from rank {rank}")

    def arrived(self, rank: int, slot: int, offset: int, body: memoryview) -> None:
        """A piece is where `destination` said."""
        self.due -= body.nbytes
        if self.due < 0:
            raise ProtocolError("more data than is due")
        self.take(rank, slot, offset, body)

    def take(self, rank: int, slot: int, offset: int, body: memoryview) -> None:
        """Does something with a piece that has arrived."""

    def finish(self) -> None:
        """All that was due is there: completes the result."""

    def close(self) -> None:
        """Nothing more will happen: lets go of the port, which holds on to the program."""
        del self.port


def program_for(task: Task, epoch: Epoch, port: Port) -> Program:
    """The program that suits an operation; a function of its header and the epoch, so that all choose the same."""
    kind = task.recipe.header.kind
    if max(task.recipe.shown(epoch.size)) * (epoch.size - 1) <= DIRECT_BYTES:
        return Direct(task, epoch, port)
    if kind in (Kind.ALL_REDUCE, Kind.REDUCE) and task.recipe.quantizer is not None:
        return Packed(task, epoch, port)
    if kind in (Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER):
        return Ring(task, epoch, port)
    if kind is Kind.BROADCAST:
        return Chain(task, epoch, port)
    return Exchange(task, epoch, port)


def piece_of(buffer: Bytes, offset: int, length: int) -> memoryview:
    """A part of a buffer; `ProtocolError` outside it."""
    if offset + length > len(buffer):
        raise ProtocolError(f"a piece of {length} bytes at {offset} of {len(buffer)}")
    return buffer.data[offset : offset + length]


def _share(count: int, size: int, align: int) -> int:
    """An equal part of so many elements, rounded up to whole groups."""
    groups = -(-count // align)
    return -(-groups // size) * align


def as_bytes(array: Array) -> Bytes:
    """The same memory as bytes."""
    return array.view(np.uint8)


class Direct(Program):
    """Everyone sends its input to everyone, and makes its own result."""

    def __init__(self, task: Task, epoch: Epoch, port: Port) -> None:
        super().__init__(task, epoch, port)
        sizes = task.recipe.shown(self.size)
        self._inputs: list[Bytes] = [np.empty(size, np.uint8) for size in sizes]
        self.due = sum(sizes) - sizes[self.rank]
        self.eager = max(sizes) <= EAGER_BYTES

    def begin(self) -> None:
        mine = self._inputs[self.rank]
        show(self.task, mine)
        for step in range(1, self.size):
            self.port.send((self.rank + step) % self.size, 0, 0, mine.data)

    def destination(self, rank: int, slot: int, offset: int, length: int) -> memoryview:
        return piece_of(self._inputs[rank], offset, length)

    def finish(self) -> None:
        collect(self.task, self.rank, self._inputs)


class Ring(Program):
    """Reduce-scatter around the ring, and then all-gather, scatter or gather of what each rank has reduced.

    Chunk c starts at rank c+1 and ends, complete, at rank c. Slots 0 to n-2 are the steps of the first half, n-1 to
    2n-3 those of the second; a piece goes on to the next rank as soon as it was combined here.
    """

    def __init__(self, task: Task, epoch: Epoch, port: Port) -> None:
        super().__init__(task, epoch, port)
        assert task.send is not None and task.recipe.combine is not None
        kind, count, item = task.recipe.header.kind, task.recipe.header.count, task.recipe.dtype.itemsize
        self._send, self._combine = task.send, task.recipe.combine
        total = count * self.size if kind is Kind.REDUCE_SCATTER else count
        align = 1 if kind is Kind.REDUCE_SCATTER else max(1, 64 // item)
        each = count if kind is Kind.REDUCE_SCATTER else _share(count, self.size, align)
        self._bounds = [min(rank * each, total) for rank in range(self.size + 1)]
        self._bounds[self.size] = total
        whole = kind is Kind.ALL_REDUCE or (kind is Kind.REDUCE and task.out is not None)
        assert not whole or task.out is not None
        self._work: Array | None = task.out if whole else None
        """Where all chunks are put together; None where only pieces pass through."""
        sizes = [(self._bounds[c + 1] - self._bounds[c]) * item for c in range(self.size)]
        self._sizes = sizes
        self._steps = self.size - 1
        self._keeps_all = kind is Kind.ALL_REDUCE
        self._injected = self._ended = 0
        self.due = sum(sizes) - sizes[(self.rank - 1) % self.size]  # all but the chunk that starts here
        self._gathers = kind is Kind.REDUCE
        self.rings = not self._gathers
        if kind is Kind.ALL_REDUCE or (self._gathers and self.rank == task.recipe.header.root):
            self.due += sum(sizes) - sizes[self.rank]

    def _chunk(self, array: Array, chunk: int) -> Array:
        return array[self._bounds[chunk] : self._bounds[chunk + 1]]

    def begin(self) -> None:
        self._inject()

    def _inject(self) -> None:
        """Sends more of the chunk that starts here: all of it, or as much as keeps pace with what ends here.

        Where pieces pass through memory of their own, that bounds how many are on their way.
        """
        first = as_bytes(self._chunk(self._send, (self.rank - 1) % self.size))
        paced = not self._keeps_all and self._ended < self._sizes[self.rank]
        end = min(self._ended + _AHEAD_BYTES, len(first)) if paced else len(first)
        if end > self._injected:
            self.port.send(self.right, 0, self._injected, first[self._injected : end].data)
            self._injected = end

    def _chunk_of(self, rank: int, slot: int) -> int:
        """Which chunk such a piece belongs to."""
        if self._gathers and slot == self._steps:
            return rank
        left = (self.rank - 1) % self.size
        if rank != left or slot >= (2 if self.task.recipe.header.kind is Kind.ALL_REDUCE else 1) * self._steps:
            raise ProtocolError(f"no data for slot {slot} is due from rank {rank}")
        back = slot + 2 if slot < self._steps else slot - self._steps + 1
        return (self.rank - back) % self.size

    def destination(self, rank: int, slot: int, offset: int, length: int) -> memoryview:
        chunk = self._chunk_of(rank, slot)
        item = self.task.recipe.dtype.itemsize
        if offset + length > self._sizes[chunk] or offset % item or length % item:
            raise ProtocolError(f"a piece of {length} bytes at {offset} of a chunk of {self._sizes[chunk]}")
        if slot < self._steps:
            return self.port.scratch(rank, length)
        if self._work is None:
            raise ProtocolError(f"no data for slot {slot} is due from rank {rank}")
        return piece_of(as_bytes(self._chunk(self._work, chunk)), offset, length)

    def take(self, rank: int, slot: int, offset: int, body: memoryview) -> None:
        chunk = self._chunk_of(rank, slot)
        item = self.task.recipe.dtype.itemsize
        part = slice(offset // item, (offset + body.nbytes) // item)
        piece = self._place(chunk, part, last=slot == self._steps - 1)
        if slot < self._steps:
            arriving = np.frombuffer(body, self.task.recipe.dtype)
            self._combine(arriving, self._chunk(self._send, chunk)[part], piece)
        if slot == self._steps - 1:
            self._completed(piece, offset)
            self._ended += body.nbytes
            self._inject()
        elif slot < 2 * self._steps - 1 and not (self._gathers and slot >= self._steps):
            self.port.send(self.right, slot + 1, offset, as_bytes(piece).data)

    def _place(self, chunk: int, part: slice, *, last: bool) -> Array:
        """Where a part of a chunk is combined: in the result, or in memory that lives until it is sent."""
        if self._work is not None:
            return self._chunk(self._work, chunk)[part]
        if last and self.task.recipe.header.kind is Kind.REDUCE_SCATTER:
            assert self.task.out is not None
            return self.task.out[part]
        return np.empty(part.stop - part.start, self.task.recipe.dtype)

    def _completed(self, piece: Array, offset: int) -> None:
        if self.task.recipe.average is not None:
            self.task.recipe.average(piece, self.size)
        kind, root = self.task.recipe.header.kind, self.task.recipe.header.root
        if kind is Kind.ALL_REDUCE:
            self.port.send(self.right, self._steps, offset, as_bytes(piece).data)
        elif kind is Kind.REDUCE and self.rank != root:
            self.port.send(root, self._steps, offset, as_bytes(piece).data)


class Packed(Program):
    """Quantised: contributions go to the owner of their chunk, which sums them in rank order and sends the sum to all.

    The sum is quantised once, and its owner takes the dequantised value as well: the same bits everywhere.
    """

    CONTRIBUTION, RESULT = 0, 1

    def __init__(self, task: Task, epoch: Epoch, port: Port) -> None:
        super().__init__(task, epoch, port)
        assert task.recipe.quantizer is not None and task.send is not None
        self._quantizer, self._send = task.recipe.quantizer, task.send
        count = task.recipe.header.count
        each = _share(count, self.size, BLOCK)
        self._bounds = [min(rank * each, count) for rank in range(self.size + 1)]
        self._bounds[self.size] = count
        self._piece = _PACKED_BLOCKS * self._quantizer.block_bytes
        mine = self._packed_size(self.rank)
        self._inputs: list[Bytes] = [np.empty(mine, np.uint8) for _ in range(self.size)]
        self._missing: dict[int, int] = {}
        for offset in range(0, mine, self._piece):
            self._missing[offset] = min(self._piece, mine - offset) * (self.size - 1)
        self._keep: list[Bytes] = []
        self._results: dict[int, Bytes] = {}
        self.due = mine * (self.size - 1)
        if task.out is not None:
            for rank in range(self.size):
                if rank != self.rank:
                    self._results[rank] = np.empty(self._packed_size(rank), np.uint8)
                    self.due += len(self._results[rank])

    def _packed_size(self, rank: int) -> int:
        return self._quantizer.packed_size(self._bounds[rank + 1] - self._bounds[rank])

    def begin(self) -> None:
        for step in range(1, self.size + 1):
            rank = (self.rank + step) % self.size
            chunk = self._send[self._bounds[rank] : self._bounds[rank + 1]]
            packed = self._inputs[self.rank] if rank == self.rank else np.empty(self._packed_size(rank), np.uint8)
            elements = _PACKED_BLOCKS * BLOCK
            for index, offset in enumerate(range(0, len(packed), self._piece)):
                piece = packed[offset : offset + self._piece]
                self._quantizer.quantize(chunk[index * elements : (index + 1) * elements], piece)
                if rank != self.rank:
                    self.port.send(rank, self.CONTRIBUTION, offset, piece.data)
            self._keep.append(packed)

    def destination(self, rank: int, slot: int, offset: int, length: int) -> memoryview:
        if slot == self.CONTRIBUTION:
            if offset % self._piece + length > self._piece:
                raise ProtocolError("a piece that crosses the border of two")
            return piece_of(self._inputs[rank], offset, length)
        if slot != self.RESULT or rank not in self._results:
            raise ProtocolError(f"no data for slot {slot} is due from rank {rank}")
        return piece_of(self._results[rank], offset, length)

    def take(self, rank: int, slot: int, offset: int, body: memoryview) -> None:
        if slot == self.CONTRIBUTION:
            start = offset - offset % self._piece
            self._missing[start] -= body.nbytes
            if not self._missing[start]:
                self._reduce(start)

    def _reduce(self, start: int) -> None:
        end = min(start + self._piece, len(self._inputs[self.rank]))
        low = self._bounds[self.rank] + start // self._quantizer.block_bytes * BLOCK
        high = min(low + _PACKED_BLOCKS * BLOCK, self._bounds[self.rank + 1])
        result: Bytes = np.empty(end - start, np.uint8)
        out = None if self.task.out is None else self.task.out[low:high]
        reduce_packed(self.task, [shown[start:end] for shown in self._inputs], high - low, result, out)
        self._keep.append(result)
        root = self.task.recipe.header.root
        for step in range(1, self.size):
            rank = (self.rank + step) % self.size
            if self.task.recipe.header.kind is Kind.ALL_REDUCE or rank == root:
                self.port.send(rank, self.RESULT, start, result.data)

    def finish(self) -> None:
        if self.task.out is not None:
            for rank, packed in self._results.items():
                low, high = self._bounds[rank], self._bounds[rank + 1]
                if low < high:
                    self._quantizer.store(packed, self.task.out[low:high])


class Chain(Program):
    """Broadcast: pieces go around the ring from the root, each passed on as it arrives."""

    def __init__(self, task: Task, epoch: Epoch, port: Port) -> None:
        super().__init__(task, epoch, port)
        self._is_root = self.rank == task.recipe.header.root
        memory = task.send if self._is_root else task.out
        assert memory is not None
        self._bytes = as_bytes(memory)
        self._last = self.right == task.recipe.header.root
        self.rings = True
        if not self._is_root:
            self.due = len(self._bytes)

    def begin(self) -> None:
        if self._is_root:
            self.port.send(self.right, 0, 0, self._bytes.data)

    def destination(self, rank: int, slot: int, offset: int, length: int) -> memoryview:
        if self._is_root or rank != (self.rank - 1) % self.size:
            raise ProtocolError(f"no data is due from rank {rank}")
        return piece_of(self._bytes, offset, length)

    def take(self, rank: int, slot: int, offset: int, body: memoryview) -> None:
        if not self._last:
            self.port.send(self.right, 0, offset, body)


class Exchange(Program):
    """All-gather, gather, scatter, all-to-all: each pair has at most one message, and it goes straight to its place."""

    def __init__(self, task: Task, epoch: Epoch, port: Port) -> None:
        super().__init__(task, epoch, port)
        self._incoming = {
            rank: as_bytes(place)
            for rank in range(self.size)
            if rank != self.rank and (place := self._place_of(rank)) is not None
        }
        self.due = sum(len(place) for place in self._incoming.values())

    def _part(self, array: Array | None, rank: int) -> Array | None:
        count = self.task.recipe.header.count
        return None if array is None else array[rank * count : (rank + 1) * count]

    def _place_of(self, source: int) -> Array | None:
        """Where the message of a rank belongs, if it sends one."""
        out, kind, root = self.task.out, self.task.recipe.header.kind, self.task.recipe.header.root
        if kind is Kind.SCATTER:
            return out if source == root else None
        if kind is Kind.GATHER and self.rank != root:
            return None
        return self._part(out, source)

    def _message_to(self, target: int) -> Array | None:
        """What a rank gets from this one, if anything."""
        send, kind, root = self.task.send, self.task.recipe.header.kind, self.task.recipe.header.root
        if kind is Kind.SCATTER:
            return self._part(send, target) if self.rank == root else None
        if kind is Kind.ALL_TO_ALL:
            return self._part(send, target)
        return send if kind is Kind.ALL_GATHER or target == root else None

    def begin(self) -> None:
        for step in range(1, self.size):
            rank = (self.rank + step) % self.size
            message = self._message_to(rank)
            if message is not None:
                self.port.send(rank, 0, 0, as_bytes(message).data)

    def destination(self, rank: int, slot: int, offset: int, length: int) -> memoryview:
        if rank not in self._incoming:
            raise ProtocolError(f"no data is due from rank {rank}")
        return piece_of(self._incoming[rank], offset, length)

    def finish(self) -> None:
        place, message = self._place_of(self.rank), self._message_to(self.rank)
        if place is not None and message is not None:
            np.copyto(place, message)
