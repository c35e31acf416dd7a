"""Where a master listens: the port that its peers know, if it can be had."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import time
import weakref

from master_actor.core.records import Booted
from ray_pccl.errors import MasterError

log = logging.getLogger("ray_pccl.master")

PORT_PATIENCE_S = 3.0
"""How long a restarted master waits for the port that its peers know, before it takes another."""
ENOUGH_FILES = 1 << 16
BACKLOG = 1024


async def listen(host: str, port: int, old: Booted | None) -> socket.socket:
    """A listening socket: on the port asked for, else on the one of the boot before, else on any."""
    if not 0 <= port < 65536:
        raise MasterError(f"a port is a number from 0 (any) to 65535, not {port}")
    if port == 0 and old is not None and old.host == host:
        # Peers outside Ray know no other place. Who held the port, perhaps our own last life, may take a moment to go.
        deadline = time.monotonic() + PORT_PATIENCE_S
        while time.monotonic() < deadline:
            if (listening := bind(host, old.port)) is not None:
                return listening
            await asyncio.sleep(0.05)
        log.warning("the port %d of the last run is taken: peers that were told of it won't find this master", old.port)
    listening = bind(host, port)
    if listening is None:
        where = f"{host}:{port or 'any port'}"
        raise MasterError(f"the master can't listen on {where}: the port is taken, or the address is not ours")
    return listening


def bind(host: str, port: int) -> socket.socket | None:
    """A socket that listens there, or None if the port is taken or the address not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio sets TCP_NODELAY only on sockets that say that they are TCP.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with contextlib.suppress(OSError):
        listening.bind((host, port))
        listening.listen(BACKLOG)  # at once: two that are merely bound may share a port, and both believe to have it
        listening.setblocking(False)
        _listening.add(listening)
        return listening
    listening.close()
    return None


_listening: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _in_forked_child() -> None:
    """Lets go of the ports: a child that outlives a master which was killed must not keep them from the next one."""
    for listening in list(_listening):
        with contextlib.suppress(OSError):
            os.close(listening.detach())
    _listening.clear()


os.register_at_fork(after_in_child=_in_forked_child)


def raise_file_limit() -> int:
    """As many connections as the system lets us have; returns how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return soft if soft != resource.RLIM_INFINITY else ENOUGH_FILES
