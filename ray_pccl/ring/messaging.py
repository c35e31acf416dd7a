"""Point to point: one message from one member to another. Lives in the mesh's thread.

The sender offers, the receiver accepts when it has memory for it, the data follows, the receiver says that it holds all
of it. Both sides number the messages of a tag, so after a new epoch the same offer is simply made again, and one that
was taken before is answered for. A message is not a collective: only its two ends take part, and nobody else decides.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

from ray_pccl.errors import CollectiveMismatchError, OperationTimeoutError, PCCLError, PeerLostError, UsageError
from ray_pccl.ring.link import Link
from ray_pccl.ring.segment import Bytes
from ray_pccl.ring.task import Epoch
from ray_pccl.ring.wire import PIECE_BYTES, Frame, Type

Way = tuple[str, int]
"""The other peer and the tag."""


class Links(Protocol):
    """What messages need of the plane."""

    def link_to(self, peer_id: str) -> Link | None:
        """The link to a peer."""

    def flush(self, link: Link) -> None:
        """Sends what is queued."""

    @property
    def ending(self) -> PCCLError | None:
        """Why there is no plane any more."""


class Transfer:
    """One message, at either end."""

    def __init__(self, way: Way, memory: Bytes, about: str, deadline: float) -> None:
        self.way = way
        self.memory = memory
        self.about = about
        self.deadline = deadline
        self.number = -1
        self.moving = False
        self.is_open = False
        """Whether it is a receive from anyone, bound to a sender or not yet."""
        self.due = len(memory)
        self.error: PCCLError | None = None
        self.ended = threading.Event()

    def end(self, error: PCCLError | None) -> None:
        """Ends the wait of its caller."""
        if not self.ended.is_set():
            self.error = error
            self.ended.set()


class Messages:
    """All messages of a communicator."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._epoch: Epoch | None = None
        self._ready = False
        self._sends: dict[Way, Transfer] = {}
        self._receives: dict[Way, Transfer] = {}
        self._open: dict[int, deque[Transfer]] = {}
        """By tag, receives from whoever sends first: with its offer they become a receive from that peer."""
        self._offers: dict[Way, tuple[int, str]] = {}
        self._sent: dict[Way, int] = {}
        self._taken: dict[Way, int] = {}

    # ------------------------------------------------------------------------------------------ what callers want

    def post_send(self, transfer: Transfer) -> None:
        """A message is to be sent."""
        if self._claim(self._sends, transfer, "send()"):
            # A number is never used again: the receiver may have taken a message whose sender gave up waiting for it.
            transfer.number = self._sent.get(transfer.way, 0)
            self._sent[transfer.way] = transfer.number + 1
            self._offer(transfer)

    def post_receive(self, transfer: Transfer) -> None:
        """A message is to be received."""
        if self._claim(self._receives, transfer, "recv()"):
            self._match(transfer.way)

    def post_open_receive(self, transfer: Transfer) -> None:
        """A message is to be received from any member."""
        if self._links.ending is not None:
            transfer.end(self._links.ending)
            return
        transfer.is_open = True
        self._open.setdefault(transfer.way[1], deque()).append(transfer)
        for way in list(self._offers):
            self._match(way)

    def end_all(self, error: PCCLError) -> None:
        """Nobody is to wait any more."""
        for posted in (self._sends, self._receives):
            for way, transfer in list(posted.items()):
                del posted[way]
                self._let_go(transfer)
                if posted is self._sends:
                    self._say(way, Type.DECLINE, transfer.number)
                transfer.end(error)
        self._end_open(error)

    def _end_open(self, error: PCCLError) -> None:
        for waiting in self._open.values():
            for transfer in waiting:
                transfer.end(error)
        self._open.clear()

    def _reopen(self, way: Way) -> bool:
        """A receive from anyone whose sender does not go on is one from anyone again. Whether it was one."""
        receive = self._receives.get(way)
        if receive is None or not receive.is_open:
            return False
        del self._receives[way]
        self._let_go(receive)
        receive.moving, receive.due = False, len(receive.memory)
        self._open.setdefault(way[1], deque()).appendleft(receive)
        return True

    def _claim(self, posted: dict[Way, Transfer], transfer: Transfer, what: str) -> bool:
        peer_id, tag = transfer.way
        if self._links.ending is not None:
            transfer.end(self._links.ending)
        elif self._epoch is not None and peer_id not in self._epoch.members:
            transfer.end(_lost(peer_id, what))
        elif transfer.way in posted:
            transfer.end(UsageError(f"a {what} with peer {peer_id} and tag {tag} is in flight already"))
        else:
            posted[transfer.way] = transfer
            return True
        return False

    def cancel(self, transfer: Transfer) -> None:
        """Nobody waits for it any more: its memory is let go of, and an offer taken back."""
        for posted in (self._sends, self._receives):
            if posted.get(transfer.way) is transfer:
                del posted[transfer.way]
                self._let_go(transfer)
                if posted is self._sends:
                    self._say(transfer.way, Type.DECLINE, transfer.number)
        waiting = self._open.get(transfer.way[1], ())
        if transfer in waiting:
            self._open[transfer.way[1]].remove(transfer)
        transfer.end(UsageError("the call was interrupted"))

    # ------------------------------------------------------------------------------------------- what happens

    def move(self, epoch: Epoch) -> None:
        """A new epoch: messages to and from who is gone fail, the others begin anew when it is ready."""
        self._epoch, self._ready = epoch, False
        self._offers.clear()
        for way in list(self._receives):
            self._reopen(way)
        for posted, what in ((self._sends, "send()"), (self._receives, "recv()")):
            for way, transfer in list(posted.items()):
                self._let_go(transfer)
                transfer.moving, transfer.due = False, len(transfer.memory)
                if way[0] not in epoch.members:
                    del posted[way]
                    transfer.end(_lost(way[0], what))
        if epoch.size == 1:
            self._end_open(PeerLostError("recv(): no other member is left", peers=(), reason="all are gone"))

    def resume(self) -> None:
        """All members are in the epoch."""
        self._ready = True
        for transfer in self._sends.values():
            self._offer(transfer)

    def tick(self, now: float) -> None:
        """Ends who waits for too long for the other side, or for a plane that is no more."""
        for posted, what in ((self._sends, "send()"), (self._receives, "recv()")):
            for way, transfer in list(posted.items()):
                late = now >= transfer.deadline and not transfer.moving
                if not late and self._links.ending is None:
                    continue
                del posted[way]
                self._let_go(transfer)
                if late and what == "send()":
                    self._say(way, Type.DECLINE, transfer.number)
                transfer.end(self._links.ending or _late(way, what))
        for tag, waiting in self._open.items():
            for transfer in [each for each in waiting if now >= each.deadline or self._links.ending is not None]:
                waiting.remove(transfer)
                transfer.end(self._links.ending or _late(("any", tag), "recv()"))

    def control(self, link: Link, frame: Frame, body: bytes) -> None:
        """A frame about a message."""
        way = (link.peer_id, frame.tag)
        match frame.type:
            case Type.OFFER:
                if frame.number < self._taken.get(way, 0):
                    self._say(way, Type.TAKEN, frame.number)
                else:
                    self._offers[way] = (frame.number, body.decode(errors="replace"))
                    self._match(way)
            case Type.ACCEPT:
                self._push(way, frame)
            case Type.TAKEN:
                self._settle(way, frame.number, None)
            case Type.DECLINE if body:
                text = body.decode(errors="replace")
                self._settle(way, frame.number, CollectiveMismatchError(text, calls={}))
            case Type.DECLINE:
                self._withdrawn(way)

    def _match(self, way: Way) -> None:
        receive, offer = self._receives.get(way), self._offers.get(way)
        if offer is None:
            return
        if receive is None:
            waiting = self._open.get(way[1])
            if not waiting:
                return
            receive = waiting.popleft()
            receive.way = way
            self._receives[way] = receive
        del self._offers[way]
        number, about = offer
        receive.number = number
        if about != receive.about:
            text = f"peer {way[0]} sends {about} with tag {way[1]}, and the receiver expects {receive.about}"
            self._say(way, Type.DECLINE, number, text.encode())
            self._taken[way] = number + 1
            del self._receives[way]
            receive.end(CollectiveMismatchError(text, calls={}))
            return
        receive.moving = True
        self._say(way, Type.ACCEPT, number)
        self._take_if_whole(receive)

    def _push(self, way: Way, frame: Frame) -> None:
        transfer, link = self._sends.get(way), self._links.link_to(way[0])
        if transfer is None or link is None or transfer.number != frame.number or transfer.moving:
            return
        transfer.moving = True
        view = transfer.memory.data
        for offset in range(0, len(view), PIECE_BYTES):
            piece = view[offset : offset + PIECE_BYTES]
            head = Frame(Type.MESSAGE, len(piece), frame.epoch, frame.tag, frame.number, 0, offset)
            link.send_data(head, piece, transfer)
        self._links.flush(link)

    def destination(self, link: Link, frame: Frame) -> memoryview | None:
        """Where a piece goes."""
        receive = self._receives.get((link.peer_id, frame.tag))
        if receive is None or not receive.moving or receive.number != frame.number:
            return None
        if frame.offset + frame.length > len(receive.memory) or frame.length > receive.due:
            return None
        return receive.memory.data[frame.offset : frame.offset + frame.length]

    def data(self, link: Link, frame: Frame, body: memoryview) -> None:
        """A piece has come."""
        receive = self._receives.get((link.peer_id, frame.tag))
        if receive is not None and receive.number == frame.number:
            receive.due -= body.nbytes
            self._take_if_whole(receive)

    def _take_if_whole(self, receive: Transfer) -> None:
        if not receive.due:
            del self._receives[receive.way]
            self._taken[receive.way] = receive.number + 1
            self._say(receive.way, Type.TAKEN, receive.number)
            receive.end(None)

    def _settle(self, way: Way, number: int, error: PCCLError | None) -> None:
        transfer = self._sends.get(way)
        if transfer is not None and transfer.number == number:
            del self._sends[way]
            self._let_go(transfer)
            transfer.end(error)

    def _withdrawn(self, way: Way) -> None:
        self._offers.pop(way, None)
        receive = self._receives.get(way)
        if self._reopen(way):
            for other in list(self._offers):
                self._match(other)
        elif receive is not None:
            receive.moving, receive.due = False, len(receive.memory)

    def _offer(self, transfer: Transfer) -> None:
        if self._ready:
            self._say(transfer.way, Type.OFFER, transfer.number, transfer.about.encode())

    def _let_go(self, transfer: Transfer) -> None:
        link = self._links.link_to(transfer.way[0])
        if link is not None:
            link.release(transfer)
            tag, number = transfer.way[1], transfer.number
            link.drop(lambda frame: frame.type is Type.MESSAGE and (frame.tag, frame.number) == (tag, number))

    def _say(self, way: Way, type_: Type, number: int, body: bytes = b"") -> None:
        link = self._links.link_to(way[0])
        if link is not None and self._epoch is not None and number >= 0:
            link.send(Frame(type_, len(body), self._epoch.number, way[1], number), body)
            self._links.flush(link)


def _lost(peer_id: str, what: str) -> PeerLostError:
    return PeerLostError(f"{what}: peer {peer_id} is no member any more", peers=(peer_id,), reason="it is gone")


def _late(way: Way, what: str) -> OperationTimeoutError:
    text = f"{what}: peer {way[0]} did not come to meet it under tag {way[1]} in time"
    return OperationTimeoutError(text, calls={way[0]: "nothing that fits"})
