"""A whole world in one thread, under a clock of its own: masters, their journal, peers, connections and processes.

The real `Master`, the real `Journal` and the real `Membership` run here; only sockets, time and tensors are pretended.
Every message waits in its connection until somebody delivers it, every action of a master waits until somebody carries
it out, and anything may die in between. `World.check()` holds the invariants; `World.settle()` heals everything and
demands that no call is left waiting.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from master_actor.core.actions import (
    Action,
    Append,
    Complain,
    Disconnected,
    Event,
    Note,
    Received,
    Send,
    SentinelGone,
    SentinelSaid,
    Solve,
    Solved,
    Tick,
)
from master_actor.core.master import Master
from master_actor.core.optimizing import Optimizer
from master_actor.core.phases import Phase
from master_actor.core.records import Booted, Durable, GroupEmptied, decode_records, encode_records
from master_actor.journal import Journal, MemoryStorage, Superseded
from ray_pccl.control.messages import (
    Beat,
    Edge,
    Join,
    Message,
    OperationState,
    Probe,
    ProcessState,
    Question,
    Register,
    Registered,
    Seen,
    StoreOp,
    VoteKind,
    Watch,
    Welcome,
)
from ray_pccl.errors import PCCLError, ProtocolError
from ray_pccl.peer import effects as peer_side
from ray_pccl.peer.effects import Identity
from ray_pccl.peer.ledger import FrozenError
from ray_pccl.peer.membership import ENDED, JOIN, Membership, Standing
from ray_pccl.settings import Settings
from ray_pccl.types import Member

SETTINGS = Settings(
    heartbeat_interval_ms=200,
    heartbeat_timeout_s=1.0,
    stall_timeout_s=5.0,
    answer_timeout_s=2.0,
    register_grace_s=3.0,
    reconnect_cap_ms=500,
    master_lease_s=8.0,
    master_timeout_s=12.0,
    join_timeout_s=20.0,
    op_timeout_s=15.0,
    last_call_s=0.4,
    store_timeout_s=10.0,
)
STEP_S = 0.2
VERIFY_TICKS = 4
FAR_S = 100.0
FRESH_TAG = 99


class Violation(AssertionError):
    """An invariant does not hold; the message ends with what happened."""


class MasterCrash(Exception):
    """The master is to die at this action."""


@dataclass(eq=False)
class Link:
    """A connection of a peer to a master, with what is on its way. `severed`: closed by one side."""

    peer: Peer
    master: MasterProcess
    up: deque[Message] = field(default_factory=deque)
    down: deque[Message] = field(default_factory=deque)
    up_closed: bool = False
    down_closed: bool = False
    dial: int = 0


class MasterProcess:
    """A master and what its server would hold."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.alive = True
        self.cut_off = False
        """Whether it can't reach its journal: it waits, and does not know whether it was replaced."""
        self.confirmed = world.now
        self.links: dict[str, Link] = {}
        self.pending: deque[Action] = deque()
        self.searches: deque[Solve] = deque()
        """Questions that its solver has not answered yet."""
        self.journal = Journal(world.storage)
        durable = self._load()
        old = durable.identity
        identity = Booted((old.boot if old else 0) + 1, f"{world.boots}", "m", "sim", 1, b"k")
        world.boots += 1
        self.core = Master(durable, identity, world.settings, world.now)
        self.pending.extend(self.core.begin())
        self.carry_out_all()

    def _load(self) -> Durable:
        _, entries = self.journal.load()
        durable = Durable()
        for entry in entries:
            for record in decode_records(entry):
                durable.apply(record)
        return durable

    def handle(self, event: Event) -> None:
        if self.alive:
            actions = self.core.handle(event, self.world.now)
            self.pending.extend(action for action in actions if not isinstance(action, Note))  # nobody acts on a note

    def carry_out(self) -> None:
        """One action: the crash points lie before and after it."""
        action = self.pending[0]
        if self.cut_off and isinstance(action, Append):
            return
        if not self.is_ours() and isinstance(action, Send) and isinstance(action.message, Registered):
            self.verify()
            if not self.is_ours():
                return
        self.world.crash_point(self)
        self.pending.popleft()
        if isinstance(action, Complain):
            self.world.fail(f"{action.what}: {action.error!r}")
        elif isinstance(action, Append):
            try:
                self.journal.append(encode_records([action.record]))
            except Superseded:
                self.world.note(f"master boot {self.core.identity.boot} is superseded, and exits")
                self.world.master_ends(self)
                return
            self.confirmed = self.world.now
            self.world.journalled(action.record)
        elif isinstance(action, Solve):
            self.searches.append(action)
        else:
            link = self.links.get(action.peer_id)
            if link is not None and not link.down_closed:
                link.down.append(action.message)
        self.world.crash_point(self)

    def solve(self) -> bool:
        """The solver answers its oldest question: mostly with another ring, now and then that there is none."""
        if not self.alive or not self.searches:
            return False
        question = self.searches.popleft()
        count = len(question.hosts)
        if question.number % 5 == 0:
            self.handle(Solved(question.group, question.number, edges=((0, 1),)))
        elif question.number % 7 == 0:
            self.handle(Solved(question.group, question.number, error="it broke"))
        else:
            ring = (0, *range(count - 1, 0, -1))
            worth = float(1000 + question.number)
            optimal = question.number % 2 == 0
            self.handle(Solved(question.group, question.number, ring, worth, worth * count, optimal))
        return True

    def is_ours(self) -> bool:
        return self.world.now - self.confirmed < self.world.settings.register_grace_s

    def verify(self) -> None:
        """Now and then a master makes sure that it still is the master."""
        if self.cut_off:
            return
        try:
            self.journal.verify()
            self.confirmed = self.world.now
        except Superseded:
            self.world.note(f"master boot {self.core.identity.boot} finds that it was replaced, and exits")
            self.world.master_ends(self)

    def carry_out_all(self) -> None:
        try:
            while self.alive and self.pending:
                before = len(self.pending)
                self.carry_out()
                if len(self.pending) == before:
                    return  # it waits for its journal
        except MasterCrash:
            self.world.master_ends(self)


class Peer:
    """A peer's process: its membership, its calls, and the operations it runs."""

    def __init__(self, world: World, identity: Identity, settings: Settings) -> None:
        self.world = world
        self.name = identity.peer_id
        self.membership = Membership(identity, settings, world.now)
        self.membership.join(world.settings.join_timeout_s, world.now)
        self.alive = True
        self.stopped = False
        self.partitioned = False
        self.link: Link | None = None
        self.sentinel_at: MasterProcess | None = None
        self.calls: dict[Hashable, str] = {JOIN: "join"}
        self.results: list[tuple[str, Any]] = []
        self.epochs: list[int] = []
        self.running: dict[tuple[int, int], int] = {}
        """Operations in flight here, with the epoch in which this peer published its part."""
        self.probes: deque[Probe] = deque()
        """Probes under way."""

    @property
    def group(self) -> str:
        return self.membership.identity.group

    @property
    def awake(self) -> bool:
        return self.alive and not self.stopped

    @property
    def member(self) -> bool:
        return self.alive and self.membership.standing is Standing.MEMBER

    def apply(self, effects: list[peer_side.Effect]) -> None:
        for effect in effects:
            match effect:
                case peer_side.Send(message):
                    if self.link is not None and not self.link.up_closed:
                        self.link.up.append(message)
                case peer_side.Settle(call, value):
                    self._ended(call, value)
                case peer_side.Fail(call, error):
                    self._ended(call, error)
                case peer_side.Tell() | peer_side.Inform():
                    pass
                case peer_side.Measure(probe):
                    self.probes.append(probe)
        view = self.membership.view
        if view.epoch and (not self.epochs or self.epochs[-1] != view.epoch):
            self.epochs.append(view.epoch)
            self.world.saw_epoch(self)
        self._follow_ledger()
        if self.membership.standing in ENDED:
            self.world.hang_up(self)

    def _ended(self, call: Hashable, value: Any) -> None:
        if call in self.calls:
            what = self.calls.pop(call)
            self.results.append((what, value))
            self.world.told(self, what, value)

    def _follow_ledger(self) -> None:
        """What a decision did to the operations in flight."""
        for key in list(self.running):
            operation = self.membership.ledger.operations.get(key)
            if operation is None:
                self.world.fail(f"{self.name} has lost its operation {key}, which it still runs")
            elif operation.state is OperationState.FAILED:
                del self.running[key]
            elif operation.state is OperationState.COMMITTED:
                del self.running[key]
                self.world.committed(self, key, operation.epoch)
            elif operation.epoch != self.running[key]:
                self.running[key] = operation.epoch  # aborted: it is run again in the new epoch
                self.world.published.add((operation.epoch, key, self.name, "entered"))

    def end_probe(self) -> bool:
        """The oldest probe ends: with figures, or with nothing if the other is gone."""
        if not self.awake or not self.probes:
            return False
        probe = self.probes.popleft()
        rate = 100.0 if self.world.peers[probe.other].awake else 0.0 if self.world.steps % 2 else None
        edges = (Edge(self.name, probe.other, rate), Edge(probe.other, self.name, rate))
        if self.member:
            self.apply(self.membership.probed(probe, edges, self.world.now))
        return True

    def call(self, begin: Any, what: str) -> None:
        try:
            call, effects = begin()
        except PCCLError:
            return
        self.calls[call] = what
        self.apply(effects)


def _deadlines(optimizer: Optimizer) -> list[float]:
    """When what is under way in `optimize_topology()` is given up, at the latest."""
    searching = [optimizer._search.deadline] if optimizer._search is not None else []
    survey = optimizer.survey
    return [*searching, *((survey.deadlines or [optimizer._quiet_at]) if survey is not None else [])]


class World:
    """Everything there is."""

    def __init__(self, settings: Settings = SETTINGS, crash_at: Iterable[int] = ()) -> None:
        self.settings = settings
        self.now = 1000.0
        self.storage = MemoryStorage()
        self.boots = 0
        self.masters: list[MasterProcess] = []
        self.peers: dict[str, Peer] = {}
        self.story: list[str] = []
        self.crash_at = set(crash_at)
        """At which points between two actions a master dies, counted through the whole life."""
        self.crash_points = 0
        self.published: set[tuple[int, tuple[int, int], str, str]] = set()
        self.broken_edges: set[tuple[int, frozenset[str]]] = set()
        self.epoch_members: dict[tuple[str, int], tuple[Member, ...]] = {}
        self.outcomes: dict[tuple[str, int, tuple[int, int]], tuple[tuple[str, ...], str]] = {}
        self.votes_told: dict[tuple[str, str], tuple[bool, str]] = {}
        self.lives: Counter[str] = Counter()
        """How often each group was emptied: its store and its votes begin anew each time."""
        self.sums: dict[tuple[str, int], set[int]] = {}
        self.additions: Counter[tuple[str, int]] = Counter()
        self.fired: Counter[tuple[Phase, Phase]] = Counter()
        self.steps = 0
        self.ticks = 0
        self.start_master()

    def note(self, line: str) -> None:
        self.story.append(f"{self.now:8.2f} {line}")

    def fail(self, what: str) -> None:
        raise Violation(what + "\n  " + "\n  ".join(self.story[-60:]))

    # ------------------------------------------------------------------------------------------------- masters

    @property
    def master(self) -> MasterProcess | None:
        """The newest master that lives."""
        return next((master for master in reversed(self.masters) if master.alive), None)

    def start_master(self) -> None:
        self.note(f"a master starts (boot {self.boots + 1})")
        self.masters.append(MasterProcess(self))

    def crash_master(self) -> None:
        if (master := self.master) is not None:
            self.note(f"master boot {master.core.identity.boot} CRASHES, {len(master.pending)} actions undone")
            self.master_ends(master)

    def master_ends(self, master: MasterProcess) -> None:
        master.alive = False
        self.fired.update(self._fired(master))
        master.pending.clear()
        for link in self.links():
            if link.master is master:
                link.down_closed = True
                link.up.clear()
                link.up_closed = True
        master.links.clear()

    def crash_point(self, master: MasterProcess) -> None:
        self.crash_points += 1
        if self.crash_points in self.crash_at:
            self.note(f"crash point {self.crash_points}")
            raise MasterCrash

    @staticmethod
    def _fired(master: MasterProcess) -> Counter[tuple[Phase, Phase]]:
        total: Counter[tuple[Phase, Phase]] = Counter()
        for group in master.core.groups.values():
            total.update(group.log.fired)
        return total

    def transitions(self) -> Counter[tuple[Phase, Phase]]:
        """How often each transition of the table was fired, by all masters."""
        total = Counter(self.fired)
        for master in self.masters:
            if master.alive:
                total.update(self._fired(master))
        return total

    # --------------------------------------------------------------------------------------------------- peers

    def start_peer(
        self,
        *,
        group: str = "g",
        watched: bool = True,
        minimum: int = 1,
        maximum: int | None = None,
        passive: bool = False,
    ) -> Peer:
        name = f"p{len(self.peers)}"
        identity = Identity(name, group, f"host-{name}", minimum, maximum, None, watched)
        peer = Peer(self, identity, replace(self.settings, proactive_recovery=not passive, passive_timeout_s=1.0))
        self.peers[peer.name] = peer
        self.note(f"{peer.name} starts, wants into {group!r}")
        self.dial(peer)
        return peer

    def dial(self, peer: Peer, master: MasterProcess | None = None) -> None:
        """The peer makes a connection, if a master is to be reached."""
        master = master or self.master
        if master is None or not master.alive or peer.partitioned or not peer.awake:
            return
        if peer.membership.standing in ENDED:
            return
        identity = master.core.identity
        try:
            greeting = peer.membership.welcome(Welcome(identity.boot, "m", self.settings.shared()), self.now)
        except ProtocolError:
            return
        if peer.link is not None:
            peer.link.up_closed = True
        peer.link = Link(peer, master)
        peer.link.up.extend(greeting)
        if peer.membership.identity.watched and peer.sentinel_at is not master:
            peer.sentinel_at = master
            master.handle(SentinelSaid(peer.membership.identity.host, Watch(peer.membership.identity.host)))
            master.handle(SentinelSaid(peer.membership.identity.host, Seen(peer.name, ProcessState.RUNNING)))

    def hang_up(self, peer: Peer) -> None:
        if peer.link is not None:
            peer.link.up_closed = True
            peer.link = None

    def kill(self, peer: Peer, *, seen: bool) -> None:
        """SIGKILL. `seen`: the sentinel sees it before the connection closes."""
        self.note(f"{peer.name} is KILLED" + (", and its sentinel saw it" if seen else ""))
        peer.alive = False
        if peer.link is not None:
            peer.link.up_closed = True
        if seen:
            self._sentinel(peer, ProcessState.EXITING)

    def sees_death(self, peer: Peer) -> None:
        """The sentinel of a dead peer gets round to telling."""
        if not peer.alive:
            self._sentinel(peer, ProcessState.EXITING)

    def stop(self, peer: Peer) -> None:
        self.note(f"{peer.name} is STOPPED")
        peer.stopped = True
        self._sentinel(peer, ProcessState.STOPPED)

    def resume(self, peer: Peer) -> None:
        self.note(f"{peer.name} goes on")
        peer.stopped = False
        self._sentinel(peer, ProcessState.RUNNING)

    def _sentinel(self, peer: Peer, state: ProcessState) -> None:
        master = self.master
        if not peer.membership.identity.watched or peer.partitioned or master is None:
            return
        host = peer.membership.identity.host
        if peer.sentinel_at is not master:
            peer.sentinel_at = master
            master.handle(SentinelSaid(host, Watch(host)))
        master.handle(SentinelSaid(host, Seen(peer.name, state)))
        if state is ProcessState.EXITING:
            master.handle(SentinelGone(host))

    def partition(self, peer: Peer) -> None:
        """Nothing gets through between the peer's host and any master, and no connection closes."""
        self.note(f"{peer.name} is CUT OFF from the master")
        peer.partitioned = True

    def heal(self, peer: Peer) -> None:
        self.note(f"{peer.name} reaches the master again")
        peer.partitioned = False

    # ----------------------------------------------------------------------------------------------- deliveries

    def deliver_up(self, link: Link) -> bool:
        """The next message of a peer reaches its master, or the master sees that the connection closed."""
        if link.peer.partitioned or not link.master.alive:
            return False
        if link.up:
            message = link.up.popleft()
            if isinstance(message, Join | Register):
                old = link.master.links.get(link.peer.name)
                if old is not None and message.dial < old.dial:
                    link.down_closed = True
                    return True
                if old is not None and old is not link:
                    old.down_closed = True
                link.master.links[link.peer.name], link.dial = link, message.dial
            if link.master.links.get(link.peer.name) is link:
                link.master.handle(Received(link.peer.name, message))  # type: ignore[arg-type]
            return True
        if link.up_closed and link.master.links.get(link.peer.name) is link:
            del link.master.links[link.peer.name]
            link.master.handle(Disconnected(link.peer.name))
            return True
        return False

    def deliver_down(self, link: Link) -> bool:
        """The next message of a master reaches the peer, or the peer sees that the connection closed."""
        peer = link.peer
        if peer.partitioned or not peer.awake or peer.link is not link:
            return False
        if link.down:
            message = link.down.popleft()
            self.note(f"{peer.name} <- {message}")
            peer.apply(peer.membership.received(message, self.now))  # type: ignore[arg-type]
            return True
        if link.down_closed:
            peer.link = None
            peer.apply(peer.membership.disconnected())
            return True
        return False

    def links(self) -> list[Link]:
        """All connections on which something may still arrive."""
        found = {id(peer.link): peer.link for peer in self.peers.values() if peer.link is not None}
        for master in self.masters:
            found.update((id(link), link) for link in master.links.values())
        return list(found.values())

    def deliver_all(self) -> None:
        """Until nothing is on its way any more."""
        for _ in range(10_000):
            moved = False
            for link in self.links():
                while self.deliver_up(link):
                    moved = True
                while self.deliver_down(link):
                    moved = True
            for peer in self.peers.values():
                moved = peer.end_probe() or moved
            for master in self.masters:
                before = len(master.pending)
                master.carry_out_all()
                moved = moved or len(master.pending) != before
                moved = master.solve() or moved
            if not moved:
                return
        self.fail("messages go back and forth for ever")

    # ----------------------------------------------------------------------------------------------------- time

    def advance(self, seconds: float, *, deliver: bool = True) -> None:
        """Time passes; who can, beats, reconnects and looks at its watch."""
        for _ in range(max(1, round(seconds / STEP_S))):
            self.now += STEP_S
            for peer in self.peers.values():
                self._beat(peer)
            self.ticks += 1
            for master in self.masters:
                master.handle(Tick())
                if master.alive and self.ticks % VERIFY_TICKS == 0:
                    master.verify()
            for peer in self.peers.values():
                if peer.awake:
                    peer.apply(peer.membership.tick(self.now))
                    if peer.link is None or peer.link.down_closed:
                        self.dial(peer)
            if deliver:
                self.deliver_all()
            self.check()

    def _beat(self, peer: Peer) -> None:
        if peer.partitioned or not peer.alive:
            return
        host = peer.membership.identity.host
        if peer.membership.identity.watched and (at := peer.sentinel_at) is not None and at.alive:
            at.handle(SentinelSaid(host, None))
        link = peer.link
        if not peer.awake or link is None or link.up_closed or link.master.links.get(peer.name) is not link:
            return
        link.master.handle(Received(peer.name, Beat(0)))
        # The echo does not wait behind the journal, as all else does: so it is not for everyone.
        if not link.down_closed and link.master.is_ours() and link.master.core.belongs(peer.name):
            peer.membership.heard(self.now)

    # -------------------------------------------------------------------------------------------- calls of peers

    def vote(self, peer: Peer, kind: VoteKind) -> None:
        """The peer enters a call for all. Only with nothing in flight, as its communicator sees to (R10)."""
        if not peer.awake or peer.running or kind in peer.calls:
            return
        count = peer.membership._counts.get(kind.value)
        served = count.served if count else 0
        timeout = self.settings.op_timeout_s
        self.note(f"{peer.name} calls {kind.value}")
        what = f"{kind.value}/{self.lives[peer.group]}/{served}"
        peer.call(lambda: peer.membership.vote(kind, timeout, self.now), what)

    def add(self, peer: Peer) -> None:
        if peer.awake:
            begin = lambda: peer.membership.request(StoreOp.ADD, self.now, keys=("n",), amount=1)  # noqa: E731
            if peer.member:
                self.additions[peer.group, self.lives[peer.group]] += 1
            peer.call(begin, f"add/{self.lives[peer.group]}")

    def wait_key(self, peer: Peer) -> None:
        if peer.awake:
            begin = lambda: peer.membership.request(StoreOp.WAIT, self.now, keys=("never",), timeout_s=5.0)  # noqa: E731
            peer.call(begin, "wait")

    def query(self, peer: Peer, what: Question) -> None:
        if peer.awake:
            peer.call(lambda: peer.membership.query(what, self.now), what.value)

    def leave(self, peer: Peer) -> None:
        if peer.awake:
            self.note(f"{peer.name} leaves")
            peer.apply(peer.membership.leave())

    # ------------------------------------------------------------------------------------------------ operations

    def enter(self, peer: Peer, tag: int = 0, *, retry: bool = True) -> None:
        """The peer begins a collective: it publishes its part to the members of its epoch."""
        busy = any(key[0] == tag for key in peer.running)
        if not peer.awake or not peer.member or busy or any(kind in peer.calls for kind in VoteKind):
            return
        epoch = peer.membership.view.epoch
        try:
            key = peer.membership.ledger.enter(tag, epoch, self.now, retry=retry)
        except FrozenError:
            return
        operation = peer.membership.ledger.operations[key]
        if operation.state is OperationState.RUNNING:
            self.note(f"{peer.name} enters {key} in epoch {epoch}")
            peer.running[key] = epoch
            self.published.add((epoch, key, peer.name, "entered"))

    def progress(self, peer: Peer) -> None:
        """The peer takes the next step that it can in its operations."""
        if not peer.awake or not peer.member:
            return
        ledger = peer.membership.ledger
        for key in list(peer.running):
            operation = ledger.operations[key]
            members = [member.peer_id for member in peer.membership.view.members]
            if operation.epoch != peer.membership.view.epoch:
                continue
            try:
                if operation.state is OperationState.RUNNING and self._heard_from(peer, key, members, "entered"):
                    ledger.prepare(key, self.now)
                    self.note(f"{peer.name} is prepared in {key}")
                    self.published.add((operation.epoch, key, peer.name, "prepared"))
                elif operation.state is OperationState.PREPARED and self._heard_from(peer, key, members, "prepared"):
                    ledger.commit(key, self.now)
                    del peer.running[key]
                    self.committed(peer, key, operation.epoch)
            except FrozenError:
                return

    def _heard_from(self, peer: Peer, key: tuple[int, int], members: list[str], what: str) -> bool:
        epoch = peer.membership.view.epoch
        return all(
            (epoch, key, other, what) in self.published
            and (other == peer.name or (epoch, frozenset((other, peer.name))) not in self.broken_edges)
            for other in members
        )

    def break_link(self, peer: Peer, other: Peer) -> None:
        """Two members lose the connection between them; both may report it, again and again."""
        if peer.member and other.member and peer.membership.view.epoch == other.membership.view.epoch and peer.awake:
            self.note(f"the link {peer.name}-{other.name} BREAKS in epoch {peer.membership.view.epoch}")
            self.broken_edges.add((peer.membership.view.epoch, frozenset((peer.name, other.name))))
            for end, far in ((peer, other), (other, peer), (peer, other)):
                if end.awake:
                    end.apply(end.membership.link_broken(far.name))

    # ------------------------------------------------------------------------------------------------ invariants

    def journalled(self, record: Any) -> None:
        """A record has become durable."""
        if isinstance(record, GroupEmptied):
            self.lives[record.group] += 1

    def told(self, peer: Peer, what: str, value: Any) -> None:
        """A call returned: members must have been told the same, and an addition counts once."""
        if isinstance(value, PCCLError):
            if (peer.group, what) in self.votes_told and getattr(value, "calls", None):
                self.fail(f"{what}: the master told {self.votes_told[peer.group, what]}, but {peer.name} {value!r}")
        elif what.startswith(
            (VoteKind.PEERS_PENDING.value, VoteKind.UPDATE_TOPOLOGY.value, VoteKind.OPTIMIZE_TOPOLOGY.value)
        ):
            known, first = self.votes_told.setdefault((peer.group, what), (value, peer.name))
            if known != value:
                self.fail(f"{what}: {first} was told {known}, {peer.name} {value}")
        elif what.startswith("add/"):
            sums = self.sums.setdefault((peer.group, int(what.partition("/")[2])), set())
            if value.amount in sums:
                self.fail(f"two additions of 1 both made {value.amount}")
            if value.amount > self.additions[peer.group, int(what.partition("/")[2])]:
                self.fail(f"fewer additions of 1 than {value.amount} made {value.amount}")
            sums.add(value.amount)

    def saw_epoch(self, peer: Peer) -> None:
        view = peer.membership.view
        if any(later <= earlier for earlier, later in zip(peer.epochs, peer.epochs[1:], strict=False)):
            self.fail(f"{peer.name} saw epochs {peer.epochs}: they must only grow")
        known = self.epoch_members.setdefault((peer.group, view.epoch), view.members)
        if known != view.members:
            self.fail(f"epoch {view.epoch} of {peer.group!r} has two memberships: {known} and {view.members}")
        if view.members[view.rank].peer_id != peer.name:
            self.fail(f"{peer.name} is not at its own rank in epoch {view.epoch}")

    def committed(self, peer: Peer, key: tuple[int, int], epoch: int) -> None:
        members = tuple(member.peer_id for member in self.epoch_members[peer.group, epoch])
        self.note(f"{peer.name} COMMITS {key} with {members}")
        if peer.name not in members:
            self.fail(f"{peer.name} is not in its own result of {key}")
        generation = peer.membership._admitted_in
        result, first = self.outcomes.setdefault((peer.group, generation, key), (members, peer.name))
        if result != members:
            self.fail(f"{key}: {first} returned the sum of {result}, {peer.name} that of {members}")

    def check(self) -> None:
        """What must hold at every instant."""
        self.steps += 1
        self._one_live_group()
        for master in self.masters:
            if master.alive:
                self._waits_end(master)

    def _one_live_group(self) -> None:
        """An epoch is able to go on if every member lives, is in it, and is not frozen."""
        able: dict[str, list[int]] = {}
        for (group, epoch), members in self.epoch_members.items():
            peers = [self.peers[member.peer_id] for member in members]
            if all(
                peer.member
                and peer.membership.view.epoch == epoch
                and not peer.membership.ledger.frozen
                and self.now < peer.membership.ledger.lease_ends
                for peer in peers
            ):
                able.setdefault(group, []).append(epoch)
        for group, epochs in able.items():
            newest = max(epoch for name, epoch in self.epoch_members if name == group)
            if len(epochs) > 1 or epochs[0] != newest:
                self.fail(f"group {group!r} lives in epochs {epochs} at once, and the newest is {newest}")

    def _waits_end(self, master: MasterProcess) -> None:
        """No waiter without a deadline or an event that will end it."""
        for group in master.core.groups.values():
            inquiry, living = group.inquiry, set(group.living)
            if (group.phase is Phase.ASKING) != (inquiry is not None):
                self.fail(f"{group.name!r} is {group.phase}, with the inquiry {inquiry}")
            if inquiry is not None and set(inquiry.deadlines) | set(inquiry.answers) < living:
                self.fail(f"{group.name!r} waits for answers that nobody has a deadline for")
            if group.phase is Phase.LEASED and not group.leases:
                self.fail(f"{group.name!r} waits for a lease that nobody holds")
            if group.phase is Phase.EMPTY and len(group.room):
                self.fail(f"{group.name!r} is empty, but {list(group.room.waiters)} wait")
            if group.phase in (Phase.STEADY, Phase.ASKING, Phase.RETURNING) and not living:
                self.fail(f"{group.name!r} is {group.phase} without a member")
            ends = [*group.leases.values(), *(waiter.deadline for waiter in group.room.waiters.values())]
            ends += inquiry.deadlines.values() if inquiry is not None else []
            optimizing_ends = _deadlines(group.optimizer)
            ends += optimizing_ends
            if group.optimizer.is_busy and not optimizing_ends:
                self.fail(f"{group.name!r} waits for measurements or an order that nothing ends")
            optimizing = living and living <= set(group.ballot.open[VoteKind.OPTIMIZE_TOPOLOGY])
            if optimizing and group.phase is Phase.STEADY and not group.optimizer.is_busy:
                self.fail(f"all of {group.name!r} want the best order, and nothing is done about it")
            if any(end > self.now + FAR_S for end in ends):
                self.fail(f"{group.name!r} has a wait that does not end: {ends}")
            for kind, voters in group.ballot.open.items():
                if not set(voters) <= living:
                    self.fail(f"{kind.value} counts the vote of who is no member: {voters}")

    def settle(self) -> None:
        """Everything heals; then every call ends, and every group can go on."""
        self.note("--- everything heals ---")
        self.crash_at.clear()
        for master in self.masters:
            master.cut_off = False
        for peer in self.peers.values():
            peer.partitioned = False
            if peer.alive and peer.stopped:
                self.resume(peer)
        for _ in range(60):
            if self.master is None:  # it was killed, or found that it had been replaced: it is restarted
                self.start_master()
                for peer in self.peers.values():
                    self.sees_death(peer)
            self.advance(1.0)
            if self._quiet():
                break
        for peer in self.peers.values():
            if peer.alive and peer.calls:
                self.fail(f"{peer.name} still waits for {list(peer.calls.values())}")
        self._can_go_on()

    def _quiet(self) -> bool:
        """Whether nothing will happen any more by itself: nobody waits for anything."""
        master = self.master
        if master is None or sum(master.alive for master in self.masters) > 1:
            return False
        settled = all(group.phase in (Phase.STEADY, Phase.EMPTY) for group in master.core.groups.values())
        journalled = {m.peer_id: g for g in master.core.durable.groups.values() for m in g.members}
        here = {peer.name for peer in self.peers.values() if peer.member}
        return (
            settled
            and here == set(journalled)
            and all(self.peers[name].membership.view.epoch == journalled[name].epoch for name in here)
            and not any(peer.calls or peer.membership.ledger.frozen for peer in self.peers.values() if peer.member)
            and not any(peer.calls for peer in self.peers.values() if peer.alive)
        )

    def _can_go_on(self) -> None:
        for peer in self.peers.values():
            if not peer.member:
                continue
            view = peer.membership.view
            newest = max(epoch for name, epoch in self.epoch_members if name == peer.group)
            if view.epoch != newest or peer.membership.ledger.frozen:
                self.fail(f"{peer.name} is in epoch {view.epoch}, frozen {peer.membership.ledger.frozen}: not {newest}")
        members = [peer for peer in self.peers.values() if peer.member]
        entered = [peer.membership.ledger._numbers for peer in members]
        target = {tag: max(numbers.get(tag, 0) for numbers in entered) for numbers in entered for tag in numbers}
        target[FRESH_TAG] = 1
        for _ in range(2 * max(target.values())):
            for peer in members:
                for tag, last in target.items():
                    if peer.membership.ledger._numbers.get(tag, 0) < last:
                        self.enter(peer, tag)
            for _ in range(2):
                for peer in members:
                    self.progress(peer)
        for peer in members:
            if peer.running:
                self.fail(f"{peer.name} can't finish {list(peer.running)} though everything has healed")
