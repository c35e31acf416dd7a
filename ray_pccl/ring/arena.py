"""Tensors that the other peers of the host read where they are: `ray_pccl.empty` and `ray_pccl.empty_like`.

One nameless memory file a process, sparse and of a fixed size, mapped by the neighbours read-only when they link up. A
tensor is a range of it, freed (its pages are given back) with the last array that lies in it.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from ray_pccl.errors import ProtocolError, UsageError
from ray_pccl.ring import bell
from ray_pccl.ring.kernels import import_torch
from ray_pccl.ring.segment import Bytes, is_sealed, seal

ARENA_BYTES = 1 << 38
"""Address space, not memory: pages come with their first use."""
_ALIGNMENT = mmap.PAGESIZE
_PUNCH_HOLE = 0x03  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


class Arena:
    """The mapped file: this process's own, or a neighbour's, read-only."""

    def __init__(self, fd: int | None = None) -> None:
        own = fd is None
        if fd is None:
            fd = os.memfd_create("ray_pccl-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, ARENA_BYTES)
        elif os.fstat(fd).st_size != ARENA_BYTES or not is_sealed(fd):
            raise ProtocolError("the memory that a neighbour sent is not an arena of this version")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if own else 0)
        self._map = mmap.mmap(fd, ARENA_BYTES, flags=mmap.MAP_SHARED | _NO_RESERVE, prot=protection)
        self.fd = fd
        self.bytes: Bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._start = self.bytes.ctypes.data
        self._lock = threading.Lock()
        self._free = [(0, ARENA_BYTES)]
        if own:
            seal(fd, against_writing=False)  # that would also keep pages from being given back

    def allocate(self, size: int) -> Bytes:
        """A range of so many bytes, zeroed, which is free again when its last array is gone."""
        room = max(_ALIGNMENT, -(-size // _ALIGNMENT) * _ALIGNMENT)
        with self._lock:
            for index, (start, length) in enumerate(self._free):
                if length >= room:
                    self._free[index] = (start + room, length - room)
                    break
            else:
                raise MemoryError(f"the arena has no room for {size} bytes")
        whole = self.bytes[start : start + size]
        # An array of its own over the same memory: views of views would keep only the arena itself alive.
        holder = (ctypes.c_uint8 * size).from_address(whole.ctypes.data)
        weakref.finalize(holder, self._give_back, start, room)
        return np.frombuffer(memoryview(holder).cast("B"), dtype=np.uint8)

    def _give_back(self, start: int, room: int) -> None:
        _libc.fallocate(self.fd, _PUNCH_HOLE, start, room)
        with self._lock:
            merged: list[tuple[int, int]] = []
            for begin, length in sorted([*self._free, (start, room)]):
                if merged and sum(merged[-1]) == begin:
                    merged[-1] = (merged[-1][0], merged[-1][1] + length)
                else:
                    merged.append((begin, length))
            self._free = merged

    def offset_of(self, array: np.ndarray[Any, Any]) -> int | None:
        """Where an array lies in the arena, or None if it does not."""
        offset = array.ctypes.data - self._start
        return offset if 0 <= offset < ARENA_BYTES else None


_NO_RESERVE = 0x4000
_own: Arena | None = None
_making = threading.Lock()


def own_arena() -> Arena:
    """This process's arena."""
    global _own  # noqa: PLW0603
    with _making:
        if _own is None:
            _own = Arena()
        return _own


def offset_in_own(array: np.ndarray[Any, Any]) -> int | None:
    """Where an array lies in this process's arena, if it does."""
    return None if _own is None else _own.offset_of(array)


def _forget_in_child() -> None:
    global _own  # noqa: PLW0603
    _own = None  # the parent's: both would hand out the same ranges


os.register_at_fork(after_in_child=_forget_in_child)


def empty(shape: int | Sequence[int], dtype: Any = np.float32) -> Any:
    """A tensor that `all_reduce` and `reduce` need not copy in: the other peers of this host read it where it is.

    Args:
        shape: A number or a sequence of numbers.
        dtype: A numpy dtype, for an array, or a torch dtype, for a CPU tensor.

    It must not be changed while an operation on it is in flight. Where shared memory is not supported, it is an
    ordinary tensor.
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in sizes):
        raise UsageError(f"a shape is made of numbers from 0, not {shape!r}")
    torch = import_torch() if type(dtype).__module__ == "torch" else None
    if torch is not None:
        item = torch.empty((), dtype=dtype).element_size()
        return torch.from_numpy(_bytes(math.prod(sizes) * item)).view(dtype).reshape(sizes)
    kind = np.dtype(dtype)
    if kind.hasobject:
        raise UsageError("a shared tensor holds numbers, not Python objects")
    return _bytes(math.prod(sizes) * kind.itemsize).view(kind).reshape(sizes)


def empty_like(tensor: Any) -> Any:
    """A tensor like `empty`, with the shape and the dtype of another."""
    return empty(tuple(tensor.shape), tensor.dtype)


def _bytes(size: int) -> Bytes:
    return own_arena().allocate(size) if bell.supported() else np.empty(size, np.uint8)
