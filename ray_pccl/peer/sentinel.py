"""The sentinel: a tiny process, one for each host and master, that sees peers die before their sockets do.

The kernel closes a dying process's sockets only after it has freed its memory, and not at all while a forked child
holds them; a stopped process keeps them for ever. ``/proc/PID/stat`` tells at once: the flag PF_EXITING, the state T.
The sentinel reads it every few milliseconds and tells the master. It is started by the first peer of a host, and gone
with the last. It knows nothing of groups.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import sys
import time
from dataclasses import dataclass, field

import msgspec

from ray_pccl.control import frames
from ray_pccl.control.endpoint import Endpoint
from ray_pccl.control.handshake import CHALLENGE_BYTES, DIGEST_BYTES, ClientSide
from ray_pccl.control.messages import Beat, Message, ProcessState, Seen, Watch
from ray_pccl.errors import PCCLError

_PF_EXITING = 0x4
_CREDENTIALS = struct.Struct("3i")
_MAX_HELLO_BYTES = 4096
_DIAL_TIMEOUT_S = 0.5
_DIAL_EVERY_S = 0.2
FAREWELL_S = 10.0
"""With no peer left and the master away: how long to go on trying to report the last deaths."""


class Hello(msgspec.Struct, frozen=True):
    """A peer's opening: who it is, and whom to tell."""

    peer_id: str
    endpoint: str
    host: str
    look_every_s: float
    beat_every_s: float


def encode_hello(hello: Hello) -> bytes:
    """One line of JSON."""
    return msgspec.json.encode(hello) + b"\n"


def process_state(stat: int) -> ProcessState:
    """What the kernel says of the process behind an open ``/proc/PID/stat``."""
    try:
        text = os.pread(stat, 1024, 0)
    except ProcessLookupError:
        return ProcessState.EXITING
    # The name in parentheses may hold anything; state and flags are the 1st and 7th field behind it.
    fields = text[text.rindex(b")") + 2 :].split(maxsplit=7)
    if int(fields[6]) & _PF_EXITING:
        return ProcessState.EXITING
    return ProcessState.STOPPED if fields[0] in (b"T", b"t") else ProcessState.RUNNING


@dataclass(slots=True)
class Client:
    """A peer's connection to the sentinel; `stat` is its process, which no other can take the place of."""

    sock: socket.socket
    stat: int
    buffer: bytearray = field(default_factory=bytearray)
    peer_id: str | None = None
    endpoint: Endpoint | None = None
    state: ProcessState | None = None


class Sentinel:
    """Watches, reports, and ends with its last peer."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)
        self._clients: dict[socket.socket, Client] = {}
        self._unsent: list[Message] = []
        self._endpoint: Endpoint | None = None
        self._host = ""
        self._look_every_s = 0.005
        self._beat_every_s = 0.2
        self._master: socket.socket | None = None
        self._dial_next = 0.0
        self._beat_next = 0.0
        self._beats = 0

    def run(self) -> None:
        """Until the last peer is gone, and its end reported."""
        idle_since = time.monotonic()
        while True:
            now = time.monotonic()
            if self._clients:
                idle_since = now
            elif now - idle_since >= FAREWELL_S or (self._host and not self._unsent):
                return
            for key, _ in self._selector.select(self._look_every_s):
                self._readable(key.fileobj)
            self._look()
            self._talk(time.monotonic())

    # ---------------------------------------------------------------------------------------------------- peers

    def _readable(self, source: object) -> None:
        if source is self._listening:
            self._accept()
        elif source is self._master:
            self._drain_master()
        elif isinstance(source, socket.socket) and source in self._clients:
            self._read(self._clients[source])

    def _accept(self) -> None:
        sock, _ = self._listening.accept()
        pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        try:
            # pid 0: a process that this namespace can't see, so there is nothing to watch.
            if uid != os.getuid() or pid == 0:
                raise ProcessLookupError
            stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            sock.close()
            return
        sock.setblocking(False)
        self._clients[sock] = Client(sock, stat)
        self._selector.register(sock, selectors.EVENT_READ)

    def _read(self, client: Client) -> None:
        try:
            data = client.sock.recv(_MAX_HELLO_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        client.buffer += data
        if not data or len(client.buffer) > _MAX_HELLO_BYTES:
            self._look_at(client)
            self._drop(client)
            return
        while b"\n" in client.buffer:
            line, _, rest = client.buffer.partition(b"\n")
            client.buffer = rest
            try:
                self._greeted(client, msgspec.json.decode(line, type=Hello))
            except (msgspec.MsgspecError, PCCLError):
                self._drop(client)
                return

    def _greeted(self, client: Client, hello: Hello) -> None:
        moved = client.endpoint is not None and client.endpoint == self._endpoint
        client.endpoint = Endpoint.parse(hello.endpoint)
        if self._endpoint is None or (moved and client.endpoint != self._endpoint):
            self._endpoint = client.endpoint
            self._hang_up()
        self._host = hello.host
        self._look_every_s, self._beat_every_s = hello.look_every_s, hello.beat_every_s
        client.peer_id = hello.peer_id
        client.state = None
        self._look_at(client)
        # Only once the master was told does the peer count as watched.
        self._talk(time.monotonic())
        with contextlib.suppress(OSError):
            client.sock.send(b"\n")

    def _look(self) -> None:
        for client in list(self._clients.values()):
            self._look_at(client)
            if client.state is ProcessState.EXITING:
                self._drop(client)

    def _look_at(self, client: Client) -> None:
        state = process_state(client.stat)
        if state is not client.state and client.peer_id is not None:
            client.state = state
            self._unsent.append(Seen(client.peer_id, state))

    def _drop(self, client: Client) -> None:
        if self._clients.pop(client.sock, None) is not None:
            if client.peer_id is not None and client.state is not ProcessState.EXITING:
                self._unsent.append(Seen(client.peer_id, ProcessState.RELEASED))
            self._selector.unregister(client.sock)
            client.sock.close()
            os.close(client.stat)

    # --------------------------------------------------------------------------------------------------- master

    def _talk(self, now: float) -> None:
        if self._master is None and self._endpoint is not None and now >= self._dial_next:
            self._dial_next = now + _DIAL_EVERY_S
            if not self._dial(self._endpoint):
                self._endpoint = self._another_way()
        if self._master is None:
            return
        if now >= self._beat_next:
            self._beat_next = now + self._beat_every_s
            self._beats += 1
            self._send(Beat(self._beats, echo=False))
        while self._unsent and self._send(self._unsent[0]):
            del self._unsent[0]

    def _another_way(self) -> Endpoint | None:
        """Peers may know the master by different names, and not all may lead there."""
        ways = list(dict.fromkeys(client.endpoint for client in self._clients.values() if client.endpoint is not None))
        if self._endpoint in ways:
            return ways[(ways.index(self._endpoint) + 1) % len(ways)]
        return ways[0] if ways else self._endpoint

    def _dial(self, endpoint: Endpoint) -> bool:
        try:
            sock = socket.create_connection((endpoint.host, endpoint.port), timeout=_DIAL_TIMEOUT_S)
        except OSError:
            return False
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            handshake = ClientSide(endpoint.key)
            sock.sendall(handshake.answer(_receive(sock, CHALLENGE_BYTES)))
            handshake.verify(_receive(sock, DIGEST_BYTES))
        except (OSError, PCCLError):
            sock.close()
            return False
        self._master = sock
        self._selector.register(sock, selectors.EVENT_READ)
        # A master that is new to us has to hear of everyone; deaths that it missed are still in `_unsent`.
        known = [
            Seen(c.peer_id, c.state) for c in self._clients.values() if c.peer_id is not None and c.state is not None
        ]
        deaths = [m for m in self._unsent if isinstance(m, Seen) and m.state is ProcessState.EXITING]
        self._unsent = [Watch(self._host), *known, *deaths]
        return True

    def _send(self, message: Message) -> bool:
        if self._master is None:
            return False
        try:
            self._master.sendall(frames.encode(message))
        except OSError:
            self._hang_up()
            return False
        return True

    def _drain_master(self) -> None:
        assert self._master is not None
        try:
            data = self._master.recv(1 << 16)
        except TimeoutError:
            return
        except OSError:
            data = b""
        if not data:
            self._hang_up()

    def _hang_up(self) -> None:
        if self._master is not None:
            self._selector.unregister(self._master)
            self._master.close()
            self._master = None


def _receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise ConnectionError("the master closed the connection during the handshake")
        data += piece
    return data


def main(address: str) -> None:
    """Becomes the sentinel at this address, detached from whoever started it; returns if there is one already."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(address)
    except OSError:
        return
    listening.listen(256)
    # The one that waits for us goes on now; we belong to no peer, so that none takes us along when it ends.
    if os.fork():
        os._exit(0)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    Sentinel(listening).run()


if __name__ == "__main__":
    main("\0" + sys.argv[1])
