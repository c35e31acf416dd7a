"""Memory for results, used again: fresh pages would take longer to come by than the reduction itself.

A tensor's memory comes back when the last array over it is gone, and waits here for the next one of its size.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections import deque

import numpy as np

from ray_pccl.driver.tensors import Bytes

POOLED_BYTES = 1 << 20
"""Smaller ones are not worth it."""
MAX_IDLE_BYTES = 1 << 30
IDLE_S = 10.0


class Pool:
    """Blocks that wait for use, by size, the one that was used last first."""

    def __init__(self) -> None:
        self._idle: dict[int, deque[tuple[float, Bytes]]] = {}
        self._idle_bytes = 0
        self._lock = threading.RLock()  # a collection of garbage may bring a block back while we hold it
        self._thread: threading.Thread | None = None

    def empty(self, size: int) -> Bytes:
        """So many bytes, of which the contents are anything."""
        if size < POOLED_BYTES:
            return np.empty(size, np.uint8)
        with self._lock:
            if self._thread is None:  # here, and not in a finalizer, which may run anywhere
                self._thread = threading.Thread(target=self._expire, name="ray_pccl-memory", daemon=True)
                self._thread.start()
            idle = self._idle.get(size)
            block = idle.pop()[1] if idle else None
            self._idle_bytes -= size if block is not None else 0
        if block is None:
            block = np.empty(size, np.uint8)
        # An object of its own over the same memory, so that its end, and not that of the block, is noticed.
        holder = (ctypes.c_uint8 * size).from_address(block.ctypes.data)
        weakref.finalize(holder, self._give_back, block)
        return np.frombuffer(memoryview(holder).cast("B"), dtype=np.uint8)

    def _give_back(self, block: Bytes) -> None:
        with self._lock:
            if self._idle_bytes + len(block) > MAX_IDLE_BYTES:
                return
            self._idle.setdefault(len(block), deque()).append((time.monotonic(), block))
            self._idle_bytes += len(block)

    def _expire(self) -> None:
        """Lets go of what nobody has used for a while, again and again."""
        while True:
            time.sleep(IDLE_S)
            self.purge(time.monotonic() - IDLE_S)

    def purge(self, before: float) -> None:
        """Lets go of what nobody has used since then."""
        with self._lock:
            for size, idle in list(self._idle.items()):
                while idle and idle[0][0] <= before:
                    idle.popleft()
                    self._idle_bytes -= size
                if not idle:
                    del self._idle[size]


results = Pool()
"""This process's own."""
