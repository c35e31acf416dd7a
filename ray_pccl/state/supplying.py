"""The sender's side: hands out pieces of this member's state while a sync runs, over the data plane's own listener.

On one host a bundle goes across in a sealed memory file; several receivers that ask for the same one get the same file.
Between hosts it is sent from the user's memory. The user may change the tensors as soon as the sync has returned: so
`withdraw` ends every transfer, and returns when nobody reads them any more.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence

from ray_pccl.ring import fault_points, handover
from ray_pccl.ring.dialing import Meeting
from ray_pccl.state.pieces import MAX_BUNDLE_PIECES, PIECE_BYTES, Bundle, Piece, size_of
from ray_pccl.state.rows import DIGEST_BYTES
from ray_pccl.state.tensors import Bytes

log = logging.getLogger("ray_pccl.state")

SERVICE = "shared-state"
REQUEST = struct.Struct(f"<{DIGEST_BYTES}sI")
"""What a receiver asks with: the election, and how many indices of pieces follow."""
INDEX = struct.Struct("<I")
READY_PATIENCE_S = 5.0
"""How long a receiver may be ahead of this member: it knows the result of the election a moment earlier."""
KEPT_FILES = 64
"""Receivers come for the same bundles at about the same time; a process has about a thousand descriptors."""
IDLE_S = 60.0
"""A connection on which nothing moves for this long is dropped."""


class Offer:
    """The contents that one member supplies in one election."""

    def __init__(self, contents: Sequence[Bytes], pieces: Sequence[Piece], *, keeps: bool) -> None:
        self._contents = contents
        self._pieces = pieces
        self._keeps = keeps
        """Whether several receivers may ask for the same bundle."""
        self._files: dict[Bundle, int] = {}
        self._making: dict[Bundle, threading.Lock] = {}
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._connections: set[socket.socket] = set()
        self._over = False
        self.tx_bytes = 0

    @contextlib.contextmanager
    def serving(self, sock: socket.socket) -> Iterator[bool]:
        """Within it the contents may be read; False if that is over."""
        with self._lock:
            if not self._over:
                self._connections.add(sock)
            begun = not self._over
        try:
            yield begun
        finally:
            with self._ended:
                self._connections.discard(sock)
                self._ended.notify_all()

    def withdraw(self) -> None:
        """Ends all transfers; afterwards nobody reads the contents."""
        with self._ended:
            self._over = True
            for sock in self._connections:
                with contextlib.suppress(OSError):  # so that whoever is in it comes out
                    sock.shutdown(socket.SHUT_RDWR)
            while self._connections:  # each is past its blocking call, or copies one bundle
                self._ended.wait()
            for fd in self._files.values():
                os.close(fd)
            self._files.clear()

    def send(self, meeting: Meeting, bundle: Bundle) -> None:
        """Sends a bundle. Raises `OSError`."""
        if max(bundle) >= len(self._pieces):
            raise ConnectionError("a piece was asked for that there is not")
        size = size_of(bundle, self._pieces)
        if size > PIECE_BYTES:
            raise ConnectionError(f"{size} bytes were asked for at once")
        parts = (self._part(self._pieces[index]) for index in bundle)
        fault_points.reach("state_sending")
        if meeting.local:
            self._send_file(meeting.sock, bundle, size, parts)
        else:
            meeting.sock.sendall(handover.HEAD.pack(handover.FOLLOWS, size))
            for part in parts:
                handover.send_all(meeting.sock, part)
        with self._lock:
            self.tx_bytes += size

    def _send_file(self, sock: socket.socket, bundle: Bundle, size: int, parts: Iterator[Bytes]) -> None:
        head = handover.HEAD.pack(handover.HERE, size)
        fd = self._kept_file(bundle, parts) if self._keeps else handover.sealed_file(parts)
        try:
            socket.send_fds(sock, [head], [fd])
        finally:
            os.close(fd)

    def _kept_file(self, bundle: Bundle, parts: Iterator[Bytes]) -> int:
        """A descriptor for the caller to close. Made by the first who asks; whoever asks meanwhile waits for it."""
        with self._lock:
            making = self._making.setdefault(bundle, threading.Lock())
        with making:
            with self._lock:
                if bundle in self._files:
                    return os.dup(self._files[bundle])
            fd = handover.sealed_file(parts)
            with self._lock:
                self._files[bundle] = os.dup(fd)
                if len(self._files) > KEPT_FILES:
                    os.close(self._files.pop(next(iter(self._files))))
            return fd

    def _part(self, piece: Piece) -> Bytes:
        return self._contents[piece.tensor][piece.start : piece.start + piece.length]


class Supply:
    """What this member offers at the moment."""

    def __init__(self) -> None:
        self._offers: dict[bytes, Offer] = {}
        self._changed = threading.Condition()

    def offer(self, sync: bytes, offer: Offer) -> None:
        """From now on pieces may be had under the name of this election."""
        with self._changed:
            self._offers[sync] = offer
            self._changed.notify_all()

    def withdraw(self, sync: bytes) -> None:
        """Nobody gets anything any more, nor reads what is offered."""
        with self._changed:
            offer = self._offers.pop(sync, None)
        if offer is not None:
            offer.withdraw()

    def serve(self, meeting: Meeting) -> None:
        """Answers one receiver until it has what it wants."""
        sock = meeting.sock
        sock.settimeout(IDLE_S)
        try:
            while True:
                sync, count = REQUEST.unpack(_exactly(sock, REQUEST.size))
                if not 0 < count <= MAX_BUNDLE_PIECES:
                    raise ConnectionError(f"{count} pieces were asked for at once")
                wanted = _exactly(sock, count * INDEX.size)
                offer = self._find(sync)
                if offer is None:
                    sock.sendall(handover.HEAD.pack(handover.MISSING, 0))
                    continue
                with offer.serving(sock) as begun:
                    if not begun:
                        return
                    offer.send(meeting, tuple(index for (index,) in INDEX.iter_unpack(wanted)))
        except OSError as error:
            log.debug("a receiver of shared state is gone: %s", error)

    def _find(self, sync: bytes) -> Offer | None:
        deadline = time.monotonic() + READY_PATIENCE_S
        with self._changed:
            while sync not in self._offers and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            return self._offers.get(sync)


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise ConnectionError("it has what it wants")
        data += more
    return data
