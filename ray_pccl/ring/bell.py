"""Waking a process that waits for shared memory to change: one word per process, rung by its neighbours.

The waiter notes the word, says that it is asleep, looks once more, and sleeps in the kernel (futex) until the word
changes. A zombie that rings does no harm: the sleeper looks, and sleeps again. Every sleep is bounded, too, since a
store may still be on its way to memory when its writer looks whether anyone is asleep.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform

PAGE = mmap.PAGESIZE
_WAIT, _WAKE = 0, 1
_EVERYONE = 2**31 - 1
_SYSCALLS = {"x86_64": 202, "aarch64": 98}
_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def supported() -> bool:
    """Whether this machine keeps the order of stores, as flags in memory need it, and has the system calls."""
    return platform.system() == "Linux" and platform.machine() == "x86_64" and hasattr(os, "memfd_create")


class Bell:
    """One process's bell. Whoever holds its descriptor may ring it."""

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            self.fd = os.memfd_create("ray_pccl-bell", os.MFD_CLOEXEC)
            os.ftruncate(self.fd, PAGE)
        else:
            self.fd = fd
        self._map = mmap.mmap(self.fd, PAGE)
        self._word = memoryview(self._map).cast("i")
        self._anchor = ctypes.c_int.from_buffer(self._map)
        self._address = ctypes.c_void_p(ctypes.addressof(self._anchor))
        self._number = _SYSCALLS[platform.machine()]

    def now(self) -> int:
        """What to hand to `wait`, read before the last look."""
        return self._word[0]

    def wait(self, seen: int, timeout_s: float) -> None:
        """Sleeps until the bell was rung since `seen`, or the time is up. Other threads run meanwhile."""
        seconds, rest = divmod(timeout_s, 1.0)
        limit = _Timespec(int(seconds), int(rest * 1e9))
        _libc.syscall(self._number, self._address, _WAIT, ctypes.c_int(seen), ctypes.byref(limit), None, 0)

    def ring(self) -> None:
        """Wakes every thread that waits."""
        self._word[0] = (self._word[0] + 1) & 0x7FFFFFFF
        _libc.syscall(self._number, self._address, _WAKE, _EVERYONE, None, None, 0)

    def close_fd(self) -> None:
        """Lets go of the descriptor, once; the memory stays for who still waits or rings."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
