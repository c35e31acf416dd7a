"""What a torch process group of one epoch needs to be built, and how its connections are cut when the epoch is over.

Gloo has no abort: a pending operation holds on until its sockets close, or its timeout passes. So we close them. A
socket is Gloo's if its own address, or the one it is connected to, is among those that members have published for it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store as _Store

from ray_pccl.ring.delegate import KEY_TIMEOUT_S, Keys

_FDS = Path("/proc/self/fd")


class KeyStore(_Store):
    """The members' keys as a `Store`: each is written once, by one member, and reaches all over our own links.

    So neither the master nor a port of its own is needed to build a group, and the end of the epoch ends every wait.
    """

    def __init__(self, keys: Keys) -> None:
        super().__init__()
        self._keys = keys
        self.published: list[bytes] = []
        """What this member has written: where it listens."""
        self.read: list[bytes] = []
        """What others have written: where they listen."""

    def set(self, key: str, value: bytes | str) -> None:
        """Tells all members."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        self.published.append(content)
        self._keys.publish(key, content)

    def get(self, key: str) -> bytes:
        """The value, as soon as a member has told it."""
        value = self._keys.wait(key, KEY_TIMEOUT_S)
        self.read.append(value)
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Returns when all are there."""
        for key in keys:
            self._keys.wait(key, KEY_TIMEOUT_S if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all are there now."""
        return all(self._keys.has(key) for key in keys)


def cut(store: KeyStore) -> int:
    """Shuts down the connections that a group made with this store has in this process; how many there were."""
    found = 0
    for sock in _sockets():
        with contextlib.suppress(OSError):
            there = sock.getpeername()  # which a listener has not: to shut that down would end the process
            if _is_in(sock.getsockname(), store.published) or _is_in(there, store.read):
                sock.shutdown(socket.SHUT_RDWR)
                found += 1
    return found


def _sockets() -> Iterator[socket.socket]:
    """The TCP sockets of this process, each as a duplicate: one that is closed meanwhile is not another's by then."""
    try:
        numbers = [int(path.name) for path in _FDS.iterdir()]
    except OSError:
        return  # no /proc: Gloo's own timeout has to do
    for number in numbers:
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with _duplicate(number) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                    yield sock


def _duplicate(number: int) -> socket.socket:
    copy = os.dup(number)
    try:
        return socket.socket(fileno=copy)
    except OSError:  # it was closed, and something else opened, at this very moment
        os.close(copy)
        raise


def _is_in(address: tuple[Any, ...], blobs: list[bytes]) -> bool:
    """Whether the bytes of an address, as the kernel holds them, are in one of these."""
    host, port = address[0], address[1]
    if ":" in host:
        flow, packed = address[2], socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
        needle = struct.pack("=H", socket.AF_INET6) + struct.pack("!HI", port, flow) + packed
    else:
        needle = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(host)
    return any(needle in blob for blob in blobs)
