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

from master_actor import searching
from master_actor.chronicle import Chronicle
from master_actor.clock import MasterClock
from master_actor.connection import Connection
from master_actor.core.actions import (
    Action,
    Append,
    Complain,
    Disconnected,
    Event,
    EvictionRequested,
    Note,
    Received,
    Send,
    SentinelGone,
    SentinelSaid,
    Solve,
    Solved,
    StopRequested,
    Tick,
)
from master_actor.core.master import Master
from master_actor.core.records import (
    Booted,
    Durable,
    Record,
    decode_records,
    decode_snapshot,
    encode_records,
    encode_snapshot,
)
from master_actor.dashboard.page import LivePage
from master_actor.journal import Journal, Superseded
from master_actor.listening import listen, raise_file_limit
from master_actor.observing import Observatory
from ray_pccl.control import frames
from ray_pccl.control.endpoint import Endpoint, new_key
from ray_pccl.control.messages import (
    Beat,
    Evicted,
    Failure,
    Join,
    Message,
    Refused,
    Register,
    Registered,
    Reply,
    Seen,
    Tally,
    ToMaster,
    VoteFailed,
    Watch,
    Welcome,
)
from ray_pccl.errors import MasterError, ProtocolError
from ray_pccl.reports import MasterReport
from ray_pccl.settings import Settings

log = logging.getLogger("ray_pccl.master")

TICK_S = 0.02
MAX_STRANGERS = 4096
"""Connections that have not proved the key yet; more are dropped as they come."""
SNAPSHOT_EVERY = 1000
VERIFIES_IN_GRACE = 4
"""How often in `register_grace_s` an idle master makes sure that it still is the master."""
BOOT_ATTEMPTS = 10
CLOSE_TIMEOUT_S = 1.0


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
        page: LivePage | None = None,
    ) -> None:
        self._journal = journal
        self._settings = settings
        self._host, self._port, self._key = host, port, key
        self._on_superseded = on_superseded
        self._page = page
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="ray_pccl-journal")
        self._queue: list[Action] = []
        self._writing = False
        self._clock = MasterClock()
        self._confirmed = 0.0
        """When the last look at the journal began that showed it to be ours. By the real clock."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._deserted = asyncio.Event()
        self._all_left = asyncio.Event()
        self._over = False
        self._abdicated = False
        self._strangers: dict[Connection, None] = {}
        self._most_strangers = MAX_STRANGERS
        self._connections: set[Connection] = set()
        self._peers: dict[str, Connection] = {}
        self._sentinels: dict[str, Connection] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._searches: set[asyncio.Task[None]] = set()
        self._search_of: dict[str, asyncio.Task[None]] = {}
        """The last one of each group: a newer question makes an older one idle."""
        self._listener: asyncio.Server | None = None
        self._listening: socket.socket | None = None
        self._observatory = Observatory(Chronicle(time.monotonic, time.time))
        self.endpoint: Endpoint
        self.core: Master

    # ------------------------------------------------------------------------------------------ start and end

    async def start(self) -> Endpoint:
        """Reads the journal, writes the boot down, and listens. What fails leaves nothing behind."""
        try:
            return await self._start()
        except BaseException:
            if self._listening is not None:
                self._listening.close()
            if self._page is not None:
                await self._page.close()
            self._let_go()
            raise

    async def _start(self) -> Endpoint:
        loop = asyncio.get_running_loop()
        self._most_strangers = min(MAX_STRANGERS, raise_file_limit() // 4)
        self._clock.hold()  # until we listen, nobody can be late
        durable = await loop.run_in_executor(self._writer, self._load)
        self._listening = listening = await listen(self._host, self._port, durable.identity)
        page_port = self._page.bind(durable.identity) if self._page is not None else 0
        for _ in range(BOOT_ATTEMPTS):
            identity = self._identity(durable.identity, listening, page_port)
            core = Master(durable, identity, self._settings, self._clock.read())
            records = [action.record for action in core.begin() if isinstance(action, Append)]
            self._confirmed = time.monotonic()
            try:
                await loop.run_in_executor(self._writer, self._journal.append, encode_records(list(records)))
                break
            except Superseded:  # somebody booted between our reading and our writing: read again
                durable = await loop.run_in_executor(self._writer, self._load)
        else:
            raise MasterError("another master keeps booting on the same journal")
        self.core = core
        self.endpoint = Endpoint(identity.host, identity.port, identity.key)
        self._listener = await loop.create_server(lambda: Connection(self), sock=listening, backlog=1024)
        self._clock.release()
        self._tasks = [loop.create_task(self._tick_for_ever()), loop.create_task(self._verify_for_ever())]
        self._observatory.chronicle.booted(identity.boot)
        log.info("master boot %d listens on %s:%d", identity.boot, identity.host, identity.port)
        if self._page is not None:
            self._page.open(identity, self.report)
        return self.endpoint

    def _load(self) -> Durable:
        snapshot, entries = self._journal.load()
        durable = Durable() if snapshot is None else decode_snapshot(snapshot)
        for entry in entries:
            for record in decode_records(entry):
                durable.apply(record)
        return durable

    def _identity(self, old: Booted | None, listening: socket.socket, page_port: int) -> Booted:
        return Booted(
            boot=1 if old is None else old.boot + 1,
            nonce=secrets.token_hex(8),
            master_id=secrets.token_hex(8) if old is None else old.master_id,
            host=self._host,
            port=listening.getsockname()[1],
            key=self._key or (old.key if old is not None else new_key()),
            dashboard_port=page_port,
        )

    async def stop(self, reason: str | None) -> None:
        """Ends cleanly. With a reason it is for good: every peer is told, and the journal is erased."""
        if reason is not None and not self._over:
            self.handle(StopRequested(reason))
            await self._idle.wait()
            self._over = True
            # Who hears it hangs up. We go on reading until then: to close on what was not read would undo what we sent.
            if self._peers:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._all_left.wait(), CLOSE_TIMEOUT_S)
        await self._end()
        if reason is not None and not self._abdicated:  # or it would be the journal of the next one
            await asyncio.get_running_loop().run_in_executor(self._writer, self._journal.erase)
        self._let_go()

    async def crash(self) -> None:
        """Ends as a SIGKILL would: nothing is said, nothing more is written."""
        self._queue.clear()
        for connection in list(self._connections):
            connection.abort()
        await self._end()
        self._let_go()

    async def _end(self) -> None:
        self._over = True
        self._deserted.clear()
        if self._page is not None:
            await self._page.close()
        for task in [*self._tasks, *self._searches]:
            task.cancel()
        await asyncio.gather(*self._searches, return_exceptions=True)  # a search may have a process to end
        if self._listener is not None:
            assert self._listening is not None
            with contextlib.suppress(OSError):  # for all who hold it, forked children too
                self._listening.shutdown(socket.SHUT_RDWR)
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
        """Whether one more connection may try to prove the key; if there are too many, the oldest has to go."""
        self._connections.add(connection)
        if self._over:
            return False
        if len(self._strangers) >= self._most_strangers:
            oldest = next(iter(self._strangers))
            oldest.drop("too many connections have not proved the key, and it has had the longest time for it")
        self._strangers[connection] = None
        return True

    def accepted(self, connection: Connection) -> None:
        """A connection proved the key."""
        self._strangers.pop(connection, None)
        identity = self.core.identity
        connection.send(frames.encode(Welcome(identity.boot, identity.master_id, self._settings.shared())))

    def received(self, connection: Connection, message: ToMaster) -> None:
        """A message came on a connection that proved the key."""
        match message:
            case Beat(_, echo):  # first, because with many peers nearly all that comes is beats
                self._beat(connection, message, echo)
            case Tally() if connection.peer_id is not None:
                self._tally(connection.peer_id, message)
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
                current = self._peers.get(peer_id)
                if current is not None and message.dial < current.dial:
                    raise ProtocolError(f"peer {peer_id} has made a newer connection since")
                connection.dial = message.dial
                connection.introduce(f"peer {peer_id}")
                connection.peer_id = peer_id
                self._peers[peer_id] = connection
                self._all_left.clear()
                if current is not None and current is not connection:
                    current.close()  # it is not listened to any more
                self.handle(Received(peer_id, message))
            case _:
                if connection.peer_id is None:
                    raise ProtocolError(f"a {type(message).__name__} before the peer said who it is")
                if self._peers.get(connection.peer_id) is not connection:
                    return  # what an old connection still carries is said again on the new one
                self.handle(Received(connection.peer_id, message))

    def _beat(self, connection: Connection, beat: Beat, echo: bool) -> None:
        """Notes a sign of life. The echo extends the peer's lease, so it is not for everyone (R6, R7)."""
        if connection.host is not None:
            self.core.liveness.sentinel_heard(connection.host, self._clock.read())
        peer_id = connection.peer_id
        if peer_id is None or self._peers.get(peer_id) is not connection:
            return
        self.core.liveness.heard(peer_id, self._clock.read())
        if echo and self._is_ours() and self.core.belongs(peer_id):
            connection.send(frames.encode(beat))

    def _tally(self, peer_id: str, tally: Tally) -> None:
        now = self._clock.read()
        self.core.liveness.heard(peer_id, now)
        if world_size := self.core.world_size_of(peer_id):
            self._observatory.tally(peer_id, tally, world_size, now)

    def _is_ours(self) -> bool:
        """Whether the journal was seen to be ours lately. One who was replaced unseen must not go on as the master."""
        return time.monotonic() - self._confirmed < self._settings.register_grace_s

    def lost(self, connection: Connection) -> None:
        """A connection is gone."""
        self._connections.discard(connection)
        self._strangers.pop(connection, None)
        if not self._connections:
            self._deserted.set()
        peer_id, host = connection.peer_id, connection.host
        if peer_id is not None and self._peers.get(peer_id) is connection:
            del self._peers[peer_id]
            self.handle(Disconnected(peer_id))
            if not self._peers:
                self._all_left.set()
        if host is not None and self._sentinels.get(host) is connection:
            del self._sentinels[host]
            self.handle(SentinelGone(host))

    # -------------------------------------------------------------------------------------- events and actions

    def handle(self, event: Event) -> None:
        """Hands an event to the core and carries out what it answers."""
        if self._over:
            return
        self._queue += self.core.handle(event, self._clock.read())
        if not self._writing:
            self._carry_out()

    def evict(self, peer_id: str, reason: str) -> None:
        """Puts a peer out of its group."""
        self.handle(EvictionRequested(peer_id, reason))

    def report(self, since: int = 0) -> MasterReport:
        """All that onlookers may know, with the happenings after that number. On the server's own loop."""
        url = "" if self._page is None else self._page.url
        return self._observatory.report(self.core, self._clock.read(), time.time(), since=since, dashboard=url)

    def _carry_out(self) -> None:
        while self._queue:
            batch, self._queue = self._queue, []
            records = [action.record for action in batch if isinstance(action, Append)]
            welcomes = any(isinstance(action, Send) and isinstance(action.message, Registered) for action in batch)
            if records or (welcomes and not self._is_ours()):
                self._write(batch, records)
                return
            self._send_all(batch)

    def _write(self, batch: list[Action], records: list[Record]) -> None:
        """Writes what the batch wants remembered as one entry, or looks whether the journal is ours; then sends it."""
        self._writing = True
        self._clock.hold()
        self._idle.clear()
        due = self._journal.entries_since_snapshot >= SNAPSHOT_EVERY
        snapshot = encode_snapshot(self.core.durable) if due else None

        entry = encode_records(records)

        def write() -> float:
            began = time.monotonic()
            if records:
                self._journal.append(entry)
            else:
                self._journal.verify()
            if snapshot is not None:
                self._journal.compact(snapshot)
            return began

        future = asyncio.get_running_loop().run_in_executor(self._writer, write)
        future.add_done_callback(partial(self._written, batch))

    def _written(self, batch: list[Action], future: asyncio.Future[float]) -> None:
        self._writing = False
        self._clock.release()
        error = None if future.cancelled() else future.exception()
        if self._over or error is not None:
            if not self._over and error is not None:
                self._abdicate(error)
            self._idle.set()
            return
        self._confirmed = future.result()
        self._send_all(batch)
        self._carry_out()
        if not self._writing:
            self._idle.set()

    def _send_all(self, batch: list[Action]) -> None:
        encoded: tuple[Message | None, bytes] = (None, b"")
        for action in batch:
            if isinstance(action, Complain):
                log.error("%s", action.what, exc_info=action.error)
                continue
            if isinstance(action, Solve):
                self._begin_search(action)
                continue
            if isinstance(action, Note):
                self._note(action)
                continue
            if isinstance(action, Append) or (connection := self._peers.get(action.peer_id)) is None:
                continue
            if encoded[0] is not action.message:  # a push to all is encoded once
                encoded = (action.message, self._encode(action.message))
            connection.send(encoded[1])
            if isinstance(action.message, Evicted | Refused):
                connection.show_out()

    def _note(self, note: Note) -> None:
        happening = self._observatory.chronicle.note(note)
        took = "" if happening.took_ms is None else f" after {happening.took_ms:.1f} ms"
        about = " ".join(filter(None, (note.peer_id, note.reason and f"({note.reason})")))
        log.info(
            "group %r: %s %s%s",
            *(note.group, note.kind.value, about, took),
            extra={"group": note.group, "epoch": note.epoch, "peer": note.peer_id},
        )

    @staticmethod
    def _encode(message: Message) -> bytes:
        """The frame of a message. What no frame carries is the master's fault, and the receiver is not dropped for it.

        Who waits for such an answer is told why there is none; all else that a peer waits for has a deadline there.
        """
        try:
            return frames.encode(message)
        except ProtocolError as error:
            log.error("what no frame can carry was not sent: %s", error)
            if isinstance(message, Reply):
                return frames.encode(Reply(message.number, failure=Failure("ProtocolError", str(error))))
            if isinstance(message, VoteFailed):
                return frames.encode(VoteFailed(message.kind, Failure("PCCLError", str(error))))
            return b""

    def _begin_search(self, question: Solve) -> None:
        if (older := self._search_of.get(question.group)) is not None:
            older.cancel()  # it ends its process
        search = asyncio.get_running_loop().create_task(self._solve(question))
        self._search_of[question.group] = search
        self._searches.add(search)
        search.add_done_callback(partial(self._search_ended, question.group))

    def _search_ended(self, group: str, search: asyncio.Task[None]) -> None:
        self._searches.discard(search)
        if self._search_of.get(group) is search:
            del self._search_of[group]

    async def _solve(self, question: Solve) -> None:
        """Has the best ring looked for while everything else goes on."""
        try:
            answer = await searching.search(question)
        except Exception as error:
            log.exception("the ring of group %r could not be ordered", question.group)
            answer = Solved(question.group, question.number, error=f"{type(error).__name__}: {error}")
        self.handle(answer)

    def _abdicate(self, error: BaseException) -> None:
        """The journal is not ours any more, or can't be written: say nothing, and go (R6)."""
        log.error("this master ends: %s", error)
        self._over = self._abdicated = True
        self._queue.clear()
        self._on_superseded()
        for connection in list(self._connections):
            connection.close()

    async def _tick_for_ever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.handle(Tick())
                self._observatory.tick(self.core, self._clock.read(), time.time())
            except Exception:  # a bug of ours must not end the watch over everyone
                log.exception("a tick failed")

    async def _verify_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._over:
            await asyncio.sleep(self._settings.register_grace_s / VERIFIES_IN_GRACE)
            if not self._writing:
                began = time.monotonic()
                try:
                    await loop.run_in_executor(self._writer, self._journal.verify)
                    self._confirmed = began
                except Superseded as error:
                    self._abdicate(error)
                except Exception:
                    log.exception("the journal could not be verified")
