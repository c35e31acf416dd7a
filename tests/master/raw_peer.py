"""A client that says exactly what the test wants, over a plain socket."""

from __future__ import annotations

import socket
import time
from types import TracebackType
from typing import TypeVar

from ray_pccl.control import frames
from ray_pccl.control.endpoint import Endpoint
from ray_pccl.control.handshake import CHALLENGE_BYTES, DIGEST_BYTES, ClientSide
from ray_pccl.control.messages import Beat, Join, Message, Reply, StoreOp, StoreRequest, Welcome

M = TypeVar("M", bound=Message)
PATIENCE_S = 10.0


class RawPeer:
    """One connection to a master."""

    def __init__(self, endpoint: Endpoint, *, prove: bool = True, key: bytes | None = None) -> None:
        self.sock = socket.create_connection((endpoint.host, endpoint.port), timeout=PATIENCE_S)
        self._side = ClientSide(endpoint.key if key is None else key)
        self._reader = frames.FrameReader(at_master=False)
        self._messages: list[Message] = []
        self._number = -1
        if prove:
            self.sock.sendall(self._side.answer(self._exactly(CHALLENGE_BYTES)))
            self._side.verify(self._exactly(DIGEST_BYTES))
            self.welcome = self.receive(Welcome)

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sock.close()

    def send(self, *messages: Message) -> None:
        self.sock.sendall(b"".join(map(frames.encode, messages)))

    def receive(self, kind: type[M], timeout_s: float = PATIENCE_S) -> M:
        """The next message of this kind; others before it are dropped."""
        deadline = time.monotonic() + timeout_s
        while True:
            while self._messages:
                message = self._messages.pop(0)
                if isinstance(message, kind):
                    return message
            self.sock.settimeout(max(0.001, deadline - time.monotonic()))
            data = self.sock.recv(1 << 16)
            if not data:
                raise ConnectionError(f"closed before a {kind.__name__} came")
            self._messages += self._reader.feed(data)

    def join(self, peer_id: str, *, group: str = "g", minimum: int = 1) -> None:
        self.send(Join(peer_id, group, "h", minimum, None, None, 30.0, 0.0, False, None))

    def ask(
        self, op: StoreOp, *keys: str, values: tuple[bytes, ...] = (), amount: int = 0, timeout_s: float = 0.0
    ) -> Reply:
        """The store's answer."""
        self._number += 1
        self.send(StoreRequest(self._number, self._number, op, keys, values, amount, timeout_s))
        while (reply := self.receive(Reply)).number != self._number:
            pass
        return reply

    def is_served(self) -> bool:
        """Whether the master still answers on this connection."""
        self.told_by_now()
        return True

    def told_by_now(self) -> list[Message]:
        """All that the master has said on this connection up to now, and that was not received yet."""
        self.send(Beat(4711))
        told: list[Message] = []
        while not isinstance(message := self.receive(Message), Beat):
            told.append(message)
        return told

    def ends(self, timeout_s: float = PATIENCE_S) -> int | None:
        """Waits until the master closes the connection: how many bytes came before; None if it stays open."""
        deadline, count = time.monotonic() + timeout_s, 0
        while (left := deadline - time.monotonic()) > 0:
            self.sock.settimeout(left)
            try:
                data = self.sock.recv(1 << 20)
            except TimeoutError:
                return None
            except OSError:
                return count
            if not data:
                return count
            count += len(data)
        return None

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self.sock.recv(size - len(data))
            if not piece:
                raise ConnectionError("closed during the handshake")
            data += piece
        return data
