"""One connection to another member, once it has proved itself: frames out, frames in. Lives in the mesh's thread."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Protocol

from ray_pccl.ring.observing import Meter
from ray_pccl.ring.wire import Frame, Receiver

_FRAMES = 8
_NOTHING = memoryview(b"")
_BUDGET_BYTES = 4 << 20
"""How much one link may move before others get their turn."""


class Handler(Protocol):
    """Who takes what a link brings."""

    def control(self, link: Link, frame: Frame, body: bytes) -> None:
        """A frame without data."""

    def destination(self, link: Link, frame: Frame) -> memoryview | None:
        """Where the data of a frame goes, or None to drop it."""

    def data(self, link: Link, frame: Frame, body: memoryview | None) -> None:
        """The data of a frame is there."""


class _Outgoing:
    """A frame on its way out."""

    __slots__ = ("_body", "_head", "begun", "owner")

    def __init__(self, head: memoryview, body: memoryview, owner: object) -> None:
        self._head = head
        self._body = body
        self.owner = owner
        self.begun = False

    def left(self) -> list[memoryview]:
        return [view for view in (self._head, self._body) if len(view)]

    @property
    def is_sent(self) -> bool:
        return not len(self._head) and not len(self._body)

    def advance(self, count: int) -> int:
        """Takes what was sent off; returns what is left of the count."""
        self.begun = True
        head = min(count, len(self._head))
        self._head = self._head[head:]
        body = min(count - head, len(self._body))
        self._body = self._body[body:]
        return count - head - body

    def detach(self) -> None:
        self._body = memoryview(bytes(self._body))
        self.owner = None


class Link:
    """A non-blocking connection with a queue."""

    def __init__(self, sock: socket.socket, peer_id: str, handler: Handler, *, local: bool) -> None:
        self.sock = sock
        self.peer_id = peer_id
        self.local = local
        self.linked = (0, False)
        """The last epoch that the other said it is ready in, and whether it could use shared memory there."""
        self.early: memoryview | None = None
        """Where a small piece goes that belongs to an operation not yet entered."""
        self.meter: Meter | None = None
        """Takes samples of what the link carries, if it leads to another host."""
        self.wants_write: Callable[[Link, bool], None] = lambda _link, _wants: None
        self._handler = handler
        self._receiver = Receiver(self)
        self._queue: deque[_Outgoing] = deque()
        self._writing = False
        self._scratch = memoryview(b"")

    # ----------------------------------------------------------------------------------------------------- out

    def send(self, frame: Frame, body: bytes = b"") -> None:
        """Queues a frame without data."""
        self._queue.append(_Outgoing(memoryview(frame.pack() + body), _NOTHING, None))

    def send_data(self, frame: Frame, view: memoryview, owner: object, *, around: bool = False) -> None:
        """Queues a piece of an operation's memory, to which `owner` holds on until `release`.

        `around`: it goes around the ring, as all else of the operation does.
        """
        if self.meter is not None:
            self.meter.traffic.queued(view.nbytes, around=around)
        self._queue.append(_Outgoing(memoryview(frame.pack()), view.cast("B"), owner))

    def pump(self) -> None:
        """Sends as much as the connection takes. Raises `OSError`."""
        sent = 0
        while self._queue and sent < _BUDGET_BYTES:
            views = [view for item in islice(self._queue, _FRAMES) for view in item.left()]
            try:
                count = self.sock.sendmsg(views)
            except BlockingIOError:
                if self.meter is not None:
                    self.meter.full()
                break
            sent += count
            while count:
                count = self._queue[0].advance(count)
                if self._queue[0].is_sent:
                    self._queue.popleft()
        if self.meter is not None and not self._queue:
            self.meter.drained()
        if bool(self._queue) != self._writing:
            self._writing = not self._writing
            self.wants_write(self, self._writing)

    def keep(self, owner: object) -> None:
        """Lets go of an owner's memory, but sends all that was queued, from copies."""
        for item in self._queue:
            if item.owner is owner:
                item.detach()

    def release(self, owner: object) -> None:
        """Lets go of an owner's memory: what has not begun is dropped, what has is sent on from a copy."""
        for item in self._queue:
            if item.owner is owner and item.begun:
                item.detach()
        self._queue = deque(item for item in self._queue if item.owner is not owner)

    # ------------------------------------------------------------------------------------------------------ in

    def pull(self) -> None:
        """Takes what has come. Raises `OSError` (also at the end of the stream) and `ProtocolError`."""
        taken = 0
        while taken < _BUDGET_BYTES:
            try:
                count = self.sock.recv_into(self._receiver.buffer())
            except BlockingIOError:
                return
            if not count:
                raise ConnectionError("the other side closed the connection")
            taken += count
            self._receiver.received(count)

    def scratch(self, length: int) -> memoryview:
        """Memory for the piece that is being received, until the next one."""
        if len(self._scratch) < length:
            self._scratch = memoryview(bytearray(length))
        return self._scratch[:length]

    def drop(self, matches: Callable[[Frame], bool]) -> None:
        """Drops the rest of such a frame, if it is just being received."""
        self._receiver.drop(matches)

    def control(self, frame: Frame, body: bytes) -> None:
        """A frame without data has come."""
        self._handler.control(self, frame, body)

    def destination(self, frame: Frame) -> memoryview | None:
        """Where its data goes."""
        return self._handler.destination(self, frame)

    def data(self, frame: Frame, body: memoryview | None) -> None:
        """Its data has come."""
        self._handler.data(self, frame, body)
