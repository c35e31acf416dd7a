"""Where a process can be reached by others of its Ray: one listener, for values to be fetched and claims to be kept.

Who connects proves the key that came with a ticket or a claim, and says what it wants; what it wants decides which
service takes the connection over, in a thread of its own.
"""

from __future__ import annotations

import logging
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import ray

from ray_pccl.errors import AuthenticationError, ProtocolError
from ray_pccl.ring import dialing

log = logging.getLogger("ray_pccl.objects")

MAX_STRANGERS = 64
"""How many may be proving the key at a time."""
_RETRY_S = 0.1
Service = Callable[[dialing.Meeting, str], None]


@dataclass(frozen=True, slots=True)
class Contact:
    """A process, and how to reach it."""

    token: str
    """Names the process: another one of the same actor, after a restart, has another."""
    address: str
    key: bytes

    def dial(self, service: str, wish: str = "") -> dialing.Meeting:
        """A connection to a service of the process. Raises `OSError`."""
        try:
            address = dialing.Address.parse(self.address)
            meeting = dialing.dial(address, dialing.transport_from_env(), self.key, f"{service} {wish}", [])
            _open.add(meeting.sock)
            return meeting
        except (ProtocolError, AuthenticationError) as error:
            raise ConnectionError(f"another process answers at its address: {error}") from None


class Desk:
    """This process's listener."""

    def __init__(self) -> None:
        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        token = secrets.token_hex(16)
        self._listeners, address = dialing.listen(f"desk-{token}", host)
        self.contact = Contact(token, str(address), secrets.token_bytes(32))
        _open.update(self._listeners)
        self.services: dict[str, Service] = {}
        self._strangers = threading.Semaphore(MAX_STRANGERS)
        threading.Thread(target=self._serve, name="ray_pccl-desk", daemon=True).start()

    def _serve(self) -> None:
        selector = selectors.DefaultSelector()
        for listener in self._listeners:
            selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                self._strangers.acquire()
                try:
                    sock, _ = key.fileobj.accept()  # type: ignore[union-attr]
                    threading.Thread(target=self._receive, args=(sock,), name="ray_pccl-guest", daemon=True).start()
                except (OSError, RuntimeError) as error:  # no descriptor or no thread is left, for the moment
                    log.warning("a connection could not be accepted: %s", error)
                    self._strangers.release()
                    time.sleep(_RETRY_S)

    def _receive(self, sock: socket.socket) -> None:
        _open.add(sock)
        try:
            meeting = dialing.accept(sock, self.contact.key, self.contact.token, [])
        except (OSError, ProtocolError, AuthenticationError) as error:
            log.info("somebody without the key came: %s", error)
            return
        finally:
            self._strangers.release()
        service, _, wish = meeting.peer_id.partition(" ")
        serve = self.services.get(service)
        if serve is None:
            meeting.sock.close()
            return
        serve(meeting, wish)


_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _in_forked_child() -> None:
    """A child that lives on would hide its parent's death from those who are connected to it."""
    for sock in list(_open):
        sock.close()


os.register_at_fork(after_in_child=_in_forked_child)

_desk: Desk | None = None
_making = threading.Lock()


def local_desk() -> Desk:
    """This process's desk."""
    global _desk  # noqa: PLW0603
    with _making:
        if _desk is None:
            _desk = Desk()
        return _desk
