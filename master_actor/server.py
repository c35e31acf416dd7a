"""The master on the network: sockets, time and the journal around the core. It decides nothing.

One asyncio loop serves all connections. What the core wants sent leaves only after what it wants remembered is durable.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from master_actor.core.actions import (
    Action,
    Append,
    Disconnected,
    Event,
    EvictionRequested,
    Received,
    SentinelGone,
    SentinelSaid,
    StopRequested,
    Tick,
)
from master_actor.core.master import Master
from master_actor.core.records import (
    Booted,
    Durable,
    decode_records,
    decode_snapshot,
    encode_records,
    encode_snapshot,
)
from master_actor.journal import Journal, Superseded
from ray_pccl.control import frames
from ray_pccl.control.endpoint import Endpoint, new_key
from ray_pccl.control.handshake import ANSWER_BYTES, MasterSide
from ray_pccl.control.messages import (
    Beat,
    Evicted,
    Join,
    Message,
    Refused,
    Register,
    Seen,
    ToMaster,
    Watch,
    Welcome,
)
from ray_pccl.errors import AuthenticationError, MasterError, ProtocolError
from ray_pccl.settings import Settings

log = logging.getLogger("ray_pccl.master")

TICK_S = 0.02
HANDSHAKE_TIMEOUT_S = 5.0
MAX_STRANGERS = 4096
"""Connections that have not proved the key yet; more are dropped as they come."""
MAX_UNSENT_BYTES = 32 << 20
"""A peer that reads nothing is dropped when this much waits for it."""
SNAPSHOT_EVERY = 1000
VERIFY_S = 5.0
"""How often an idle master makes sure that it still is the master."""
BOOT_ATTEMPTS = 10
CLOSE_TIMEOUT_S = 1.0


class Connection(asyncio.Protocol):
    """One connection: first a stranger, then a peer or a sentinel."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._handshake = MasterSide(server.endpoint.key)
        self._answer = bytearray()
        self._reader: frames.FrameReader | None = None
        self._transport: asyncio.Transport | None = None
        self._timeout: asyncio.TimerHandle | None = None
        self.who = "a stranger"
        self.peer_id: str | None = None
        self.host: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.who = f"{transport.get_extra_info('peername')}"
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        if not self._server.admit_stranger(self):
            self.drop("too many connections that have not proved the key")
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
                    self._server.received(self, message)
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
            self._server.accepted(self)
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
        self._timeout = asyncio.get_running_loop().call_later(HANDSHAKE_TIMEOUT_S, self.close)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
        self._server.lost(self)

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

    def close(self) -> None:
        """Ends the connection after what was sent has left."""
        if self._transport is not None:
            self._transport.close()


class Server:
    """A master that listens. `start`, then `stop` or `crash`, all on its own event loop."""

    def __init__(
        self,
        journal: Journal,
        settings: Settings,
        *,
        host: str,
        port: int,
        key: bytes | None,
        on_superseded: Callable[[], None],
    ) -> None:
        self._journal = journal
        self._settings = settings
        self._host, self._port, self._key = host, port, key
        self._on_superseded = on_superseded
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="ray_pccl-journal")
        self._queue: list[Action] = []
        self._writing = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._deserted = asyncio.Event()
        self._over = False
        self._strangers: set[Connection] = set()
        self._connections: set[Connection] = set()
        self._peers: dict[str, Connection] = {}
        self._sentinels: dict[str, Connection] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._listener: asyncio.Server | None = None
        self.endpoint: Endpoint
        self.core: Master

    # ------------------------------------------------------------------------------------------ start and end

    async def start(self) -> Endpoint:
        """Reads the journal, writes the boot down, and listens. What fails leaves nothing behind."""
        try:
            return await self._start()
        except BaseException:
            self._let_go()
            raise

    async def _start(self) -> Endpoint:
        loop = asyncio.get_running_loop()
        durable = await loop.run_in_executor(self._writer, self._load)
        listening = _listen(self._host, self._port, durable.identity)
        for _ in range(BOOT_ATTEMPTS):
            identity = self._identity(durable.identity, listening)
            core = Master(durable, identity, self._settings, time.monotonic())
            records = [action.record for action in core.begin() if isinstance(action, Append)]
            try:
                await loop.run_in_executor(self._writer, self._journal.append, encode_records(list(records)))
                break
            except Superseded:  # somebody booted between our reading and our writing: read again
                durable = await loop.run_in_executor(self._writer, self._load)
        else:
            listening.close()
            raise MasterError("another master keeps booting on the same journal")
        self.core = core
        self.endpoint = Endpoint(identity.host, identity.port, identity.key)
        self._listener = await loop.create_server(lambda: Connection(self), sock=listening, backlog=1024)
        self._tasks = [loop.create_task(self._tick_for_ever()), loop.create_task(self._verify_for_ever())]
        log.info("master boot %d listens on %s:%d", identity.boot, identity.host, identity.port)
        return self.endpoint

    def _load(self) -> Durable:
        snapshot, entries = self._journal.load()
        durable = Durable() if snapshot is None else decode_snapshot(snapshot)
        for entry in entries:
            for record in decode_records(entry):
                durable.apply(record)
        return durable

    def _identity(self, old: Booted | None, listening: socket.socket) -> Booted:
        return Booted(
            boot=1 if old is None else old.boot + 1,
            nonce=secrets.token_hex(8),
            master_id=secrets.token_hex(8) if old is None else old.master_id,
            host=self._host,
            port=listening.getsockname()[1],
            key=self._key or (old.key if old is not None else new_key()),
        )

    async def stop(self, reason: str | None) -> None:
        """Ends cleanly. With a reason it is for good: every peer is told, and the journal is erased."""
        if reason is not None and not self._over:
            self.handle(StopRequested(reason))
            await self._idle.wait()
        await self._end()
        if reason is not None:
            await asyncio.get_running_loop().run_in_executor(self._writer, self._journal.erase)
        self._let_go()

    async def crash(self) -> None:
        """Ends as a SIGKILL would: nothing is said, nothing more is written."""
        self._queue.clear()
        for connection in list(self._connections):
            if connection._transport is not None:
                connection._transport.abort()
        await self._end()
        self._let_go()

    async def _end(self) -> None:
        self._over = True
        self._deserted.clear()
        for task in self._tasks:
            task.cancel()
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._connections):
            connection.close()
        if self._connections:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._deserted.wait(), CLOSE_TIMEOUT_S)

    def _let_go(self) -> None:
        self._writer.shutdown(wait=True)
        self._journal.close()

    # ---------------------------------------------------------------------------------------------- connections

    def admit_stranger(self, connection: Connection) -> bool:
        """Whether one more connection may try to prove the key."""
        self._connections.add(connection)
        if len(self._strangers) >= MAX_STRANGERS or self._over:
            return False
        self._strangers.add(connection)
        return True

    def accepted(self, connection: Connection) -> None:
        """A connection proved the key."""
        self._strangers.discard(connection)
        identity = self.core.identity
        connection.send(frames.encode(Welcome(identity.boot, identity.master_id, self._settings.shared())))

    def received(self, connection: Connection, message: ToMaster) -> None:
        """A message came on a connection that proved the key."""
        match message:
            case Beat(_, echo):  # first, because with many peers nearly all that comes is beats
                if echo:
                    connection.send(frames.encode(message))
                if connection.peer_id is not None:
                    self.core.liveness.heard(connection.peer_id, time.monotonic())
                elif connection.host is not None:
                    self.core.liveness.sentinel_heard(connection.host, time.monotonic())
            case Watch(host):
                connection.introduce(f"the sentinel of {host}")
                connection.host = host
                self._sentinels[host] = connection
                self.handle(SentinelSaid(host, message))
            case Seen():
                if connection.host is None:
                    raise ProtocolError("a sentinel's word before its opening")
                self.handle(SentinelSaid(connection.host, message))
            case Join(peer_id) | Register(peer_id):
                if connection.peer_id not in (None, peer_id):
                    raise ProtocolError(f"peer {connection.peer_id} can't also be peer {peer_id}")
                connection.introduce(f"peer {peer_id}")
                connection.peer_id = peer_id
                self._peers[peer_id] = connection
                self.handle(Received(peer_id, message))
            case _:
                if connection.peer_id is None:
                    raise ProtocolError(f"a {type(message).__name__} before the peer said who it is")
                self.handle(Received(connection.peer_id, message))

    def lost(self, connection: Connection) -> None:
        """A connection is gone."""
        self._connections.discard(connection)
        self._strangers.discard(connection)
        if not self._connections:
            self._deserted.set()
        peer_id, host = connection.peer_id, connection.host
        if peer_id is not None and self._peers.get(peer_id) is connection:
            del self._peers[peer_id]
            self.handle(Disconnected(peer_id))
        if host is not None and self._sentinels.get(host) is connection:
            del self._sentinels[host]
            self.handle(SentinelGone(host))

    # -------------------------------------------------------------------------------------- events and actions

    def handle(self, event: Event) -> None:
        """Hands an event to the core and carries out what it answers."""
        if self._over:
            return
        self._queue += self.core.handle(event, time.monotonic())
        if not self._writing:
            self._carry_out()

    def evict(self, peer_id: str, reason: str) -> None:
        """Puts a peer out of its group."""
        self.handle(EvictionRequested(peer_id, reason))

    def _carry_out(self) -> None:
        while self._queue:
            batch, self._queue = self._queue, []
            records = [action.record for action in batch if isinstance(action, Append)]
            if records:
                self._write(batch, encode_records(records))
                return
            self._send_all(batch)

    def _write(self, batch: list[Action], entry: bytes) -> None:
        """Writes everything that the batch wants remembered as one entry; then the batch is sent."""
        self._writing = True
        self._idle.clear()
        due = self._journal.entries_since_snapshot >= SNAPSHOT_EVERY
        snapshot = encode_snapshot(self.core.durable) if due else None

        def write() -> None:
            self._journal.append(entry)
            if snapshot is not None:
                self._journal.compact(snapshot)

        future = asyncio.get_running_loop().run_in_executor(self._writer, write)
        future.add_done_callback(partial(self._written, batch))

    def _written(self, batch: list[Action], future: asyncio.Future[None]) -> None:
        self._writing = False
        if self._over or future.cancelled():
            return
        error = future.exception()
        if error is not None:
            self._abdicate(error)
            self._idle.set()
            return
        self._send_all(batch)
        self._carry_out()
        if not self._writing:
            self._idle.set()

    def _send_all(self, batch: list[Action]) -> None:
        encoded: tuple[Message | None, bytes] = (None, b"")
        for action in batch:
            if isinstance(action, Append) or (connection := self._peers.get(action.peer_id)) is None:
                continue
            if encoded[0] is not action.message:  # a push to all is encoded once
                try:
                    encoded = (action.message, frames.encode(action.message))
                except ProtocolError as error:
                    connection.drop(str(error))
                    continue
            connection.send(encoded[1])
            if isinstance(action.message, Evicted | Refused):
                connection.show_out()

    def _abdicate(self, error: BaseException) -> None:
        """The journal is not ours any more, or can't be written: say nothing, and go (R6)."""
        log.error("this master ends: %s", error)
        self._over = True
        self._queue.clear()
        for connection in list(self._connections):
            connection.close()
        self._on_superseded()

    async def _tick_for_ever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.handle(Tick())
            except Exception:  # a bug of ours in one group must not end the watch over all others
                log.exception("a tick failed")

    async def _verify_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._over:
            await asyncio.sleep(VERIFY_S)
            if not self._writing:
                try:
                    await loop.run_in_executor(self._writer, self._journal.verify)
                except Superseded as error:
                    self._abdicate(error)
                except Exception:
                    log.exception("the journal could not be verified")


def _listen(host: str, port: int, old: Booted | None) -> socket.socket:
    """A listening socket: on the port asked for, else on the one of the boot before, else on any."""
    if not 0 <= port < 65536:
        raise MasterError(f"a port is a number from 0 (any) to 65535, not {port}")
    wanted = [port] if port else [old.port, 0] if old is not None and old.host == host else [0]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in wanted:
        # The protocol is named because asyncio sets TCP_NODELAY only on sockets that say that they are TCP.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            listening.bind((host, candidate))
            listening.setblocking(False)
            return listening
        listening.close()
    raise MasterError(
        f"the master can't listen on {host}:{port or 'any port'}: the port is taken, or no address of ours"
    )
