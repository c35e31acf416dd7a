"""Frames between two peers: a fixed head, then a body. Sans I/O: bytes go in, frames come out.

Nothing is allocated for a length that was not checked. The body of a data frame goes straight to where the operation
wants it; the bodies of all others are small.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from ray_pccl.errors import ProtocolError

HEAD = struct.Struct("<BxxxIqqqq")
PIECE_BYTES = 1 << 20
"""The largest body of a data frame: large messages are cut, so that operations in flight take turns."""
CONTROL_BYTES = 1 << 16
_STAGING_BYTES = 1 << 16
_SLOT_BITS = 40
_OFFSET_MASK = (1 << _SLOT_BITS) - 1


class Type(IntEnum):
    """What a frame says."""

    LINKED = 1
    """I am in this epoch, hold a link to everyone, and have left every operation of the one before."""
    ENTER = 2
    """I have entered the operation; the body is its header."""
    DATA = 3
    PREPARED = 4
    REFUSE = 5
    """I have failed the operation before I was prepared; the body says why."""
    OFFER = 6
    """Point to point: I have a message for you; the body is its header."""
    ACCEPT = 7
    MESSAGE = 8
    """Point to point: a piece of it."""
    TAKEN = 9
    """Point to point: I hold all of it."""
    DECLINE = 10
    """Point to point: I expect something else; the body says what."""
    PAST = 11
    """I have finished these operations; the body lists them."""
    GRANT = 12
    """Delegated: the next operation that the other library does; the body is the generation of its group."""
    KEY = 13
    """Delegated: a key, with its value, that a group of this generation (`number`) needs to be built."""


_WITH_DATA = (Type.DATA, Type.MESSAGE)


@dataclass(frozen=True, slots=True)
class Frame:
    """The head of a frame. `slot` and `offset` say which part of the operation a piece is."""

    type: Type
    length: int
    epoch: int
    tag: int = 0
    number: int = 0
    slot: int = 0
    offset: int = 0

    def pack(self) -> bytes:
        """Its bytes."""
        where = self.slot << _SLOT_BITS | self.offset
        return HEAD.pack(self.type, self.length, self.epoch, self.tag, self.number, where)


def parse(head: bytes | memoryview) -> Frame:
    """The frame of these bytes, or `ProtocolError`."""
    kind, length, epoch, tag, number, where = HEAD.unpack(head)
    try:
        type_ = Type(kind)
    except ValueError:
        raise ProtocolError(f"a frame of unknown type {kind}") from None
    if length > (PIECE_BYTES if type_ in _WITH_DATA else CONTROL_BYTES):
        raise ProtocolError(f"a {type_.name} frame of {length} bytes is over the limit")
    if min(epoch, tag, number, where) < 0:
        raise ProtocolError(f"a {type_.name} frame with a negative number")
    return Frame(type_, length, epoch, tag, number, where >> _SLOT_BITS, where & _OFFSET_MASK)


class Sink(Protocol):
    """Who takes the frames of a link."""

    def control(self, frame: Frame, body: bytes) -> None:
        """A frame without data has come."""

    def destination(self, frame: Frame) -> memoryview | None:
        """Where the data of a frame shall go: exactly its length; None to have it dropped."""

    def data(self, frame: Frame, body: memoryview | None) -> None:
        """All data of a frame has come, to where `destination` said."""


class Receiver:
    """Cuts a stream into frames. Receive into `buffer()`, then say how much came with `received(n)`."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._staging = memoryview(bytearray(_STAGING_BYTES + HEAD.size))
        self._filled = 0
        self._frame: Frame | None = None
        self._body = memoryview(b"")
        self._wanted: memoryview | None = None
        self._have = 0
        self._scrap = memoryview(bytearray(_STAGING_BYTES))

    def buffer(self) -> memoryview:
        """Where the next bytes go."""
        if self._frame is None:
            return self._staging[self._filled :]
        left = self._frame.length - self._have
        return self._scrap[:left] if self._wanted is None else self._body[self._have :]

    def received(self, count: int) -> None:
        """`count` bytes have come. Raises `ProtocolError`: the link is of no use any more."""
        if self._frame is None:
            self._filled += count
            self._cut()
        else:
            self._have += count
            self._finish_if_whole()

    def drop(self, matches: Callable[[Frame], bool]) -> None:
        """Has the rest of the data of such a frame dropped: whoever owns the memory takes it back."""
        if self._frame is not None and matches(self._frame):
            self._wanted, self._body = None, memoryview(b"")

    def _cut(self) -> None:
        at, end = 0, self._filled
        while end - at >= HEAD.size:
            frame = parse(self._staging[at : at + HEAD.size])
            if frame.type not in _WITH_DATA:
                if end - at < HEAD.size + frame.length:
                    break
                body = bytes(self._staging[at + HEAD.size : at + HEAD.size + frame.length])
                at += HEAD.size + frame.length
                self._sink.control(frame, body)
                continue
            at += HEAD.size
            self._begin(frame)
            part = min(frame.length, end - at)
            if self._wanted is not None:
                self._body[:part] = self._staging[at : at + part]
            self._have = part
            at += part
            self._finish_if_whole()
        self._staging[: end - at] = bytes(self._staging[at:end])
        self._filled = end - at

    def _begin(self, frame: Frame) -> None:
        wanted = self._sink.destination(frame)
        if wanted is not None and wanted.nbytes != frame.length:
            raise ProtocolError(f"a piece of {frame.length} bytes where {wanted.nbytes} are due")
        self._frame, self._wanted, self._have = frame, wanted, 0
        self._body = memoryview(b"") if wanted is None else wanted.cast("B")

    def _finish_if_whole(self) -> None:
        frame = self._frame
        if frame is not None and self._have == frame.length:
            wanted, self._frame, self._wanted, self._body = self._wanted, None, None, memoryview(b"")
            self._sink.data(frame, wanted)
