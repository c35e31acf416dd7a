"""The peer's side of the sentinel: find it, start it if there is none, and keep it informed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import ray_pccl
from ray_pccl.peer.host import sentinel_address
from ray_pccl.peer.sentinel import Hello, encode_hello

_CREDENTIALS = struct.Struct("3i")
_RETRY_S = 0.02
_RETRY_CAP_S = 5.0
_SPAWN_TIMEOUT_S = 10.0
_BOOTSTRAP = (
    "import os, sys; sys.path[:] = os.environ.pop('RAY_PCCL_SENTINEL_PATH').split(os.pathsep); "
    "from ray_pccl.peer.sentinel import main; main('\\0' + sys.argv[1])"
)


class SentinelWatch:
    """Keeps this process watched, as a task on the peer's event loop."""

    def __init__(self, hello: Callable[[], Hello], master_id: Callable[[], str]) -> None:
        self._hello = hello
        self._master_id = master_id
        self.sock: socket.socket | None = None
        self.watched = threading.Event()
        """Set once a sentinel has confirmed that it watches this process."""

    async def run(self) -> None:
        """For as long as the peer lives. A sentinel that dies is replaced."""
        pause = _RETRY_S
        while True:
            address = sentinel_address(self._master_id())
            try:
                await self._be_watched(address)
            except OSError:
                await asyncio.get_running_loop().run_in_executor(None, _start_sentinel, address)
            pause = _RETRY_S if self.watched.is_set() else min(2 * pause, _RETRY_CAP_S)
            self.watched.clear()
            await asyncio.sleep(pause)

    async def refresh(self) -> None:
        """The master has moved: let the sentinel know."""
        if self.sock is not None:
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().sock_sendall(self.sock, encode_hello(self._hello()))

    async def _be_watched(self, address: str) -> None:
        """Returns when the sentinel is gone; raises `OSError` if there is none."""
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, address)
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(credentials)[1] != os.getuid():
                return  # another user's process sits at our address: do without, our own beats stand in
            self.sock = sock
            await loop.sock_sendall(sock, encode_hello(self._hello()))
            while await loop.sock_recv(sock, 64):
                self.watched.set()
        finally:
            self.sock = None
            sock.close()


def _start_sentinel(address: str) -> None:
    """Starts a sentinel, and returns when it, or one that was faster, listens."""
    package = str(Path(ray_pccl.__file__).parent.parent)
    environment = {**os.environ, "RAY_PCCL_SENTINEL_PATH": os.pathsep.join([package, *filter(None, sys.path)])}
    # No stream of ours is handed down: a reader of our output must not wait for the sentinel's end.
    with contextlib.suppress(OSError, TypeError, subprocess.SubprocessError):  # TypeError: no sys.executable
        subprocess.run(  # noqa: S603
            [sys.executable, "-S", "-E", "-c", _BOOTSTRAP, address.removeprefix("\0")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=environment,
            start_new_session=True,
            timeout=_SPAWN_TIMEOUT_S,
            check=False,
        )
