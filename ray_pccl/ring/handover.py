"""Memory that changes hands between processes of one host, and bytes that come over a socket.

A memory file has no name, and is gone with the last process that holds it. One that is *sealed* can't be written or cut
short any more, not by its maker either: who has verified its contents can rely on them.
"""

from __future__ import annotations

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
    return np.frombuffer(mmap.mmap(fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ), dtype=np.uint8)


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


def receive_into(sock: socket.socket, memory: Bytes) -> None:
    """Fills memory from a socket."""
    view = memory.data
    while view:
        count = sock.recv_into(view)
        if not count:
            raise ConnectionError("its process has ended")
        view = view[count:]
