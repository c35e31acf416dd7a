"""Memory that changes hands between processes of one host, and bytes that come over a socket.

A memory file has no name, and is gone with the last process that holds it. One that is *sealed* can't be written or cut
short any more, not by its maker either: who has verified its contents can rely on them.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Iterable

import numpy as np

from ray_pccl.errors import ProtocolError
from ray_pccl.ring import dialing
from ray_pccl.ring.segment import Bytes

HEAD = struct.Struct("<Bq")
"""What an answer begins with: how the bytes come, and how many there are."""
MISSING, HERE, FOLLOWS = range(3)
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEAL_SHRINK, _SEAL_GROW, _SEAL_WRITE = 0x2, 0x4, 0x8
_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap = _libc.mmap, _libc.munmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong]
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value
_SEALS = _SEAL_SHRINK | _SEAL_GROW | _SEAL_WRITE


def sealed_file(parts: Iterable[Bytes]) -> int:
    """A descriptor of a new sealed memory file with these bytes, one after another."""
    fd = os.memfd_create("ray_pccl-handover", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        at = 0
        for part in parts:
            view = part.data
            while view:  # written, not mapped: that costs no page fault, and no page is cleared first
                count = os.pwrite(fd, view, at)
                view, at = view[count:], at + count
        fcntl.fcntl(fd, _ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def map_sealed(fd: int, size: int) -> Bytes:
    """The bytes of another's sealed file, to read. `ProtocolError` if it is not sealed, or of another size."""
    if os.fstat(fd).st_size != size or fcntl.fcntl(fd, _GET_SEALS) & _SEALS != _SEALS:
        raise ProtocolError("a memory file that is not sealed, or of another size than was announced")
    try:
        return np.asarray(_Mapping(fd, size))
    except OSError:  # a process may have only so many mappings
        memory = np.empty(size, np.uint8)
        at = 0
        while at < size:
            at += os.preadv(fd, [memory.data[at:]], at)
        return memory


class _Mapping:
    """Memory of a file, to read, until the last array over it is gone.

    Python's own mapping would keep a descriptor open for each, of which a process has about a thousand.
    """

    def __init__(self, fd: int, size: int) -> None:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self._address = 0
        address = _mmap(None, size, mmap.PROT_READ, flags, fd, 0)
        if address in (None, _FAILED):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self._address, self._size = address, size
        is_read_only = True
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (size,), "data": (address, is_read_only)}

    def __del__(self) -> None:
        if self._address:
            _munmap(self._address, self._size)


def receive_head(meeting: dialing.Meeting) -> tuple[int, int, list[int]]:
    """How the bytes come, how many, and the descriptors that came along: the caller's, to close."""
    head, fds, _, _ = socket.recv_fds(meeting.sock, HEAD.size, 1) if meeting.local else (b"", [], 0, 0)
    try:
        while len(head) < HEAD.size:
            more = meeting.sock.recv(HEAD.size - len(head))
            if not more:
                raise ConnectionError("its process has ended")
            head += more
        what, size = HEAD.unpack(head)
    except BaseException:
        dialing.close_all(fds)
        raise
    return what, size, fds


def send_all(sock: socket.socket, data: Bytes) -> None:
    """Sends it all. A socket's timeout is for each step, where `sendall` takes it for the whole."""
    view = data.data
    while view:
        view = view[sock.send(view) :]


def receive_into(sock: socket.socket, memory: Bytes) -> None:
    """Fills memory from a socket."""
    view = memory.data
    while view:
        count = sock.recv_into(view)
        if not count:
            raise ConnectionError("its process has ended")
        view = view[count:]
