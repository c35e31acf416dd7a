"""What a user holds: one peer in one group."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ray_pccl.control.endpoint import Endpoint
from ray_pccl.control.messages import Question, Reply, StoreOp, VoteKind
from ray_pccl.errors import BackendUnavailableError, NotConnectedError, PCCLError, SettingsError, UsageError
from ray_pccl.logs import configure_from_env
from ray_pccl.peer.collectives import Collectives
from ray_pccl.peer.connection import MasterConnection
from ray_pccl.peer.effects import Effect, Identity, View
from ray_pccl.peer.events import EventQueue
from ray_pccl.peer.host import host_id, supports_sentinel
from ray_pccl.peer.ledger import Ledger
from ray_pccl.peer.membership import ENDED, Membership, Standing
from ray_pccl.peer.store import Store
from ray_pccl.ring.header import BACKENDS
from ray_pccl.settings import Settings, check_timeout
from ray_pccl.types import Attribute, MembershipEvent

if TYPE_CHECKING:
    from ray_pccl.peer.operations import Operations
    from ray_pccl.peer.statistics import Statistics
    from ray_pccl.ring.delegate import Backend
    from ray_pccl.state.rows import SharedStateSyncStrategy
    from ray_pccl.state.sharing import SharedState, SharedStateSyncInfo
    from ray_pccl.topology.progress import TopologyProgress
    from ray_pccl.topology.types import Topology

SENTINEL_PATIENCE_S = 2.0
"""How long `connect()` waits for the host's sentinel before it goes on without its word."""

LONGEST_LABEL = 200


class Communicator(Collectives):
    """This process's membership in a peer group.

    Args:
        peer_group: The group's name, or a number as in PCCL (the number 7 and the name "7" are the same group).
        master: Where the master is: an `Endpoint` or its string form. Inside Ray it may be left out: the detached actor
            that `ray_pccl.start_master()` made is found by itself, and again after it was restarted elsewhere.
        min_world_size: The group forms when this many have joined. The same on all peers.
        max_world_size: At most this many members; None for no limit. The same on all peers.
        rank: The rank to ask for: honoured in the group's first epoch. Survivors of a death keep their order.
        settings: How long to wait for what; from ``RAY_PCCL_*`` variables if not given.
        namespace: The Ray namespace of the master, if not the default one.
        label: What the `peer_id` begins with, up to 200 bytes of text; the names of the host and the process if not
            given.
        expected_world_size: When this many have joined, the group forms at once, without its last call.
        backend: Who moves the data: "ring", ray_pccl's own data plane; or "gloo" or "nccl", torch's process groups, on
            top of which membership, commit and retry are ours all the same. The same on all peers.

    May be used from several threads. Ranks are not stable across epochs. A forked child can't use its parent's.
    """

    def __init__(
        self,
        peer_group: str | int = 0,
        *,
        master: Endpoint | str | None = None,
        min_world_size: int = 1,
        max_world_size: int | None = None,
        rank: int | None = None,
        settings: Settings | None = None,
        namespace: str | None = None,
        label: str | None = None,
        expected_world_size: int = 0,
        backend: str = "ring",
    ) -> None:
        self._group = _group_name(peer_group)
        _check_sizes(min_world_size, max_world_size, rank)
        self._limits = (min_world_size, max_world_size, rank)
        self._master = Endpoint.parse(master) if isinstance(master, str) else master
        self._settings = settings if settings is not None else Settings.from_env()
        self._namespace = namespace
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._label = _check_label(label)
        self._expected = expected_world_size
        self._backend = check_backend(backend)
        self._peer_id = _new_peer_id(label)
        self._used_peer_id = False
        self._connection: MasterConnection | None = None
        self._connecting = False
        self._life = 0
        self._early_call = False
        self._running: Operations | None = None
        self._events = EventQueue()
        self._let_go = weakref.finalize(self, _abandon, None, self._events)
        self.store = Store(self._store_request, lambda: self._settings.store_timeout_s)
        """The group's key-value store."""
        _open.add(self)

    # -------------------------------------------------------------------------------------- joining and leaving

    def connect(self, timeout: float | None = None) -> None:
        """Joins the group: blocks until it has formed with this peer, or has admitted it.

        Args:
            timeout: In seconds; ``join_timeout_s`` if not given.

        Raises:
            RendezvousTimeoutError: The group did not form, or did not admit this peer, in time.
            RendezvousClosedError: The group was closed.
            GroupMismatchError: The group has another minimum or maximum.
            RankTakenError: Another peer of the forming group asked for the same rank.
            MasterUnreachableError, MasterNotFoundError, MasterStoppedError, AuthenticationError: No master.
            BackendUnavailableError: There is no torch, or no CUDA device, for the backend.
            UsageError: Already connected.

        After any of them nothing is left behind, and `connect()` may be called again. After `PeerEvictedError` from any
        call it joins again as a new peer, with a new `peer_id`.
        """
        self._require_own_process()
        configure_from_env()
        patience = check_timeout(self._settings.join_timeout_s if timeout is None else timeout, "connect()")
        if patience == 0:
            raise SettingsError("connect() needs a timeout of more than 0 seconds")
        started = time.monotonic()
        life = self._begin_life()
        try:
            endpoint, resolve = self._find_master(patience)
            connection = self._new_connection(endpoint, resolve, life)
            joined = connection.start(max(0.001, patience - (time.monotonic() - started)))
            if life != self._life:  # closed at the very moment
                connection.close()
        finally:
            self._connecting = False
        try:
            joined.result()
        except BaseException:
            connection.close()
            raise
        if connection.membership.identity.watched:
            connection.wait_watched(SENTINEL_PATIENCE_S)

    def _begin_life(self) -> int:
        """Claims the right to connect; the number is that of this attempt, which `close()` ends."""
        with self._lock:
            connection = self._connection
            if self._connecting or (connection is not None and connection.membership.standing not in ENDED):
                raise UsageError(f"already connected to group {self._group!r}, or connecting; call close() first")
            self._connecting = True
            return self._life

    def _new_connection(
        self, endpoint: Endpoint, resolve: Callable[[], Endpoint] | None, life: int
    ) -> MasterConnection:
        from ray_pccl.peer.operations import Operations
        from ray_pccl.ring.plane import DataPlane

        backend = _load_backend(self._backend)
        minimum, maximum, rank = self._limits
        watched = self._settings.sentinel and supports_sentinel()
        with self._lock:
            if life != self._life:
                raise NotConnectedError(f"the communicator of group {self._group!r} was closed while it connected")
            if self._used_peer_id:
                self._peer_id = _new_peer_id(self._label)
            self._used_peer_id = True
            ledger = Ledger()
            plane = DataPlane.towards(endpoint, self._group, self._peer_id, ledger, backend)
            plane.configure(self._settings)
            limits = (minimum, maximum, rank)
            identity = Identity(self._peer_id, self._group, host_id(), *limits, watched, plane.address, self._expected)
            membership = Membership(identity, self._settings, time.monotonic(), ledger)
            connection = MasterConnection(membership, endpoint, resolve, self._events.put, plane)
            plane.start(connection.report_link, connection.observe_link)
            self._connection = connection
            # Before anyone can see that we are a member: a callback may be the first to call.
            self._early_call = True
            if self._running is not None:
                self._running.close()
            self._running = Operations(connection, plane)
            self._let_go.detach()
            self._let_go = weakref.finalize(self, _abandon, connection, self._events, self._running)
        return connection

    def close(self) -> None:
        """Leaves the group. The others go on in a new epoch. Does nothing if not connected."""
        self._life += 1
        connection, self._connection = self._connection, None
        running, self._running = self._running, None
        if connection is not None and self._pid == os.getpid():
            connection.close()
        if running is not None:
            running.close()
        self._events.close()

    def __enter__(self) -> Communicator:
        self.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---------------------------------------------------------------------------------------------- who is here

    @property
    def peer_group(self) -> str:
        """The group's name."""
        return self._group

    @property
    def peer_id(self) -> str:
        """This peer's name: unique for ever. A communicator that connects again has a new one."""
        return self._peer_id

    @property
    def backend(self) -> str:
        """Who moves the data: "ring", "gloo" or "nccl"."""
        return self._backend

    @property
    def rank(self) -> int:
        """This peer's place in the epoch, from 0."""
        return self._view().rank

    @property
    def world_size(self) -> int:
        """How many members the epoch has."""
        return len(self._view().members)

    @property
    def epoch(self) -> int:
        """The number of the present epoch: it only grows."""
        return self._view().epoch

    @property
    def members(self) -> tuple[str, ...]:
        """The `peer_id` of every member, by rank."""
        return tuple(member.peer_id for member in self._view().members)

    def get_attribute(self, attribute: Attribute) -> int:
        """A number about the epoch: a snapshot, the same on all members."""
        view = self._view()
        if attribute is Attribute.PEER_GROUP_WORLD_SIZE:
            return len(view.members)
        return view.attributes[attribute.value]

    def statistics(self) -> Statistics:
        """What this communicator has done since `connect()`: counts, bytes, latencies, recoveries."""
        return self._connected().recorder.snapshot()

    def on_membership(self, callback: Callable[[MembershipEvent], None]) -> None:
        """Has `callback` called with every `MembershipEvent` from now on: joins, deaths with their reason, epochs.

        Callbacks run one after another, in a thread of their own, so they may use the communicator. One that raises is
        logged, and called again for the next event.
        """
        self._events.subscribe(callback)

    # -------------------------------------------------------------------------------------------- calls for all

    def update_topology(self, timeout: float | None = None) -> None:
        """The vote that admits who waits: returns when all members have called it, with the new epoch in place.

        The first call since this peer was admitted returns at once if the peer has entered no operation since, nor met
        the others in another call: they have just left the one that admitted it.

        An order of the ring that was found in the background since `optimize_topology()` comes with the new epoch.

        Raises:
            OperationTimeoutError: Not all members came within `timeout` seconds (``op_timeout_s`` if not given); says
                who is in which call.
            PeerEvictedError, MasterStoppedError, MasterUnreachableError: The vote can't be held.
        """
        early, self._early_call = self._early_call, False
        if early and not self._operations().entered:
            self._view()
            return
        self._vote(VoteKind.UPDATE_TOPOLOGY, self._settings.op_timeout_s if timeout is None else timeout)

    def optimize_topology(
        self, timeout: float | None = None, on_progress: Callable[[TopologyProgress], None] | None = None
    ) -> None:
        """Puts the ring into the best order: all members call it, and it returns on all with the new epoch in place.

        What the master does not know of the bandwidth between hosts is measured first, some hundred milliseconds an
        edge, many at a time. Then the ring is ordered so that its slowest edge is as fast as can be, and after that the
        sum of all; peers on one host stay neighbours. It admits nobody. Members that die meanwhile are left out.
        Where the present order is as good, the epoch stays.

        Args:
            timeout: How long to wait for all members to come, in seconds; ``op_timeout_s`` if not given. The rest
                takes as long as it takes, each step with a limit of its own.
            on_progress: Called in this thread with each `TopologyProgress`. If it raises, this peer leaves the call.

        Raises:
            OperationTimeoutError: Not all members came in time; says who is in which call.
            NoRingError: No ring does without edges that can't connect; ``edges`` names them. The order stays.
            UsageError: It is running in another thread already.
            PeerEvictedError, MasterStoppedError, MasterUnreachableError: The vote can't be held.
        """
        patience = self._settings.op_timeout_s if timeout is None else timeout
        self._vote(VoteKind.OPTIMIZE_TOPOLOGY, patience, inform=on_progress)

    def topology(self) -> Topology:
        """The ring as it is, and what is known of the bandwidth between its peers. Any member may ask at any time."""
        from ray_pccl.peer.topology import read

        return read(self._query(Question.TOPOLOGY).values)

    def are_peers_pending(self, timeout: float | None = None) -> bool:
        """Whether peers wait for admission: a vote of all members, so that all get the same answer.

        Raises:
            OperationTimeoutError: Not all members came in time; says who is in which call.
        """
        return self._vote(VoteKind.PEERS_PENDING, self._settings.op_timeout_s if timeout is None else timeout)

    def await_minimum(self, timeout: float | None = None) -> None:
        """Waits until the group has its minimum again, admitting newcomers as they come.

        Returns at once if it has. Operations call it by themselves.

        Raises:
            TooFewPeersError: Not enough newcomers within `timeout` seconds (``join_timeout_s`` if not given).
        """
        view = self._view()
        if len(view.members) < view.min_world_size:
            self._vote(VoteKind.AWAIT_MINIMUM, self._settings.join_timeout_s if timeout is None else timeout)

    def sync_shared_state(
        self,
        state: SharedState,
        strategy: SharedStateSyncStrategy | None = None,
        *,
        timeout: float | None = None,
    ) -> SharedStateSyncInfo:
        """Brings all members to the same content and revision of their shared state; all of them call it.

        Without a `strategy` it is ENFORCE_POPULAR: the content that most members hold wins, of those that offer the
        due revision and took part in the last sync, so never a newcomer's; of contents that as many hold, that of the
        member who has taken part for longest, then of the lowest rank. Only pieces that differ move, from all members
        that hold them; they are verified, and written into the tensors in place only when everyone has everything. If
        it raises, the state is what it was. It belongs to the call until that returns.

        The revision is one more than the last one, on at least one member that took part; the first sync of a group
        begins anywhere, with the highest that is offered. Who is behind is brought up. A death does not end it.

        Raises:
            RevisionError: Only here, if this peer's revision is ahead of the group's, which has gone on without it; on
                all, if nobody offers the revision that is due.
            SharedStateMismatchError: On all: members hold other tensors (names, types, shapes, flags), or their
                strategies contradict one another.
            NoUpToDatePeerError: On all: the last member died that held what others lack. The next sync is a first one.
            OperationTimeoutError: Not all members came within `timeout` seconds (``op_timeout_s`` if not given), or for
                as long nothing arrived any more.
            TooFewPeersError, PeerEvictedError, MasterUnreachableError, UsageError: As for all collectives.
        """
        from ray_pccl.state.rows import SharedStateSyncStrategy

        chosen = SharedStateSyncStrategy.ENFORCE_POPULAR if strategy is None else strategy
        return self._operations().shared_states.sync(state, chosen, timeout)

    # --------------------------------------------------------------------------------------- calls for one alone

    def num_waiting(self) -> int:
        """How many peers wait for admission now. Members may see different numbers at the same time."""
        return self._query(Question.NUM_WAITING).amount

    def set_closed(self) -> None:
        """Refuses all further joins, for good; who waits gets `RendezvousClosedError`. The members go on."""
        self._query(Question.SET_CLOSED)

    def is_closed(self) -> bool:
        """Whether `set_closed()` was called on the group."""
        return self._query(Question.IS_CLOSED).flag

    # -------------------------------------------------------------------------------------------------- inside

    def _require_own_process(self) -> None:
        if self._pid != os.getpid():
            raise UsageError("this communicator belongs to the parent process: make a new one after a fork")

    def _connected(self) -> MasterConnection:
        self._require_own_process()
        connection = self._connection
        if connection is None:
            raise NotConnectedError(f"not connected to group {self._group!r}: call connect() first")
        return connection

    def _operations(self) -> Operations:
        self._view()  # says why there are none
        assert self._running is not None
        return self._running

    def _view(self) -> View:
        membership = self._connected().membership
        if membership.standing is not Standing.STOPPED:
            membership.require_member()
        return membership.view

    def _vote(
        self,
        kind: VoteKind,
        timeout_s: float,
        only: tuple[str, ...] | None = None,
        inform: Callable[[Any], None] | None = None,
    ) -> bool:
        patience = check_timeout(timeout_s, f"{kind.value}()")
        connection = self._connected()
        value = bool(connection.call(lambda now: connection.membership.vote(kind, patience, now, only), inform))
        if kind is not VoteKind.AWAIT_MINIMUM:
            self._early_call = False  # it has met all others: what they call from now on, it calls too
        return value

    def _query(self, what: Question) -> Reply:
        connection = self._connected()
        reply: Reply = connection.call(lambda now: connection.membership.query(what, now))
        return reply

    def _store_request(
        self,
        op: StoreOp,
        *,
        keys: tuple[str, ...] = (),
        values: tuple[bytes, ...] = (),
        amount: int = 0,
        timeout_s: float = 0.0,
    ) -> Reply:
        connection = self._connected()

        def begin(now: float) -> tuple[Hashable, list[Effect]]:
            return connection.membership.request(op, now, keys=keys, values=values, amount=amount, timeout_s=timeout_s)

        reply: Reply = connection.call(begin)
        return reply

    def _find_master(self, patience: float) -> tuple[Endpoint, Callable[[], Endpoint] | None]:
        if self._master is not None:
            return self._master, None
        from ray_pccl.driver.master import find_endpoint, finder

        return find_endpoint(self._namespace, timeout_s=patience), finder(self._namespace)


def _group_name(peer_group: str | int) -> str:
    if isinstance(peer_group, bool) or not isinstance(peer_group, str | int) or peer_group == "":
        raise SettingsError(f"peer_group is a name or a number, not {peer_group!r}")
    return str(peer_group)


def _check_sizes(minimum: int, maximum: int | None, rank: int | None) -> None:
    if not isinstance(minimum, int) or minimum < 1:
        raise SettingsError(f"min_world_size is 1 or more, not {minimum!r}")
    if maximum is not None and (not isinstance(maximum, int) or maximum < minimum):
        raise SettingsError(f"max_world_size is None, or at least min_world_size={minimum}, not {maximum!r}")
    if rank is not None and (not isinstance(rank, int) or rank < 0 or (maximum is not None and rank >= maximum)):
        raise SettingsError(f"rank is None, or from 0 to below max_world_size={maximum}, not {rank!r}")


def check_backend(backend: str) -> str:
    """Who may move the data."""
    if backend not in BACKENDS:
        known = ", ".join(map(repr, BACKENDS))
        raise SettingsError(f"backend is one of {known}, not {backend!r}")
    return backend


def _load_backend(name: str) -> Backend | None:
    """What does the reductions, if not ourselves; loads torch."""
    if name == "ring":
        return None
    try:
        from ray_pccl.torch.delegated import TorchBackend
    except ImportError as error:
        raise BackendUnavailableError(
            f"backend={name!r} needs torch, which can't be imported ({error}): pip install 'ray-pccl[torch]', or use "
            "backend='ring'"
        ) from error
    return TorchBackend(name)


def _check_label(label: str | None) -> str | None:
    if label is not None and (not isinstance(label, str) or len(label.encode()) > LONGEST_LABEL):
        raise SettingsError(f"label is None, or a text of up to {LONGEST_LABEL} bytes, not {label!r}")
    return label


def _abandon(connection: MasterConnection | None, events: EventQueue, running: Operations | None = None) -> None:
    """What is left to do for a communicator that nobody holds any more."""
    if connection is not None:
        connection.close()
    if running is not None:
        running.close()
    events.close()


def _new_peer_id(label: str | None) -> str:
    return f"{label or f'{host_id()}-{os.getpid()}'}-{secrets.token_hex(8)}"


_open: weakref.WeakSet[Communicator] = weakref.WeakSet()


@atexit.register
def _leave_groups() -> None:
    """A process that ends in an orderly way leaves its groups, instead of being taken for dead."""
    for communicator in list(_open):
        with contextlib.suppress(PCCLError):
            communicator.close()
