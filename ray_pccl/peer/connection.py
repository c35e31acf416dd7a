"""One connection to the master, kept through losses, on an event loop in a thread of its own.

It carries out what `Membership` wants, and hands it what arrives. Callers in other threads submit calls and wait for
futures; every future is ended by a result, a deadline in the machine, or the end of the membership.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import random
import socket
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, Protocol

from ray_pccl.control.endpoint import Endpoint
from ray_pccl.control.messages import LEFT, Answer, Ask, Beat, Decide, Edge, FromMaster, Probe, tally_interval_s
from ray_pccl.errors import AuthenticationError, MasterStoppedError, PCCLError, ProtocolError
from ray_pccl.metrics import EXPORT_EVERY_S, PeerMetrics
from ray_pccl.peer.effects import Effect, Fail, Inform, Measure, Send, Settle, Tell
from ray_pccl.peer.link import Link
from ray_pccl.peer.membership import ENDED, JOIN, Membership, Standing
from ray_pccl.peer.sentinel import Hello
from ray_pccl.peer.statistics import Recorder
from ray_pccl.peer.watch import SentinelWatch
from ray_pccl.ring import fault_points
from ray_pccl.settings import Settings
from ray_pccl.types import Member, MembershipEvent

log = logging.getLogger("ray_pccl.peer")

TICK_S = 0.05
DIAL_TIMEOUT_S = 1.0
FIRST_BACKOFF_S = 0.02
REFUSALS_TO_BELIEVE = 3
SILENT_BEATS = 3
"""A master that echoes nothing for this many heartbeat timeouts is dialled anew, while the old connection stays."""
CLOSE_TIMEOUT_S = 5.0
LAST_WORDS_S = 1.0
"""How long the end of a connection may take, for what was said last to leave."""


class Plane(Protocol):
    """What the connection tells the data plane."""

    def follow(self, epoch: int, rank: int, members: tuple[Member, ...]) -> None:
        """A new epoch was decided."""

    def probe(self, probe: Probe, settings: Settings, report: Callable[[tuple[Edge, ...]], None]) -> None:
        """Measure the way to a member, in a thread of its own, and report what came of it."""

    def end(self, error: PCCLError) -> None:
        """The membership is over."""

    def close(self) -> None:
        """Nothing is needed of it any more."""


class MasterConnection:
    """A peer's thread: dials, beats, receives, and ends waits."""

    def __init__(
        self,
        membership: Membership,
        endpoint: Endpoint,
        resolve: Callable[[], Endpoint] | None,
        tell: Callable[[MembershipEvent], None],
        plane: Plane | None = None,
    ) -> None:
        self.membership = membership
        self.recorder = Recorder()
        self._told_changes = -1
        self._tally_next = 0.0
        self._metrics = PeerMetrics(membership.identity.group, self.recorder)
        self._export_next = 0.0
        self._plane = plane
        self._followed = 0
        self._endpoint = endpoint
        self._resolve = resolve
        self._tell = tell
        self._calls: dict[Hashable, Future[Any]] = {}
        self._listening: dict[Future[Any], queue.SimpleQueue[Any]] = {}
        self._link: Link | None = None
        self._links: set[Link] = set()
        self._sockets: set[socket.socket] = set()
        self._lock = threading.RLock()  # a signal handler or the collector may call us while we hold it
        self._inbox: list[tuple[Callable[[], None], Future[Any] | None]] = []
        self._closed = False
        self._answered = False
        self._beats: dict[int, float] = {}
        self._beat_number = 0
        self._beat_next = 0.0
        self._echo_next = 0.0
        self._linked = 0.0
        self._wake = asyncio.Event()
        self._over = asyncio.Event()
        self._unlinked = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._watch = SentinelWatch(self._hello, lambda: self.membership.master_id)
        self._watch_task: asyncio.Task[None] | None = None
        self._lookup: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="ray_pccl-peer", daemon=True)
        _live.add(self)

    # --------------------------------------------------------------------------------- for callers in any thread

    def start(self, timeout_s: float) -> Future[Any]:
        """Starts the thread, which joins the group; the future is the join's."""
        self.membership.join(timeout_s, time.monotonic())
        joined: Future[Any] = Future()
        self._calls[JOIN] = joined
        self._thread.start()
        return joined

    def call(
        self,
        begin: Callable[[float], tuple[Hashable, list[Effect]]],
        inform: Callable[[Any], None] | None = None,
    ) -> Any:
        """Begins a call on the loop, waits for its end, and returns its value or raises its error.

        `inform` is called here, in the caller's thread, with what the master tells meanwhile; if it raises, the call
        is abandoned.
        """
        started: Future[Hashable] = Future()
        ended: Future[Any] = Future()

        def on_loop() -> None:
            try:
                call, effects = begin(time.monotonic())
            except Exception as error:
                started.set_exception(error)
                return
            self._calls[call] = ended
            started.set_result(call)
            self._apply(effects)

        try:
            if inform is None:
                self._submit(on_loop, started)
                started.result()
                return ended.result()
            news: queue.SimpleQueue[Any] = queue.SimpleQueue()
            self._listening[ended] = news
            ended.add_done_callback(lambda _: news.put(None))
            self._submit(on_loop, started)
            started.result()
            while (item := news.get()) is not None:
                inform(item)
            return ended.result()
        except BaseException:
            if not ended.done():  # interrupted, perhaps before it began: nobody waits any more
                with contextlib.suppress(PCCLError):
                    self._submit(lambda: self._abandon(ended))
            raise
        finally:
            self._listening.pop(ended, None)

    def wait_watched(self, timeout_s: float) -> bool:
        """Whether the host's sentinel watches this process, after waiting for it for a moment."""
        return self._watch.watched.wait(timeout_s)

    def cut(self) -> None:
        """Breaks the connection to the master, as a network would. For tests."""
        self._submit(lambda: self._link.abort() if self._link is not None else None)

    def close(self) -> None:
        """Leaves the group, if still in it, and ends the thread. Safe to call twice, and from any thread."""
        with contextlib.suppress(PCCLError):
            self._submit(self._leave)
        if threading.current_thread() is not self._thread and self._thread.ident is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    def forsake(self) -> None:
        """In a forked child: let go of the parent's sockets, so that they close with the parent."""
        sockets = list(self._sockets)
        if self._watch.sock is not None:
            sockets.append(self._watch.sock)
        for sock in sockets:
            with contextlib.suppress(OSError):
                os.close(sock.detach())

    def _submit(self, function: Callable[[], None], started: Future[Any] | None = None) -> None:
        """Has the loop run a function; one that has ended runs nothing more, and then `started` fails."""
        with self._lock:
            if self._closed:
                self.membership.require_member()
            self._inbox.append((function, started))
            self._loop.call_soon_threadsafe(self._empty_inbox)

    def _empty_inbox(self) -> None:
        with self._lock:
            functions, self._inbox = self._inbox, []
        for function, _ in functions:
            try:
                function()
            except Exception:  # the others in the batch have callers, too
                log.exception("a call of peer %s failed", self.membership.identity.peer_id)

    # ------------------------------------------------------------------------------------------------- the loop

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._live())
        finally:
            self._fail_all()
            if self._plane is not None:
                self._plane.close()
            self._loop.close()
            _live.discard(self)

    async def _live(self) -> None:
        tasks = [asyncio.create_task(self._dial_for_ever()), asyncio.create_task(self._tick_for_ever())]
        await self._over.wait()
        self._metrics.export(0, 0)  # gauges keep their last value: it is in no epoch any more
        tasks += [task for task in (self._watch_task, self._lookup) if task is not None]
        for task in tasks:
            task.cancel()
        for link in list(self._links):
            link.close()
        if self._links:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._unlinked.wait(), LAST_WORDS_S)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_default_executor()

    async def _tick_for_ever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            try:
                self._apply(self.membership.tick(now))
                if self._link is not None and now >= self._beat_next:
                    self._beat(now, self._link)
                if now >= self._export_next:
                    self._export_next = now + EXPORT_EVERY_S
                    self._export()
            except Exception:  # whatever it is, deadlines go on
                log.exception("a tick of peer %s failed", self.membership.identity.peer_id)

    def _export(self) -> None:
        self._metrics.export(self.membership.view.epoch, len(self.membership.view.members))

    def _beat(self, now: float, link: Link) -> None:
        settings = self.membership.settings
        self._beat_next = now + settings.heartbeat_interval_ms / 1000
        self._beat_number += 1
        echo = now >= self._echo_next
        if echo:
            self._echo_next = now + settings.heartbeat_timeout_s / 2
            self._beats[self._beat_number] = now
        link.send(Beat(self._beat_number, echo))
        if self.membership.standing is Standing.MEMBER and (seen := self.membership.network.to_tell(now)) is not None:
            link.send(seen)
        self._tally(now, link)
        silent_since = max(self.membership.last_heard, self._linked)
        if now - silent_since >= SILENT_BEATS * settings.heartbeat_timeout_s:
            self._wake.set()

    def _tally(self, now: float, link: Link) -> None:
        """Tells what was done since the last time, for onlookers."""
        if now < self._tally_next or self.membership.standing is not Standing.MEMBER:
            return
        changes, tally = self.recorder.changes, self.recorder.tally()
        self._tally_next = now + tally_interval_s(len(self.membership.view.members))
        if changes != self._told_changes:
            # What was in flight has to be told again: it may have been counted already, and end without a change.
            self._told_changes = -1 if tally.in_flight else changes
            link.send(tally)

    def received(self, link: Link, message: FromMaster) -> None:
        """A message came from the master."""
        if link is not self._link:
            return
        self._answered = True
        for other in list(self._links):
            if other.number < link.number:  # the new connection works: now the old one may go
                other.close()
        if isinstance(message, Beat):
            self.membership.heard(self._beats.pop(message.number, 0.0))
            return
        if isinstance(message, Ask):
            self.recorder.froze(time.monotonic())
        epoch = self.membership.view.epoch
        try:
            effects = self.membership.received(message, time.monotonic())
        except ProtocolError:
            raise  # this connection is of no use; the next one starts from what we hold
        except PCCLError as error:
            log.exception("peer %s can't follow its master", self.membership.identity.peer_id)
            effects = self.membership.refused(error)
        self._apply(effects)
        if isinstance(message, Decide) and self.membership.view.epoch != epoch:  # one that is told again began before
            self._record_epoch(message)

    def _record_epoch(self, decide: Decide) -> None:
        deaths = any(reason != LEFT for _, reason in decide.lost)
        self.recorder.began(time.monotonic(), recovers=deaths)
        identity, members = self.membership.identity, len(self.membership.view.members)
        lost = "".join(f"; lost {peer_id}: {reason}" for peer_id, reason in decide.lost)
        log.info(
            "group %r: epoch %d with %d members%s",
            *(identity.group, decide.epoch, members, lost),
            extra={"group": identity.group, "epoch": decide.epoch, "peer": identity.peer_id},
        )

    def lost(self, link: Link) -> None:
        """A connection is gone."""
        self._links.discard(link)
        self._sockets.discard(link.sock)
        if not self._links:
            self._unlinked.set()
        if link is self._link:
            self._link = None
            self._apply(self.membership.disconnected())
            self._wake.set()

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(message):
                    if self._link is not None:
                        self._link.send(message)
                        if isinstance(message, Answer):
                            fault_points.reach("answered")
                case Settle(call, value):
                    if (future := self._calls.pop(call, None)) is not None:
                        future.set_result(value)
                case Fail(call, error):
                    if (future := self._calls.pop(call, None)) is not None:
                        future.set_exception(error)
                case Inform(call, value):
                    log.info("peer %s: %s", self.membership.identity.peer_id, value)
                    news = self._listening.get(self._calls[call]) if call in self._calls else None
                    if news is not None:
                        news.put(value)
                case Measure(probe):
                    self._measure(probe)
                case Tell(event):
                    try:
                        self._tell(event)
                    except Exception:  # what only callbacks wanted to know must not keep calls from their results
                        log.exception("%s could not be told", event)
        self._guide_plane()
        if self.membership.standing in ENDED:
            self._over.set()

    def _guide_plane(self) -> None:
        """Lets the data plane follow: a new epoch, or the end."""
        plane, view = self._plane, self.membership.view
        if plane is None:
            return
        if self.membership.ending is not None:
            plane.end(self.membership.ending)
        elif view.epoch != self._followed:
            self._followed = view.epoch
            plane.follow(view.epoch, view.rank, view.members)

    def _measure(self, probe: Probe) -> None:
        """Has the data plane measure the way to a member, and tells what came of it."""

        def on_loop(edges: tuple[Edge, ...]) -> None:
            self._apply(self.membership.probed(probe, edges, time.monotonic()))

        def report(edges: tuple[Edge, ...]) -> None:
            with contextlib.suppress(PCCLError):
                self._submit(lambda: on_loop(edges))

        if self._plane is None:
            on_loop((Edge(self.membership.identity.peer_id, probe.other, None),))
        else:
            self._plane.probe(probe, self.membership.settings, report)

    def observe_link(self, other: str, rate: float) -> None:
        """The data plane's link to a member was busy, and carried so many bytes per second. From any thread."""
        with contextlib.suppress(PCCLError):
            self._submit(lambda: self.membership.network.observed(other, rate, time.monotonic()))

    def report_link(self, epoch: int, other: str) -> None:
        """The data plane's link to a member broke. From any thread."""

        def on_loop() -> None:
            if self.membership.standing is Standing.MEMBER and self.membership.view.epoch == epoch:
                self._apply(self.membership.link_broken(other))

        with contextlib.suppress(PCCLError):
            self._submit(on_loop)

    def _leave(self) -> None:
        self._apply(self.membership.leave())
        self._over.set()

    def _abandon(self, ended: Future[Any]) -> None:
        for call in [call for call, future in self._calls.items() if future is ended]:
            del self._calls[call]
            self._apply(self.membership.abandon(call))

    def _fail_all(self) -> None:
        """No caller is left waiting for a loop that has ended, whatever it has ended from."""
        error = self.membership.ending or MasterStoppedError("the peer's control thread ended unexpectedly")
        with self._lock:
            self._closed = True
            self.membership.give_up(error)
            unheard = [started for _, started in self._inbox if started is not None]
            self._inbox.clear()
        if self._plane is not None:
            self._plane.end(error)
        for future in [*unheard, *self._calls.values()]:
            if not future.done():
                future.set_exception(error)
        self._calls.clear()

    # -------------------------------------------------------------------------------------------------- dialling

    async def _dial_for_ever(self) -> None:
        backoff, refusals = FIRST_BACKOFF_S, 0
        while True:
            try:
                await self._dial()
                refusals = 0
                await self._wake.wait()
                self._wake.clear()
                if self._answered:  # a Welcome alone is no sign that this master can be worked with
                    backoff = FIRST_BACKOFF_S
            except AuthenticationError as error:
                # A master that dies in the middle of a handshake looks the same, once. A member has proved its key
                # before: whatever refuses it now is not its master, which may come back.
                refusals += 1
                joining = self.membership.standing is Standing.JOINING
                if joining and self._resolve is None and refusals >= REFUSALS_TO_BELIEVE:
                    self._apply(self.membership.refused(error))
                    return
            except Exception as error:  # an unreachable address, a name that is none, a stale master: try again
                log.debug("the master can't be reached: %s", error)
            if self._resolve is not None and (self._lookup is None or self._lookup.done()):
                self._lookup = asyncio.create_task(self._look_up(self._resolve))  # meanwhile the old place is tried
            cap = self.membership.settings.reconnect_cap_ms / 1000
            await asyncio.sleep(random.uniform(0.5, 1.0) * backoff)
            backoff = min(2 * backoff, cap)

    async def _look_up(self, resolve: Callable[[], Endpoint]) -> None:
        """Asks where the master is now; it may have been restarted elsewhere, or be gone for good."""
        try:
            endpoint = await self._loop.run_in_executor(None, resolve)
        except MasterStoppedError as error:
            self._apply(self.membership.master_gone(error))
        except Exception as error:
            log.debug("the master can't be found: %s", error)
        else:
            if endpoint != self._endpoint:
                self._endpoint = endpoint
                self._wake.set()  # we may have been let in at the old place meanwhile
                await self._watch.refresh()

    async def _dial(self) -> None:
        endpoint = self._endpoint
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
            sock = socket.socket(family, socket.SOCK_STREAM)
            self._sockets.add(sock)
            try:
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                address = await self._loop.getaddrinfo(endpoint.host, endpoint.port, family=family, type=sock.type)
                await self._loop.sock_connect(sock, address[0][4])
                _, link = await self._loop.create_connection(lambda: Link(self, sock, endpoint.key), sock=sock)
            except BaseException:
                self._sockets.discard(sock)
                sock.close()
                raise
            self._links.add(link)
            self._unlinked.clear()
            try:
                welcome = await link.welcomed
                if link not in self._links:
                    raise ConnectionError("the master closed the connection")
                greeting = self.membership.welcome(welcome, time.monotonic())
            except BaseException:
                link.abort()
                raise
        self._link = link
        self._linked = time.monotonic()
        self._answered = False
        self._echo_next = 0.0
        self._told_changes, self._tally_next = -1, 0.0  # this master may never have heard it
        self._beats.clear()
        for message in greeting:
            link.send(message)
        self._beat(time.monotonic(), link)
        if self._watch_task is None and self.membership.identity.watched:
            self._watch_task = asyncio.create_task(self._watch.run())

    def _hello(self) -> Hello:
        settings, identity = self.membership.settings, self.membership.identity
        return Hello(
            identity.peer_id,
            str(self._endpoint),
            identity.host,
            settings.sentinel_interval_ms / 1000,
            settings.heartbeat_interval_ms / 1000,
        )


_live: weakref.WeakSet[MasterConnection] = weakref.WeakSet()


def _in_forked_child() -> None:
    for connection in list(_live):
        connection.forsake()
    _live.clear()


os.register_at_fork(after_in_child=_in_forked_child)
