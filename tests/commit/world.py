"""Everything there is in one life: peers, their memories, a master with its journal, and a scheduler.

The scheduler draws one of all that could take a step, and lets it take one. `run` ends when every call of everyone who
lives has ended; when nothing can move any more, time passes, who was stopped goes on, the master is started again, and
if even then nothing moves, a call hangs.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import NoReturn

from master_actor.core.actions import Action, Append, Complain, Disconnected, EvictionRequested, Note, Received, Tick
from master_actor.core.master import Master
from master_actor.core.records import Booted, Durable, EpochBegan, Record
from ray_pccl.control.messages import Message
from ray_pccl.settings import Settings
from tests.commit.answers import Answers
from tests.commit.boards import Memory
from tests.commit.peer import Line, Peer
from tests.commit.plan import Fault, Plan

MOST_STEPS = 20_000
BLANKS = 25
"""After so many draws of actors that can do nothing, the next one that can is looked for."""
MEANWHILE = (0.0, 0.5, 0.5, 0.98)
"""How likely others run once more, between two loads of a peer that freezes: now and then for long."""
DEEPEST = 3
AT_ONCE = 0.5
"""How likely a dead master is replaced before anyone has noticed."""
STARTS_AGAIN = 0.1
PATIENCE_S = 6.0


class Violation(AssertionError):
    """An invariant does not hold; the message ends with what happened."""


class SteadySettings(Settings):
    """Settings that are those of the master already. Nobody is silent here: who is to be evicted, the plan says."""

    def with_shared(self, shared: object) -> Settings:
        return self


SETTINGS = SteadySettings(
    heartbeat_timeout_s=3600,
    stall_timeout_s=80_000,
    master_lease_s=86_400,
    master_timeout_s=86_400,
    answer_timeout_s=5,
    register_grace_s=3,
)


class MasterProcess:
    """A master. What it has decided to do waits in `pending`; it may die before and after each of these actions."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.alive = True
        self.lines: dict[str, Line] = {}
        self.pending: deque[Action] = deque()
        durable = Durable()
        for record in world.journal:
            durable.apply(record)
        boot = durable.identity.boot + 1 if durable.identity else 1
        self.core = Master(durable, Booted(boot, str(boot), "m", "h", 1, b""), world.settings, world.now)
        for action in self.core.begin():
            assert isinstance(action, Append)
            world.journal.append(action.record)  # a master that died before this has never been

    def hear(self, name: str, message: Message | None) -> None:
        event = Disconnected(name) if message is None else Received(name, message)  # type: ignore[arg-type]
        self.take(self.core.handle(event, self.world.now))

    def take(self, actions: list[Action]) -> None:
        """What the core has decided, without what is for onlookers only."""
        self.pending.extend(action for action in actions if not isinstance(action, Note))

    def carry_out(self) -> None:
        """One action."""
        action = self.pending[0]
        if isinstance(action, Complain):
            self.world.fail(f"{action.what}: {action.error!r}")
        elif isinstance(action, Append):
            self.world.moment("journalling")
            if self.alive:
                self.world.note(f"journal: {action.record}")
                self.world.journal.append(action.record)
                self.pending.popleft()
                self.world.moment("journalled")
        else:
            self.pending.popleft()
            if (line := self.lines.get(action.peer_id)) is not None:
                line.down.append(action.message)
            self.world.moment("pushed")


class World:
    """One life."""

    def __init__(self, plan: Plan, rng: random.Random, *, tell: bool = False) -> None:
        self.plan = plan
        self.rng = rng
        self.settings = SETTINGS
        self.now = 1000.0
        self.story: list[str] | None = [] if tell else None
        self.trace = bytearray()
        """Every step that was taken, in order: which of the actors, and which of its choices."""
        self.journal: list[Record] = []
        self.broken_links: set[tuple[int, frozenset[str]]] = set()
        self.answers = Answers(self)
        tags = 1 + max(operation.tag for operation in plan.operations)
        self.memories = {f"p{place}": Memory(tags) for place in range(plan.peers)}
        self.struck: list[tuple[str, Fault]] = []
        """Which knives went in: at what, and what they did."""
        self._moments: dict[str, int] = {}
        self._depth = 0
        self.master: MasterProcess | None = MasterProcess(self)
        self.peers = [Peer(self, place) for place in range(plan.peers)]
        self.unfinished = sum(len(peer.threads) for peer in self.peers)
        self.actors: list[Callable[[], int]] = [self._carry_out, self._start_master]
        self._urn = [0] * plan.peers + [1]
        """Places in `actors`, each as often as its speed demands."""
        for peer, (data, control) in zip(self.peers, plan.speeds, strict=True):
            work = len(self.actors)
            self.actors += [peer.work, peer.hear_peer, peer.hear_master, peer.speak, peer.dial, peer.notice]
            self._urn += [work, work + 1] * data + [work + 2, work + 3, work + 4] * control + [work + 5]
        self._form()

    def _form(self) -> None:
        """The group of all, before anything happens."""
        knives, self.knives = self.plan.knives, {}
        while not all(peer.epoch for peer in self.peers):
            for peer in self.peers:
                _ = peer.dial() or peer.speak() or peer.hear_master()
            while self._carry_out():
                pass
        self._moments.clear()
        self.knives = knives

    def peer(self, name: str) -> Peer:
        return self.peers[int(name[1:])]

    def last_epoch(self) -> EpochBegan:
        """Who is not in it was evicted, whether it knows that or not."""
        return next(record for record in reversed(self.journal) if isinstance(record, EpochBegan))

    def note(self, line: str) -> None:
        if self.story is not None:
            self.story.append(line)

    def fail(self, what: str) -> NoReturn:
        raise Violation(what + "".join(f"\n  {line}" for line in self.story or ()))

    # ------------------------------------------------------------------------------------------------ scheduler

    def run(self) -> None:
        """To the end of all calls. Raises `Violation`."""
        idle = steps = 0
        while self.unfinished:
            if self._step(self._drawn()):
                idle = 0
                steps += 1
                if steps > MOST_STEPS:
                    self.fail("it never ends")
            elif (idle := idle + 1) > BLANKS:
                idle = 0
                first, count = self._drawn(), len(self.actors)
                if not any(self._step((first + n) % count) for n in range(count)) and not self._time_helps():
                    open_calls = {peer.name: list(peer.calls) for peer in self.peers if peer.alive and peer.calls}
                    self.fail(f"calls hang: {open_calls}")
        self.answers.check()

    def _drawn(self) -> int:
        return self._urn[int(self.rng.random() * len(self._urn))]

    def _step(self, actor: int) -> bool:
        """One of the actors takes a step, if it can."""
        choice = self.actors[actor]()
        if choice:
            self.trace.append(actor)
            self.trace.append(choice)
            self.moment("step")
        return bool(choice)

    def meanwhile(self) -> None:
        """Others run between two loads of a peer that freezes."""
        if self._depth < DEEPEST:
            self._depth += 1
            once_more = self.rng.choice(MEANWHILE)
            while self.rng.random() < once_more:
                self._step(self._drawn())
            self._depth -= 1

    def _time_helps(self) -> bool:
        if self.master is None:
            self.start_master()
            return True
        if self._time_passes():
            return True
        sleepers = [peer for peer in self.peers if peer.alive and peer.stopped]
        for peer in sleepers:
            peer.stopped = False
        return bool(sleepers)

    def _carry_out(self) -> int:
        if self.master is None or not self.master.pending:
            return 0
        self.master.carry_out()
        return 1

    # --------------------------------------------------------------------------------------------------- faults

    def moment(self, name: str, peer: Peer | None = None) -> None:
        """Something happened: if the plan has a knife for the so-manieth time of it, it goes in here."""
        count = self._moments[name] = self._moments.get(name, 0) + 1
        if (fault := self.knives.get((name, count))) is not None:
            self.struck.append((name, fault))
            self.trace.append(255)
            self.strike(fault, peer)

    def strike(self, fault: Fault, peer: Peer | None) -> None:
        living = [other for other in self.peers if other.alive and not other.ended]
        if not living:
            return
        victim = peer if peer in living else self.rng.choice(living)
        self.note(f"--- {fault.value} ({victim.name}) ---")
        match fault:
            case Fault.CRASH:
                self.crash(victim)
            case Fault.CRASH_MASTER:
                self.crash_master()
            case Fault.SUSPECT | Fault.ZOMBIE:
                victim.stopped = fault is Fault.ZOMBIE
                if self.master is not None:
                    event = EvictionRequested(victim.name, "it seemed to be dead")
                    self.master.take(self.master.core.handle(event, self.now))
            case Fault.BREAK_LINK:
                others = [other for other in living if other is not victim and other.epoch == victim.epoch]
                if others:
                    self.break_link(victim, self.rng.choice(others))
            case Fault.STOP:
                victim.stopped = True
            case Fault.LEASE:
                victim.deaf = True
                victim.ledger.lease_ends = self.now
            case Fault.TIME:
                self._time_passes()

    def crash(self, victim: Peer) -> None:
        """The process ends. Of what it had sent last, some arrives and some does not; its memory stays."""
        victim.alive = False
        self.unfinished -= len(victim.threads)
        if victim.line is not None:
            self._lose_some(victim.line.up)
            victim.line.up.append(None)
        for other in self.peers:
            if other is not victim:
                self._lose_some(other.inboxes[victim.place])
                other.broken.append((victim.epoch, victim.name))

    def break_link(self, one: Peer, other: Peer) -> None:
        """Both ends will notice. What was on the way is lost, or some of it."""
        self.broken_links.add((one.epoch, frozenset((one.name, other.name))))
        for end, far in ((one, other), (other, one)):
            self._lose_some(end.inboxes[far.place])
            end.broken.append((one.epoch, far.name))

    def _lose_some(self, on_its_way: deque) -> None:  # type: ignore[type-arg]
        for _ in range(int(self.rng.random() * (len(on_its_way) + 1))):
            on_its_way.pop()

    def crash_master(self) -> None:
        """What it has pushed still arrives, unless a peer dials the next master before that."""
        if self.master is not None:
            self.master.alive = False
            self.master.pending.clear()
            self.master = None
            if self.rng.random() < AT_ONCE:
                self.start_master()

    def _start_master(self) -> int:
        if self.master is not None or self.rng.random() > STARTS_AGAIN:
            return 0
        self.start_master()
        return 1

    def start_master(self) -> None:
        self.master = MasterProcess(self)
        self.note(f"--- a master starts, boot {self.master.core.identity.boot} ---")

    def _time_passes(self) -> bool:
        """So much that the master waits for nobody any more. Returns whether that changed anything."""
        self.now += PATIENCE_S
        if self.master is None:
            return False
        self.master.take(self.master.core.handle(Tick(), self.now))
        return bool(self.master.pending)
