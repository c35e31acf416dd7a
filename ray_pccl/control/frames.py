"""Messages as bytes: four bytes of length, then msgpack.

The length is checked before a byte of the body is awaited, so the most that a connection can make us hold is one frame.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from ray_pccl.control import messages
from ray_pccl.errors import ProtocolError

MAX_FRAME_BYTES = 8 << 20
_LENGTH = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()
_from_master: msgspec.msgpack.Decoder[messages.FromMaster] = msgspec.msgpack.Decoder(messages.FromMaster)
_to_master: msgspec.msgpack.Decoder[messages.ToMaster] = msgspec.msgpack.Decoder(messages.ToMaster)


def encode(message: messages.Message) -> bytes:
    """The frame of a message. Raises `ProtocolError` if it is larger than a receiver would take."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"a {type(message).__name__} of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}; "
            "send large values over the data plane, not through the master"
        )
    return _LENGTH.pack(len(body)) + body


def check(message: messages.FromPeer) -> None:
    """Raises `ProtocolError` for a message of ours that the master would not take: too large, or of wrong types."""
    try:
        _to_master.decode(encode(message)[_LENGTH.size :])
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"this can't be sent to the master: {error}") from None


class FrameReader:
    """Cuts a stream of bytes into messages. Feed it what arrives; it keeps at most one unfinished frame."""

    def __init__(self, *, at_master: bool) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = _to_master if at_master else _from_master
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[Any]:
        """The messages that are complete now. Raises `ProtocolError`; the connection is then to be dropped."""
        if not self._buffer and len(data) > _LENGTH.size and _LENGTH.unpack_from(data)[0] == len(data) - _LENGTH.size:
            return [self._decode(data[_LENGTH.size :])]  # one frame and nothing else: the common case, a beat
        self._buffer += data
        complete: list[Any] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            complete.append(self._decode(bytes(self._buffer[start + _LENGTH.size : end])))
            start = end
        del self._buffer[:start]
        return complete

    def _decode(self, body: bytes | memoryview) -> Any:
        if len(body) > MAX_FRAME_BYTES:
            raise ProtocolError(f"a frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"not a message: {error}") from None
