"""One connection to the master: first a stranger, then a peer or a sentinel. It decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, Protocol

from ray_pccl.control import frames
from ray_pccl.control.endpoint import Endpoint
from ray_pccl.control.handshake import ANSWER_BYTES, MasterSide
from ray_pccl.errors import AuthenticationError, ProtocolError

log = logging.getLogger("ray_pccl.master")

HANDSHAKE_TIMEOUT_S = 5.0
"""How long a connection may take to prove the key and say who it is, and one that was told to go, to go."""
MAX_UNSENT_BYTES = 32 << 20
"""A peer that reads nothing is dropped when this much waits for it."""


class Owner(Protocol):
    """What a connection needs of its server."""

    endpoint: Endpoint

    def admit_stranger(self, connection: Connection) -> bool:
        """Whether one more connection may try to prove the key."""

    def accepted(self, connection: Connection) -> None:
        """A connection proved the key."""

    def received(self, connection: Connection, message: Any) -> None:
        """A message came on a connection that proved the key."""

    def lost(self, connection: Connection) -> None:
        """A connection is gone."""


class Connection(asyncio.Protocol):
    """One connection: first a stranger, then a peer or a sentinel."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._handshake = MasterSide(owner.endpoint.key)
        self._answer = bytearray()
        self._reader: frames.FrameReader | None = None
        self._transport: asyncio.Transport | None = None
        self._timeout: asyncio.TimerHandle | None = None
        self.who = "a stranger"
        self.peer_id: str | None = None
        self.dial = 0
        self.host: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.who = f"{transport.get_extra_info('peername')}"
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        if not self._owner.admit_stranger(self):
            self.drop("the master ends")
            return
        self._timeout = asyncio.get_running_loop().call_later(
            HANDSHAKE_TIMEOUT_S, self.drop, f"it did not say who it is within {HANDSHAKE_TIMEOUT_S:g} s"
        )
        transport.write(self._handshake.challenge)

    def data_received(self, data: bytes) -> None:
        try:
            if self._reader is None:
                data = self._authenticate(data)
            if self._reader is not None and data:
                for message in self._reader.feed(data):
                    self._owner.received(self, message)
        except (ProtocolError, AuthenticationError) as error:
            self.drop(str(error))

    def _authenticate(self, data: bytes) -> bytes:
        """Takes what belongs to the handshake and returns the rest."""
        needed = ANSWER_BYTES - len(self._answer)
        self._answer += data[:needed]
        if len(self._answer) == ANSWER_BYTES:
            assert self._transport is not None
            self._transport.write(self._handshake.accept(bytes(self._answer)))
            self._reader = frames.FrameReader(at_master=True)
            self._owner.accepted(self)
        return data[needed:]

    def introduce(self, who: str) -> None:
        """The other side has said who it is."""
        self.who = who
        if self._timeout is not None:
            self._timeout.cancel()

    def show_out(self) -> None:
        """The other side was told to go; if it does not, its connection is ended."""
        if self._timeout is not None:
            self._timeout.cancel()
        assert self._transport is not None
        self._timeout = asyncio.get_running_loop().call_later(HANDSHAKE_TIMEOUT_S, self._transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
        self._owner.lost(self)

    def send(self, data: bytes) -> None:
        """Queues bytes; a peer that takes none of them is dropped before they pile up."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.drop(f"it left {MAX_UNSENT_BYTES >> 20} MiB unread")
            return
        self._transport.write(data)

    def drop(self, why: str) -> None:
        """Ends the connection at once, with one line in the log."""
        if self._transport is not None and not self._transport.is_closing():
            log.warning("dropped the connection of %s: %s", self.who, why)
            self._transport.abort()

    def abort(self) -> None:
        """Ends the connection at once, and says nothing."""
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Ends the connection after what was sent has left, even if a forked child still holds it."""
        if self._transport is not None and not self._transport.is_closing():
            with contextlib.suppress(OSError):  # the other side may have reset it, unseen as yet
                self._transport.write_eof()
            self._transport.close()
