"""How two peers come to hold a link: where they listen, who dials, and what each proves before a byte of data is read.

The one with the larger id dials. It tries the other's Unix socket first: if that answers, both are on one host, and the
memory for shared-memory operations goes across with it. Everything here blocks, in threads of its own, with short time
limits, so that whoever connects and says nothing holds up nobody.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

from ray_pccl.control.handshake import ANSWER_BYTES, CHALLENGE_BYTES, DIGEST_BYTES, ClientSide, MasterSide
from ray_pccl.errors import ProtocolError, SettingsError

HANDSHAKE_TIMEOUT_S = 10.0
"""Long, since the other side may be importing something large, which holds its interpreter."""
CONNECT_TIMEOUT_S = 2.0
MAX_ID_BYTES = 512
FDS = 3
"""What goes across with an introduction on one host: segment, bell, arena."""
TRANSPORTS = ("auto", "shm", "tcp")
_LONGEST_UNIX_NAME = 80
"""The kernel takes 107 bytes, with what stands before the name."""
_LENGTH = struct.Struct(">H")
_CREDENTIALS = struct.Struct("3i")
_SOCKET_BUFFER = 4 << 20

Hold = Callable[[socket.socket], None]


def _forget(sock: socket.socket) -> None:
    pass


def transport_from_env() -> str:
    """What ``RAY_PCCL_TRANSPORT`` asks for."""
    transport = os.environ.get("RAY_PCCL_TRANSPORT", "auto").strip().lower()
    if transport not in TRANSPORTS:
        raise SettingsError(f"RAY_PCCL_TRANSPORT={transport!r} must be one of {', '.join(TRANSPORTS)}")
    return transport


def data_key(key: bytes, group: str) -> bytes:
    """The key of a group's data connections, which only who holds the master's key can make."""
    return hmac.digest(key, b"ray_pccl data " + group.encode(), "sha256")


def address_towards(host: str, port: int) -> str:
    """This machine's own address on the way to another: the one to listen at, never the wildcard."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


@dataclass(frozen=True, slots=True)
class Address:
    """Where a peer's data plane listens, as members learn it from the master."""

    name: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.name} {self.host} {self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """The address of this text, or `ProtocolError`."""
        parts = text.rsplit(" ", 2)  # a name begins with the user's label, which may have spaces
        if len(parts) != 3 or not parts[2].isdigit():
            raise ProtocolError(f"{text!r} is no data address")
        return cls(parts[0], parts[1], int(parts[2]))

    @property
    def unix(self) -> str:
        """The abstract Unix socket: it has no file, and exists for this network namespace only."""
        name = self.name
        if len(name.encode()) > _LONGEST_UNIX_NAME:  # a long host name is enough for that
            name = hashlib.sha256(name.encode()).hexdigest()
        return f"\0ray_pccl-data/{name}"


@dataclass(slots=True)
class Meeting:
    """A connection whose other side has proved the key."""

    sock: socket.socket
    peer_id: str
    fds: list[int]
    """The other's memory, if both sides showed theirs."""
    local: bool


def listen(name: str, host: str) -> tuple[list[socket.socket], Address]:
    """Listens on a Unix socket and on this node's own address."""
    local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    remote = socket.socket(family, socket.SOCK_STREAM)
    try:
        remote.bind((host, 0))
        address = Address(name, host, remote.getsockname()[1])
        local.bind(address.unix)
        for sock in (local, remote):
            sock.listen(128)
    except BaseException:
        local.close()
        remote.close()
        raise
    return [local, remote], address


def connect(address: Address, transport: str, hold: Hold = _forget) -> tuple[socket.socket, bool]:
    """A connection, over which nothing was said yet, and whether it is one within this host. Raises `OSError`.

    `hold` is given every socket as soon as there is one, for who has to know of them all.
    """
    if transport != "tcp":
        with contextlib.suppress(OSError):
            return _connected(socket.AF_UNIX, address.unix, hold), True
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    return _connected(family, (address.host, address.port), hold), False


def _connected(family: socket.AddressFamily, to: str | tuple[str, int], hold: Hold) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        hold(sock)
        sock.settimeout(CONNECT_TIMEOUT_S)
        sock.connect(to)
    except BaseException:
        sock.close()
        raise
    return sock


def dial(address: Address, transport: str, key: bytes, peer_id: str, fds: list[int], hold: Hold = _forget) -> Meeting:
    """Connects to a peer. Raises `OSError`, `ProtocolError`, `AuthenticationError`."""
    sock, local = connect(address, transport, hold)
    return greet(sock, key, peer_id, fds if local else [])


def greet(
    sock: socket.socket, key: bytes, peer_id: str, fds: list[int], timeout_s: float = HANDSHAKE_TIMEOUT_S
) -> Meeting:
    """Proves the key to the other end of a new connection, and hears who that is. Closes the socket if it raises."""
    local = sock.family == socket.AF_UNIX
    try:
        sock.settimeout(timeout_s)
        side = ClientSide(key)
        sock.sendall(side.answer(_exactly(sock, CHALLENGE_BYTES)))
        side.verify(_exactly(sock, DIGEST_BYTES))
        _introduce(sock, peer_id, fds)
        other, theirs = _hear(sock, local=local)
    except BaseException:
        sock.close()
        raise
    return Meeting(_tuned(sock, local=local), other, theirs, local)


def accept(sock: socket.socket, key: bytes, peer_id: str, fds: list[int]) -> Meeting:
    """The other end of `dial`. Closes the socket if it raises."""
    local = sock.family == socket.AF_UNIX
    try:
        sock.settimeout(HANDSHAKE_TIMEOUT_S)
        if local and _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1] != os.getuid():
            raise ProtocolError("a process of another user connected")
        side = MasterSide(key)
        sock.sendall(side.challenge)
        sock.sendall(side.accept(_exactly(sock, ANSWER_BYTES)))
        other, theirs = _hear(sock, local=local)
        _introduce(sock, peer_id, fds if theirs else [])
    except BaseException:
        sock.close()
        raise
    return Meeting(_tuned(sock, local=local), other, theirs, local)


def _introduce(sock: socket.socket, peer_id: str, fds: list[int]) -> None:
    name = peer_id.encode()
    hello = _LENGTH.pack(len(name)) + name
    if fds:
        socket.send_fds(sock, [hello], fds)
    else:
        sock.sendall(hello)


def _hear(sock: socket.socket, *, local: bool) -> tuple[str, list[int]]:
    fds: list[int] = []
    try:
        if local:
            data, fds, _, _ = socket.recv_fds(sock, 1, FDS)
        else:
            data = sock.recv(1)
        if not data:
            raise ConnectionError("the peer closed the connection")
        (length,) = _LENGTH.unpack(data + _exactly(sock, _LENGTH.size - 1))
        if not 0 < length <= MAX_ID_BYTES:
            raise ProtocolError(f"a peer id of {length} bytes")
        return _exactly(sock, length).decode(), fds
    except BaseException as error:
        close_all(fds)
        if isinstance(error, UnicodeDecodeError):
            raise ProtocolError("a peer id that is no text") from None
        raise


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise ConnectionError("the peer closed the connection")
        data += more
    return data


def _tuned(sock: socket.socket, *, local: bool) -> socket.socket:
    if local:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
    else:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setblocking(False)
    return sock


def close_all(fds: list[int]) -> None:
    """Closes descriptors that came over a socket."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
