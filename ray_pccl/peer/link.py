"""One TCP connection of a peer to its master: the handshake, then messages."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from typing import Protocol

from ray_pccl.control import frames
from ray_pccl.control.handshake import CHALLENGE_BYTES, DIGEST_BYTES, ClientSide
from ray_pccl.control.messages import FromMaster, Message, Welcome
from ray_pccl.errors import AuthenticationError, PCCLError, ProtocolError

log = logging.getLogger("ray_pccl.peer")
_numbers = itertools.count()


class Owner(Protocol):
    """What a link needs of who made it."""

    def received(self, link: Link, message: FromMaster) -> None:
        """A message came from the master."""

    def lost(self, link: Link) -> None:
        """The connection is gone."""


class Link(asyncio.Protocol):
    """One TCP connection: the handshake, then messages."""

    def __init__(self, owner: Owner, sock: socket.socket, key: bytes) -> None:
        self._owner = owner
        self._handshake = ClientSide(key)
        self._pending = bytearray()
        self._answered = False
        self._reader: frames.FrameReader | None = None
        self._transport: asyncio.Transport | None = None
        self.sock = sock
        self.number = next(_numbers)
        """Links are numbered in the order they were made."""
        self.welcomed: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            if self._reader is None:
                data = self._prove(data)
            if self._reader is not None and data:
                for message in self._reader.feed(data):
                    if not self.welcomed.done() and isinstance(message, Welcome):
                        self.welcomed.set_result(message)
                    else:
                        self._owner.received(self, message)
        except (ProtocolError, AuthenticationError) as error:
            self._broken(error)

    def _prove(self, data: bytes) -> bytes:
        self._pending += data
        if not self._answered and len(self._pending) >= CHALLENGE_BYTES:
            challenge = bytes(self._pending[:CHALLENGE_BYTES])
            del self._pending[:CHALLENGE_BYTES]
            assert self._transport is not None
            self._transport.write(self._handshake.answer(challenge))
            self._answered = True
        if not self._answered or len(self._pending) < DIGEST_BYTES:
            return b""
        self._handshake.verify(bytes(self._pending[:DIGEST_BYTES]))
        self._reader = frames.FrameReader(at_master=False)
        return bytes(self._pending[DIGEST_BYTES:])

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.welcomed.done():
            refused = self._answered and self._reader is None
            error = AuthenticationError("the master does not accept this endpoint's key") if refused else None
            self.welcomed.set_exception(error or ConnectionError("the master closed the connection"))
        self._owner.lost(self)

    def _broken(self, error: PCCLError) -> None:
        if not self.welcomed.done():
            self.welcomed.set_exception(error)
        log.warning("dropped the connection to the master: %s", error)
        self.abort()

    def send(self, message: Message) -> None:
        """Queues a message."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frames.encode(message))

    def close(self) -> None:
        """Ends the connection after what was sent has left."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Ends the connection at once."""
        if self._transport is not None:
            self._transport.abort()
