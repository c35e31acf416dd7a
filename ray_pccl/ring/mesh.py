"""The thread that moves bytes: all links of a communicator, one event loop, and the threads that make new links."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from ray_pccl.errors import PCCLError
from ray_pccl.ring import dialing
from ray_pccl.ring.dialing import Address, Meeting
from ray_pccl.ring.link import Handler, Link
from ray_pccl.topology import probing
from ray_pccl.topology.probing import Direction, Plan, UnreachableError

log = logging.getLogger("ray_pccl.ring")

TICK_S = 0.05
MAX_HANDSHAKES = 64
REDIAL_S = 0.05
_SERVICE = "\x1f"
"""What the name of who connects begins with if it wants no link, but a service; no peer's id does."""
_PROBE = "probe"
PROBE_HANDSHAKE_TIMEOUT_S = 3.0
_UNREACHABLE = {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EPERM, errno.EACCES}
"""What the network, or a firewall, says of a way that is none."""


class Owner(Handler, Protocol):
    """What the mesh tells, all in its own thread."""

    def met(self, link: Link, fds: list[int]) -> None:
        """A link was made."""

    def parted(self, link: Link, error: Exception) -> None:
        """A link broke."""

    def missed(self, peer_id: str) -> None:
        """A peer was not dialled to the end, since nobody wanted it any more."""

    def tick(self, now: float) -> None:
        """Time passes."""

    def over(self) -> None:
        """The thread ends: nothing will happen any more."""


class Mesh:
    """Listens, dials, and runs the loop. Every public method may be called from any thread unless it says otherwise."""

    def __init__(self, owner: Owner, peer_id: str, key: bytes, host: str, transport: str, fds: list[int]) -> None:
        self._owner = owner
        self._peer_id = peer_id
        self._key = key
        self._transport = transport
        self._fds = fds
        self._listeners, self.address = dialing.listen(peer_id, host)
        self._selector = selectors.DefaultSelector()
        self._calls: deque[Callable[[], None]] = deque()
        self._woken, self._waker = socket.socketpair()
        self._links: set[Link] = set()
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        """All that were accepted or dialled: for links, or for services, or that shake hands as yet."""
        self._handshakes = 0
        self._dialling: set[str] = set()
        self._closed = False
        self._over = False
        self.services: dict[str, Callable[[Meeting], None]] = {_PROBE: self._serve_probe}
        """Who takes over connections that are no links, each in a thread of its own: see `call_on`."""
        self._dirty: set[Link] = set()
        for sock in (self._woken, self._waker, *self._listeners):
            sock.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._empty_calls)
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ, lambda listener=listener: self._accept(listener))
        self._thread = threading.Thread(target=self._run, name="ray_pccl-mesh", daemon=True)
        _live.add(self)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Has the thread run a function soon; one that has ended runs nothing more."""
        self._calls.append(function)
        with contextlib.suppress(OSError):  # full: it will wake anyhow; closed: it runs nothing more
            self._waker.send(b"\0")

    @property
    def is_over(self) -> bool:
        """Whether the thread runs nothing more."""
        return self._over

    @property
    def in_thread(self) -> bool:
        """Whether the caller is the mesh's own thread."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Ends the thread, all links and listeners."""
        self._closed = True
        self.call(lambda: None)
        if self._thread.ident is not None and not self.in_thread:
            self._thread.join(5.0)

    def forsake(self) -> None:
        """In a forked child: lets go of the parent's sockets, so that they close with the parent."""
        for sock in [*self._listeners, self._woken, self._waker, *self._sockets]:
            with contextlib.suppress(OSError):
                os.close(sock.detach())

    # ------------------------------------------------------------------------------- for the mesh's own thread

    def flush(self, link: Link) -> None:
        """Sends what is queued on a link before the loop sleeps again."""
        self._dirty.add(link)

    def drop(self, link: Link, error: Exception) -> None:
        """Ends a link, and says so."""
        if link in self._links:
            self._links.discard(link)
            self._dirty.discard(link)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(link.sock)
            link.sock.close()
            self._owner.parted(link, error)

    def dial(self, address: str, peer_id: str, give_up: Callable[[], bool]) -> None:
        """Makes a link to a peer, trying until it works or `give_up` says so. One attempt at a time for each peer."""
        if peer_id in self._dialling:
            return
        self._dialling.add(peer_id)
        threading.Thread(target=self._dial, args=(address, peer_id, give_up), name="ray_pccl-dial", daemon=True).start()

    def probe(self, address: str, peer_id: str, plan: Plan) -> dict[Direction, float | None]:
        """Measures the way to a peer. Blocks for as long as that takes: some seconds at most."""
        return probing.measure(lambda: self._dial_probe(address, peer_id), plan, lambda: self._closed)

    # ------------------------------------------------------------------------------------------------ the loop

    def _run(self) -> None:
        next_tick = 0.0
        try:
            while not self._closed:
                self._pump()
                for key, events in self._selector.select(TICK_S):
                    if isinstance(key.data, Link):
                        self._serve(key.data, events)
                    else:
                        self._guarded(key.data)
                now = time.monotonic()
                if now >= next_tick:
                    next_tick = now + TICK_S
                    self._guarded(lambda now=now: self._owner.tick(now))  # type: ignore[misc]
        finally:
            self._end()

    def _pump(self) -> None:
        while self._dirty:
            link = self._dirty.pop()
            try:
                link.pump()
            except OSError as error:
                self.drop(link, error)

    def _serve(self, link: Link, events: int) -> None:
        if link not in self._links:
            return
        try:
            if events & selectors.EVENT_READ:
                link.pull()
            if events & selectors.EVENT_WRITE:
                link.pump()
        except (OSError, PCCLError) as error:
            self.drop(link, error)
        except Exception as error:
            log.exception("a frame from peer %s could not be taken", link.peer_id)
            self.drop(link, error)

    def _wants_write(self, link: Link, wants: bool) -> None:
        if link in self._links:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wants else 0)
            self._selector.modify(link.sock, events, link)

    def _empty_calls(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        while self._calls:
            self._guarded(self._calls.popleft())

    @staticmethod
    def _guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except Exception:  # others wait for this thread, too
            log.exception("a call in the mesh's thread failed")

    def _end(self) -> None:
        self._over = True
        while self._calls:
            self._guarded(self._calls.popleft())
        self._guarded(self._owner.over)
        for link in list(self._links):
            link.sock.close()
        for sock in [*self._listeners, self._woken, self._waker]:
            sock.close()
        self._selector.close()
        _live.discard(self)

    # ---------------------------------------------------------------------------------------------- new links

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        if self._handshakes >= MAX_HANDSHAKES:
            log.warning("dropped a data connection: %d others have not proved themselves yet", self._handshakes)
            sock.close()
            return
        self._sockets.add(sock)
        self._handshakes += 1
        threading.Thread(target=self._greet, args=(sock,), name="ray_pccl-accept", daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        try:
            meeting = dialing.accept(sock, self._key, self._peer_id, self._fds)
        except (OSError, PCCLError) as error:
            log.warning("dropped a data connection: %s", error)
            return
        finally:
            self.call(self._one_less)
        if not meeting.peer_id.startswith(_SERVICE):
            self.call(lambda: self._meet(meeting))
            return
        serve = self.services.get(meeting.peer_id.removeprefix(_SERVICE))
        try:
            if serve is not None and not self._closed:
                serve(meeting)
        except Exception:  # who waits at the other end sees the connection close
            log.exception("a service failed")
        finally:
            dialing.close_all(meeting.fds)
            meeting.sock.close()

    def call_on(self, address: str, peer_id: str, service: str, timeout_s: float) -> Meeting:
        """A connection to a service of a peer, for the caller's own thread. Raises `OSError` and `PCCLError`."""
        meeting = dialing.dial(
            Address.parse(address), self._transport, self._key, _SERVICE + service, [], self._sockets.add
        )
        meeting.sock.settimeout(timeout_s)
        return _with(peer_id, meeting)

    def _dial_probe(self, address: str, peer_id: str) -> socket.socket:
        try:
            sock, _ = dialing.connect(Address.parse(address), "tcp", self._sockets.add)
        except OSError as error:
            if isinstance(error, TimeoutError) or error.errno in _UNREACHABLE:
                raise UnreachableError(f"{address} can't be reached: {error}") from error
            raise  # this side's own trouble, too many open files for instance: it says nothing about the way
        return _with(peer_id, dialing.greet(sock, self._key, _SERVICE + _PROBE, [], PROBE_HANDSHAKE_TIMEOUT_S)).sock

    def _serve_probe(self, meeting: Meeting) -> None:
        try:
            probing.serve(meeting.sock, lambda: self._closed)
        except (OSError, PCCLError) as error:
            log.info("a probe ended: %s", error)

    def _one_less(self) -> None:
        self._handshakes -= 1

    def _dial(self, address: str, peer_id: str, give_up: Callable[[], bool]) -> None:
        while not self._closed and not give_up():
            try:
                meeting = dialing.dial(
                    Address.parse(address), self._transport, self._key, self._peer_id, self._fds, self._sockets.add
                )
            except (OSError, PCCLError) as error:
                log.info("peer %s can't be reached: %s", peer_id, error)
                time.sleep(REDIAL_S)
                continue
            if meeting.peer_id == peer_id:
                self.call(partial(self._meet, meeting))
                return
            meeting.sock.close()
            dialing.close_all(meeting.fds)
            time.sleep(REDIAL_S)
        self.call(partial(self._give_up, peer_id))

    def _give_up(self, peer_id: str) -> None:
        self._dialling.discard(peer_id)
        self._owner.missed(peer_id)

    def _meet(self, meeting: Meeting) -> None:
        link = Link(meeting.sock, meeting.peer_id, self._owner, local=meeting.local)
        link.wants_write = self._wants_write
        self._links.add(link)
        self._selector.register(link.sock, selectors.EVENT_READ, link)
        self._dialling.discard(link.peer_id)
        self._owner.met(link, meeting.fds)


def _with(peer_id: str, meeting: Meeting) -> Meeting:
    if meeting.peer_id != peer_id:
        meeting.sock.close()
        raise ConnectionError(f"another peer answers where {peer_id} was")
    return meeting


_live: weakref.WeakSet[Mesh] = weakref.WeakSet()


def _in_forked_child() -> None:
    for mesh in list(_live):
        mesh.forsake()
    _live.clear()


os.register_at_fork(after_in_child=_in_forked_child)

__all__ = ["Address", "Mesh", "Owner"]
