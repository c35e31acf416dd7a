"""The data plane of one communicator: its memory, its links, the epoch it is in, and the attempts in it.

Three kinds of threads meet here: the control thread, which freezes and decides; the mesh's thread, which moves bytes;
and callers, who run attempts. An epoch is *ready* when every member has a link to every other and has left all
operations of the epoch before. Nobody enters anything before that: so no frame of an epoch meets a peer that is not
in it yet, and nothing of the old epoch is read any more when the new one begins to write.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

import msgspec

from ray_pccl.control.endpoint import Endpoint
from ray_pccl.control.messages import Edge, Failure, OperationState, Probe, error_of
from ray_pccl.errors import NotConnectedError, PCCLError, ProtocolError, UsageError
from ray_pccl.peer.ledger import FrozenError, Key, Ledger
from ray_pccl.ring import bell, dialing, shared
from ray_pccl.ring.arena import Arena
from ray_pccl.ring.bell import Bell
from ray_pccl.ring.delegate import Backend, Delegate
from ray_pccl.ring.delegated import LEADER, DelegatedAttempt
from ray_pccl.ring.driving import Driver, drive
from ray_pccl.ring.header import delegated as delegated_header
from ray_pccl.ring.link import Link
from ray_pccl.ring.linked import Early, LinkedAttempt
from ray_pccl.ring.mesh import Mesh
from ray_pccl.ring.messaging import Messages
from ray_pccl.ring.observing import Meter, Traffic, counters
from ray_pccl.ring.past import KEPT, Past
from ray_pccl.ring.programs import EAGER_BYTES
from ray_pccl.ring.segment import Segment
from ray_pccl.ring.shared import ENTERED, Host, Neighbour, SharedAttempt, SharedMemory
from ray_pccl.ring.task import Attempt, Epoch, RefusedError, Task
from ray_pccl.ring.wire import Frame, Type
from ray_pccl.settings import Settings
from ray_pccl.topology.probing import Direction, Plan
from ray_pccl.types import Member

log = logging.getLogger("ray_pccl.ring")

LINK_TIMEOUT_S = 20.0
"""How long members may take to link up before the missing links are reported."""
STOP_TIMEOUT_S = 5.0
LOOK_S = 0.05
MOVING_TIMEOUT_S = 60.0
"""How long another library that moves the data may wait at least: all have entered, but what moves may take long."""
MAX_EARLY = 4096
_encoder = msgspec.msgpack.Encoder()
_failures: msgspec.msgpack.Decoder[Failure] = msgspec.msgpack.Decoder(Failure)


class DataPlane:
    """What a communicator runs its operations on."""

    def __init__(
        self, peer_id: str, key: bytes, host: str, transport: str, ledger: Ledger, backend: Backend | None = None
    ) -> None:
        self._peer_id = peer_id
        self._transport = transport
        self._ledger = ledger
        self._report: Callable[[int, str], None] = lambda _epoch, _peer_id: None
        self._observe: Callable[[str, float], None] = lambda _peer_id, _rate: None
        # Who has another library move the data has no use for shared memory: all meet over links.
        self.memory = _shared_memory(transport) if backend is None else None
        fds = self.memory.fds if self.memory is not None else []
        self._driver = Driver(self.memory) if self.memory is not None else None
        self._mesh = Mesh(self, peer_id, key, host, transport, fds)
        self.address = str(self._mesh.address)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # Under the lock:
        self._epoch: Epoch | None = None
        self._host: Host | None = None
        self._is_ready = False
        self._open: tuple[Epoch, Host | None] | None = None
        """The epoch, while it is ready and not frozen: what callers look at first, without the lock."""
        self._closed_epoch = 0
        self._ending: PCCLError | None = None
        self._attempts: dict[Key, Attempt] = {}
        # Of the mesh's thread alone:
        self._here: Epoch | None = None
        """The epoch as far as this thread has come: it follows the other one."""
        self._addresses: dict[str, str] = {}
        self._links: dict[str, Link] = {}
        self._memories: dict[str, Neighbour] = {}
        self._linked: dict[Key, LinkedAttempt] = {}
        self._early: dict[Key, Early] = {}
        self._said_linked = 0
        self._link_deadline = 0.0
        self._traffic = Traffic()
        self.messages = Messages(self)
        self._past = Past(ledger)
        self._delegate = None if backend is None else Delegate(backend, host, self._mesh.call, self._tell_members)
        ledger.close_boards = self._close_boards

    @classmethod
    def towards(
        cls, master: Endpoint, group: str, peer_id: str, ledger: Ledger, backend: Backend | None = None
    ) -> DataPlane:
        """A plane that listens where peers that reach this master will find it.

        With a `backend`, another library moves the data of what it can do: see `delegate`.
        """
        host = dialing.address_towards(master.host, master.port)
        transport = dialing.transport_from_env()
        if backend is not None and transport == "shm":
            raise UsageError(
                f"RAY_PCCL_TRANSPORT=shm is ray_pccl's own data plane alone: with backend={backend.name!r} use auto"
            )
        return cls(peer_id, dialing.data_key(master.key, group), host, transport, ledger, backend)

    def start(
        self, report: Callable[[int, str], None], observe: Callable[[str, float], None] = lambda _peer, _rate: None
    ) -> None:
        """Begins to listen. `report` is told which links broke in which epoch, `observe` what busy ones carry."""
        self._report, self._observe = report, observe
        self._mesh.start()

    def configure(self, settings: Settings) -> None:
        """The group's settings, for what depends on them here."""
        if self._delegate is not None:
            self._delegate.timeout_s = max(settings.op_timeout_s, MOVING_TIMEOUT_S)
            self._delegate.grace_s = settings.heartbeat_timeout_s

    def close(self) -> None:
        """Ends all threads; attempts fail."""
        self.end(NotConnectedError("the communicator was closed"))
        driver, memory = self._driver, self.memory
        if driver is not None:
            driver.close()
        self._mesh.close()
        with self._lock:  # what is mapped goes with the last attempt that holds it
            self._driver = self.memory = self._host = None
            self._memories.clear()
        if memory is not None:
            memory.close()

    # ------------------------------------------------------------------------------------ for the control thread

    def follow(self, epoch: int, rank: int, members: tuple[Member, ...]) -> None:
        """A new epoch was decided: link up with its members."""
        new = Epoch(epoch, rank, tuple(member.peer_id for member in members), len(members))
        addresses = {member.peer_id: member.address for member in members}
        with self._changed:
            self._epoch, self._host, self._is_ready, self._open = new, None, False, None
            self._changed.notify_all()
        self._mesh.call(lambda: self._move(new, addresses))

    def probe(self, probe: Probe, settings: Settings, report: Callable[[tuple[Edge, ...]], None]) -> None:
        """Measures the way to a member in a thread of its own. `report` is called there, once, whatever happens."""
        wanted = {Direction.THERE: probe.sends, Direction.BACK: probe.receives}
        directions = tuple(direction for direction, is_wanted in wanted.items() if is_wanted)
        plan = Plan(round(settings.probe_streams), settings.probe_ms / 1000, directions)
        me, other = self._peer_id, probe.other

        def run() -> None:
            rates: dict[Direction, float | None] = dict.fromkeys(directions)
            try:
                rates = self._mesh.probe(probe.address, other, plan)
            except Exception:
                log.exception("the way to peer %s could not be measured", other)
            report(
                tuple(
                    Edge(me, other, rate) if direction is Direction.THERE else Edge(other, me, rate)
                    for direction, rate in rates.items()
                )
            )

        threading.Thread(target=run, name="ray_pccl-probe", daemon=True).start()

    def end(self, error: PCCLError) -> None:
        """The membership is over: every attempt and every wait gets the error."""
        with self._changed:
            if self._ending is None:
                self._ending = error
            self._open = None
            self._stop_all(error)
            if self._delegate is not None and self._epoch is not None:
                self._delegate.stop(self._epoch.number)
            self._changed.notify_all()

    def _close_boards(self) -> list[Key]:
        """The ledger freezes: nothing of this epoch commits any more by what this peer has published."""
        with self._changed:
            epoch = self._epoch
            if epoch is None:
                return []
            self._closed_epoch, self._open = epoch.number, None
            published = self.memory.close_boards(epoch.number) if self.memory is not None else []
            self._stop_all(FrozenError(f"epoch {epoch.number} is frozen until the master has decided"))
            if self._delegate is not None:
                self._delegate.stop(epoch.number)
            self._changed.notify_all()
        return published

    def _stop_all(self, error: PCCLError) -> None:
        for attempt in list(self._attempts.values()):
            if attempt.stop is None:
                attempt.stop = error
        if self._attempts:
            if self.memory is not None:
                self.memory.bell.ring()
            self._mesh.call(self._tick_attempts)

    # ------------------------------------------------------------------------------------------------ for callers

    def await_ready(self, deadline: float) -> tuple[Epoch, Host | None]:
        """The present epoch, once all its members are ready in it."""
        now_open = self._open
        if now_open is not None:
            return now_open
        with self._changed:
            while True:
                if self._ending is not None:
                    raise self._ending.again()
                if self._is_ready and self._epoch is not None and self._closed_epoch < self._epoch.number:
                    if not self._transport_fits():
                        raise UsageError(
                            "RAY_PCCL_TRANSPORT=shm, but not all members share memory: use RAY_PCCL_TRANSPORT=auto, or "
                            "start all peers on one host, with this transport"
                        )
                    return self._epoch, self._host
                if not self._changed.wait(deadline - time.monotonic()):
                    raise TimeoutError

    def _transport_fits(self) -> bool:
        alone = self._epoch is None or self._epoch.size == 1
        return self._transport != "shm" or self._host is not None or alone

    def wait_changed(self, timeout_s: float, done: Callable[[], bool]) -> None:
        """Waits until a condition that the control thread brings about, looking at least so often."""
        with self._changed:
            if not done() and self._ending is None:
                self._changed.wait(timeout_s)
            if self._ending is not None and not done():
                raise self._ending.again()

    def attempt(self, task: Task, key: Key, epoch: Epoch, host: Host | None, deadline: float) -> Attempt:
        """An attempt that holds its epoch open: the next one begins when this one has left."""
        attempt = (
            Attempt(task, key, epoch, self._ledger, deadline)
            if host is None
            else SharedAttempt(task, key, host, self._ledger, deadline)
        )
        if self._delegate is not None:
            attempt.packed = delegated_header(attempt.packed, self._delegate.backend.number)
        # Without the lock: who freezes stores first and then looks for attempts, we do the opposite.
        self._attempts[key] = attempt
        if self._closed_epoch >= epoch.number:
            attempt.stop = FrozenError("the epoch froze before the operation began")
        if self._ending is not None:
            attempt.stop = self._ending
        return attempt

    def run(self, attempt: Attempt, *, behind: bool) -> None:
        """Runs an attempt to its commit. Raises `FrozenError`, `RefusedError`, or what stopped it.

        `behind`: the caller is a thread of the library, so the one that drives all such operations takes the steps.
        """
        attempt.check()
        if not isinstance(attempt, SharedAttempt):
            self._run_linked(attempt)
            return
        memory, driver = self.memory, self._driver
        if memory is None or driver is None:
            raise NotConnectedError("the communicator was closed")
        through_memory = shared.suits(attempt.task, attempt.epoch)
        steps = shared.run(memory, attempt) if through_memory else _announced(attempt)
        if behind:
            driver.drive(attempt, steps)
        else:
            drive(memory, attempt, steps)
        if not through_memory:
            self._run_linked(attempt)

    def stop(self, attempt: Attempt, error: PCCLError) -> None:
        """Has an attempt over links end, and waits until none of the caller's memory is touched any more."""
        attempt.stop = error
        stopped = threading.Event()

        def end() -> None:
            linked = self._linked.get(attempt.key)
            if linked is not None and linked.attempt is attempt:
                linked.end(error)
            stopped.set()

        self._mesh.call(end)
        stopped.wait(STOP_TIMEOUT_S)

    def leave(self, key: Key, attempt: Attempt | None) -> None:
        """The attempt at this operation, if it came to one, is over, and reads nothing any more."""
        if isinstance(attempt, SharedAttempt):
            memory = self.memory
            if memory is not None:
                memory.published.pop(attempt.key, None)
            attempt.done()
        self._attempts.pop(key, None)
        if not self._is_ready:
            self._mesh.call(self._announce)

    def refuse(self, key: Key, epoch: Epoch, failure: Failure) -> None:
        """Tells all members that this peer has failed the operation."""
        body = _encoder.encode(failure)
        frame = Frame(Type.REFUSE, len(body), epoch.number, *key)

        def tell() -> None:
            self._early.pop(key, None)
            self._to_all(frame, body)

        self._mesh.call(tell)

    def _run_linked(self, attempt: Attempt) -> None:
        linked = self._linked_attempt(attempt)
        self._mesh.call(lambda: self._begin(linked))
        while not linked.ended.wait(LOOK_S):
            if self._mesh.is_over:
                raise NotConnectedError("the communicator was closed")
        if linked.error is not None:
            raise linked.error

    def _linked_attempt(self, attempt: Attempt) -> LinkedAttempt:
        delegate, mesh = self._delegate, self._mesh
        if delegate is None:
            return LinkedAttempt(attempt, mesh.flush, self._unlist)
        recipe = attempt.task.recipe
        if recipe.quantizer is not None:
            text = f"backend {delegate.backend.name!r} does not quantise: leave quantization_options out, or use 'ring'"
            raise RefusedError(Failure("UsageError", text))
        if not delegate.backend.takes(recipe.header):
            return LinkedAttempt(attempt, mesh.flush, self._unlist)
        job = delegate.backend.job(recipe, attempt.epoch, attempt.task.send)
        whole = partial(self._is_whole, attempt.epoch)
        return DelegatedAttempt(attempt, job, delegate, whole, mesh.call, mesh.flush, self._unlist)

    # ------------------------------------------------------------------------------------- in the mesh's thread

    def _is_whole(self, epoch: Epoch) -> bool:
        """Whether there is a link to every member: without one, the master has been told, and will decide."""
        return all(peer_id in self._links for peer_id in epoch.members if peer_id != self._peer_id)

    def _tell_members(self, type_: Type, epoch: Epoch, number: int, body: bytes) -> None:
        self._to_all(Frame(type_, len(body), epoch.number, 0, number), body)

    def _begin(self, linked: LinkedAttempt) -> None:
        attempt = linked.attempt
        self._linked[attempt.key] = linked
        others = [rank for rank in range(attempt.epoch.size) if rank != attempt.epoch.rank]
        links = {rank: self._links.get(attempt.epoch.members[rank]) for rank in others}
        whole = {rank: link for rank, link in links.items() if link is not None}
        if len(whole) == len(others) and self._here is attempt.epoch:
            linked.begin(whole, self._early.pop(attempt.key, Early()))
        # else a link broke meanwhile: the epoch will freeze, which ends the attempt

    def _move(self, epoch: Epoch, addresses: dict[str, str]) -> None:
        self._here = epoch
        self._addresses = addresses
        self._early.clear()
        self._link_deadline = time.monotonic() + LINK_TIMEOUT_S
        for peer_id in [peer_id for peer_id in self._memories if peer_id not in addresses]:
            del self._memories[peer_id]  # attempts that still resolve from it hold it themselves
        for peer_id, link in list(self._links.items()):
            if peer_id not in addresses:
                self._forget(link)
        for peer_id in addresses:
            self.missed(peer_id)
        self.messages.move(epoch)
        self._past.move()
        if self._delegate is not None:
            self._delegate.move(epoch)
        self._announce()

    def missed(self, peer_id: str) -> None:
        """There may be no link to a peer: dials it, if it is a member and this side's to dial."""

        def give_up() -> bool:
            epoch = self._here
            return epoch is None or peer_id not in epoch.members or self._ending is not None

        address = self._addresses.get(peer_id)
        if address is not None and peer_id < self._peer_id and peer_id not in self._links and not give_up():
            self._mesh.dial(address, peer_id, give_up)

    def _forget(self, link: Link) -> None:
        if self._links.get(link.peer_id) is link:
            del self._links[link.peer_id]
        self._mesh.drop(link, ConnectionError("the peer is no member any more"))

    def _announce(self) -> None:
        """Says that this peer is ready, once it is."""
        epoch = self._here
        if epoch is None or self._said_linked >= epoch.number or self._ending is not None:
            self._check_ready()
            return
        others = [peer_id for peer_id in epoch.members if peer_id != self._peer_id]
        with self._lock:
            busy = any(attempt.epoch.number < epoch.number for attempt in list(self._attempts.values()))
        if busy or any(peer_id not in self._links for peer_id in others):
            return
        self._said_linked = epoch.number
        frame = Frame(Type.LINKED, 1, epoch.number)
        local = self.memory is not None and all(peer_id in self._memories for peer_id in others)
        self._to_all(frame, b"\1" if local else b"\0")
        self._check_ready()

    def _check_ready(self) -> None:
        epoch = self._here
        if epoch is None or self._said_linked != epoch.number:
            return
        links = [self._links.get(peer_id) for peer_id in epoch.members if peer_id != self._peer_id]
        if any(link is None or link.linked[0] != epoch.number for link in links):
            return
        local = self.memory is not None and all(
            peer_id in self._memories for peer_id in epoch.members if peer_id != self._peer_id
        )
        local = local and all(link is not None and link.linked[1] for link in links)
        with self._changed:
            if self._epoch is not epoch or self._is_ready:
                return
            self._host = self._host_of(epoch) if local and epoch.size > 1 else None
            self._is_ready = True
            if self._closed_epoch < epoch.number and self._ending is None and self._transport_fits():
                self._open = (epoch, self._host)
            self._changed.notify_all()
        self.messages.resume()

    def _host_of(self, epoch: Epoch) -> Host:
        assert self.memory is not None
        mine = Neighbour(self.memory.own, self.memory.bell, self.memory.arena)
        members = [mine if peer_id == self._peer_id else self._memories[peer_id] for peer_id in epoch.members]
        return Host(epoch, self.memory.own, members)

    def met(self, link: Link, fds: list[int]) -> None:
        """A link was made; a newer one takes the place of an older one."""
        old = self._links.get(link.peer_id)
        self._links[link.peer_id] = link
        if not link.local:
            link.meter = Meter(self._traffic, partial(counters, link.sock), partial(self._observe, link.peer_id))
        if old is not None:
            self._mesh.drop(old, ConnectionError("the peer has made a new connection"))
        self._memories.pop(link.peer_id, None)
        if len(fds) == dialing.FDS and self.memory is not None:
            try:
                self._memories[link.peer_id] = Neighbour(Segment(fds[0]), Bell(fds[1]), Arena(fds[2]))
            except (OSError, ValueError, ProtocolError) as error:
                log.warning("no shared memory with peer %s: %s", link.peer_id, error)
        dialing.close_all(fds)  # what is mapped stays
        epoch = self._here
        if epoch is not None and self._said_linked == epoch.number and link.peer_id in epoch.members:
            # What was on the old one may be lost: only a new epoch brings everyone to the same state (R4).
            self._report(epoch.number, link.peer_id)
        self._announce()

    def parted(self, link: Link, error: Exception) -> None:
        """A link broke: the master has to know, and decides."""
        if self._links.get(link.peer_id) is not link:
            return
        del self._links[link.peer_id]
        epoch = self._here
        if epoch is None or link.peer_id not in epoch.members or self._ending is not None:
            return
        if self._said_linked < epoch.number:
            self.missed(link.peer_id)  # nobody has begun anything without our word: simply make it anew
            return
        log.info("the link to peer %s broke: %s", link.peer_id, error)
        self._report(epoch.number, link.peer_id)

    def tick(self, now: float) -> None:
        """Ends waits whose time is up."""
        self._tick_attempts()
        self.messages.tick(now)
        epoch = self._here
        if epoch is not None and self._is_ready and len(self._ledger.operations) > KEPT:
            body = self._past.to_tell()
            if body:
                self._to_all(Frame(Type.PAST, len(body), epoch.number), body)
                self._past.forget(epoch.size - 1)
        if epoch is None or self._is_ready or self._ending is not None or now < self._link_deadline:
            return
        self._link_deadline = now + LINK_TIMEOUT_S
        for peer_id in epoch.members:
            if peer_id != self._peer_id and peer_id not in self._links:
                self._report(epoch.number, peer_id)

    def over(self) -> None:
        """The mesh ends: so does all that waits for it."""
        error = self._ending or NotConnectedError("the communicator's data plane has ended")
        self.end(error)
        for linked in list(self._linked.values()):
            linked.end(error.again())
        self.messages.tick(time.monotonic())

    def _tick_attempts(self) -> None:
        now = time.monotonic()
        for linked in list(self._linked.values()):
            linked.tick(now)

    def control(self, link: Link, frame: Frame, body: bytes) -> None:
        """A frame without data has come."""
        if frame.type is Type.LINKED:
            if frame.epoch >= link.linked[0]:
                link.linked = (frame.epoch, body == b"\1")
            self._check_ready()
            return
        epoch = self._here
        if epoch is None or frame.epoch != epoch.number or link.peer_id not in epoch.members:
            return
        key = (frame.tag, frame.number)
        rank = epoch.members.index(link.peer_id)
        linked = self._linked.get(key)
        match frame.type:
            case Type.ENTER:
                if linked is not None:
                    linked.enter(rank, body)
                elif not self._is_over(key):
                    self._early_of(key).headers[rank] = body
            case Type.PREPARED:
                if linked is not None:
                    linked.prepared(rank)
            case Type.REFUSE:
                self._refused(key, frame.epoch, body)
            case Type.GRANT | Type.KEY:
                self._delegated(rank, frame, linked, body)
            case Type.PAST:
                self._past.heard(link.peer_id, body, epoch.size - 1)
            case _:
                self.messages.control(link, frame, body)

    def _delegated(self, rank: int, frame: Frame, linked: LinkedAttempt | None, body: bytes) -> None:
        delegate = self._delegate
        if delegate is None:
            return  # from a member of another backend: no operation of ours agrees with any of its
        if frame.type is Type.KEY:
            delegate.key(frame.number, body)
        elif rank != LEADER:
            raise ProtocolError(f"rank {rank} grants an operation, though rank {LEADER} gives the order")
        elif isinstance(linked, DelegatedAttempt):
            linked.granted(int.from_bytes(body, "little"))
        else:
            delegate.granted_ghost((frame.tag, frame.number), int.from_bytes(body, "little"))

    def _refused(self, key: Key, epoch: int, body: bytes) -> None:
        try:
            failure = _failures.decode(body)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"a refusal that can't be read: {error}") from None
        try:
            news = self._ledger.refused(key, epoch, failure, time.monotonic())
        except FrozenError:
            return  # who refused will say so to the master
        if not news:
            return
        self._early.pop(key, None)
        with self._lock:
            attempt = self._attempts.get(key)
            if attempt is not None and attempt.stop is None:
                attempt.stop = error_of(failure)
        if self.memory is not None:
            self.memory.bell.ring()
        self._tick_attempts()

    def destination(self, link: Link, frame: Frame) -> memoryview | None:
        """Where the data of a frame goes."""
        epoch = self._here
        if epoch is None or frame.epoch != epoch.number or link.peer_id not in epoch.members:
            return None
        if frame.type is Type.MESSAGE:
            return self.messages.destination(link, frame)
        linked = self._linked.get((frame.tag, frame.number))
        if linked is not None:
            return linked.destination(epoch.members.index(link.peer_id), frame)
        if frame.length > EAGER_BYTES:
            return None  # of an operation that has ended here
        link.early = memoryview(bytearray(frame.length))
        return link.early

    def data(self, link: Link, frame: Frame, body: memoryview | None) -> None:
        """The data of a frame is there."""
        epoch = self._here
        if body is None or epoch is None or frame.epoch != epoch.number or link.peer_id not in epoch.members:
            return
        if frame.type is Type.MESSAGE:
            self.messages.data(link, frame, body)
            return
        key, rank = (frame.tag, frame.number), epoch.members.index(link.peer_id)
        linked = self._linked.get(key)
        if body is link.early:
            link.early = None
            if linked is not None:
                linked.replay(rank, frame, body)
            elif not self._is_over(key):
                self._early_of(key).pieces.append((rank, frame, body))
        elif linked is not None:
            linked.data(rank, frame, body)

    def _early_of(self, key: Key) -> Early:
        """What came of an operation before this peer entered it."""
        if key not in self._early and len(self._early) >= MAX_EARLY:
            raise ProtocolError("members have entered more operations than can be in flight")
        return self._early.setdefault(key, Early())

    def _is_over(self, key: Key) -> bool:
        operation = self._ledger.operations.get(key)
        return operation is not None and operation.state in (OperationState.COMMITTED, OperationState.FAILED)

    def _unlist(self, linked: LinkedAttempt) -> None:
        """An attempt has ended: what comes of its operation from now on is of the next one, or early."""
        if self._linked.get(linked.attempt.key) is linked:
            del self._linked[linked.attempt.key]

    def _to_all(self, frame: Frame, body: bytes) -> None:
        epoch = self._here
        if epoch is None or frame.epoch != epoch.number:
            return
        for peer_id in epoch.members:
            link = self._links.get(peer_id)
            if link is not None:
                link.send(frame, body)
                self._mesh.flush(link)

    # --------------------------------------------------------------------------------- for services of their own

    def offer(self, service: str, serve: Callable[[dialing.Meeting], None]) -> None:
        """Has `serve` take over every connection to a service, in a thread of its own, and closes it afterwards."""
        self._mesh.services[service] = serve

    def call_on(self, service: str, peer_id: str, timeout_s: float) -> dialing.Meeting:
        """A connection to a member's service; no wait on it is longer than `timeout_s`.

        Raises `OSError` or `PCCLError` if it can't be had.
        """
        address = self._addresses.get(peer_id)
        if address is None:
            raise ConnectionError(f"peer {peer_id} is no member any more")
        return self._mesh.call_on(address, peer_id, service, timeout_s)

    # ---------------------------------------------------------------------------------------- for point to point

    def call(self, function: Callable[[], None]) -> None:
        """Has the mesh's thread run a function."""
        self._mesh.call(function)

    def link_to(self, peer_id: str) -> Link | None:
        """The link to a peer, if there is one. For the mesh's thread."""
        return self._links.get(peer_id)

    def flush(self, link: Link) -> None:
        """Sends what is queued. For the mesh's thread."""
        self._mesh.flush(link)

    @property
    def ending(self) -> PCCLError | None:
        """Why the plane is over, if it is."""
        return self._ending


def _announced(attempt: SharedAttempt) -> shared.Steps:
    """An operation that goes over links, in an epoch of shared memory: all meet at the board before paths part."""
    yield from attempt.claim()
    attempt.post(ENTERED)


def _shared_memory(transport: str) -> SharedMemory | None:
    if transport == "tcp" or not bell.supported():
        return None
    try:
        return SharedMemory()
    except OSError as error:  # a limit on address space, for instance
        log.warning("no shared memory: %s; peers on one host use sockets", error)
        return None
