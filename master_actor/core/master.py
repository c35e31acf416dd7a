"""The master's mind: every group, and every sign of life, behind one entrance.

`Master.handle(event, now)` returns the actions to carry out, in order. It keeps no clock and touches no socket.
"""

from __future__ import annotations

from master_actor.core.actions import (
    Action,
    Append,
    Complain,
    Disconnected,
    Event,
    EvictionRequested,
    ExpectationChanged,
    Received,
    Send,
    SentinelGone,
    SentinelSaid,
    Solved,
    StopRequested,
    Tick,
)
from master_actor.core.group import Group
from master_actor.core.liveness import Liveness
from master_actor.core.records import Booted, Durable
from ray_pccl.control.messages import (
    Answer,
    Beat,
    Farewell,
    FromPeer,
    FromSentinel,
    Join,
    Leave,
    LinkBroken,
    Measured,
    Observed,
    Poll,
    ProcessState,
    Query,
    Register,
    Round,
    Seen,
    Stopped,
    StoreRequest,
    Vote,
    Withdraw,
)
from ray_pccl.settings import Settings
from ray_pccl.types import Attribute, GroupStatus

SWEEP_S = 1.0


class Master:
    """All groups of one master. Start it with what the journal held, and carry out `begin()` first."""

    def __init__(self, durable: Durable, identity: Booted, settings: Settings, now: float) -> None:
        self.durable = durable
        self.identity = identity
        self._settings = settings
        self._rounds = 0
        self._swept = now
        self._out: list[Action] = []
        self.liveness = Liveness(settings)
        self.groups: dict[str, Group] = {}
        self._group_of: dict[str, str] = {}
        for name in list(durable.groups):
            group = self._group(name, now)
            self._group_of.update((member.peer_id, name) for member in group.durable.members)

    def begin(self) -> list[Action]:
        """The first actions: the boot is written down before anything is said (R5)."""
        self.durable.apply(self.identity)
        return [Append(self.identity)]

    def handle(self, event: Event, now: float) -> list[Action]:
        """Takes one event into account and returns what has to be done, in order."""
        match event:
            case Received(peer_id, message):
                self._received(peer_id, message, now)
            case Disconnected(peer_id):
                self._disconnected(peer_id, now)
            case SentinelSaid(host, message):
                self._sentinel_said(host, message, now)
            case SentinelGone(host):
                self.liveness.sentinel_gone(host, now)
            case EvictionRequested(peer_id, reason):
                self._lose(peer_id, reason, certain=False, now=now)
            case ExpectationChanged(group, number):
                if group in self.groups:
                    self.groups[group].expect(number, now)
            case Solved(group):
                if group in self.groups:
                    self.groups[group].solved(event, now)
            case StopRequested(reason):
                self._out += [Send(peer_id, Stopped(reason)) for peer_id in self.liveness.peers]
            case Tick():
                self._tick(now)
        out, self._out = self._out, []
        return out

    def belongs(self, peer_id: str) -> bool:
        """Whether the peer is a member of its group, or waits to be one. Who is lost must not be encouraged (R7)."""
        name = self._group_of.get(peer_id)
        return name is not None and self.groups[name].has(peer_id)

    def world_size_of(self, peer_id: str) -> int:
        """How many members the group of a member has; 0 for who is in none."""
        name = self._group_of.get(peer_id)
        group = None if name is None else self.groups.get(name)
        return len(group.durable.members) if group is not None and group.is_member(peer_id) else 0

    def describe(self, prefix: str) -> list[GroupStatus]:
        """Every group that has members or waiters, with what its store holds under keys of this prefix."""
        return [
            GroupStatus(
                name,
                group.durable.epoch,
                tuple(group.living),
                tuple(group.room.waiters),
                {
                    key: stored.value
                    for key, stored in group.durable.store.items()
                    if key.startswith(prefix) and stored.value is not None
                },
            )
            for name, group in self.groups.items()
            if group.living or len(group.room)
        ]

    def _received(self, peer_id: str, message: FromPeer, now: float) -> None:
        if isinstance(message, Join | Register):
            self._group_of[peer_id] = message.group
            self.liveness.connected(peer_id, message.host, watched=message.watched, now=now)
        else:
            self.liveness.heard(peer_id, now)
        group = self._group(self._group_of[peer_id], now) if peer_id in self._group_of else None
        if group is None:
            return
        match message:
            case Join():
                group.join(message, now)
            case Register():
                group.register(message, now)
            case Answer():
                group.answer(peer_id, message, now)
            case Vote(vote):
                group.vote(peer_id, vote, now)
            case Withdraw(kind):
                group.withdraw(peer_id, kind)
            case LinkBroken():
                group.link_broken(peer_id, message, now)
            case Measured() | Observed():
                group.measured(peer_id, message, now)
            case StoreRequest():
                group.store_request(peer_id, message, now)
            case Query():
                group.query(peer_id, message, now)
            case Poll():
                group.poll(peer_id, now)
            case Leave():
                group.leave(peer_id, now)
            case Farewell():
                group.froze(peer_id, now)
            case Beat():
                pass

    def _disconnected(self, peer_id: str, now: float) -> None:
        certain = self.liveness.disconnected(peer_id)
        name = self._group_of.get(peer_id)
        if name is not None:
            group, reason = self._group(name, now), "its connection to the master closed"
            group.lose(peer_id, reason, certain=certain, now=now, tell=False)

    def _sentinel_said(self, host: str, message: FromSentinel | None, now: float) -> None:
        self.liveness.sentinel_heard(host, now)
        if isinstance(message, Seen):
            self.liveness.seen(host, message.peer_id, message.state, now)
            if message.state is ProcessState.EXITING:
                self._lose(message.peer_id, "its process is exiting", certain=True, now=now)

    def _lose(self, peer_id: str, reason: str, *, certain: bool, now: float) -> None:
        name = self._group_of.get(peer_id)
        if name is not None:
            self._group(name, now).lose(peer_id, reason, certain=certain, now=now)

    def _tick(self, now: float) -> None:
        for verdict in self.liveness.tick(now):
            self._lose(verdict.peer_id, verdict.reason, certain=False, now=now)
        for group in self.groups.values():
            try:
                group.tick(now)
            except Exception as error:  # a bug in one group must not stop the time of the others
                self._emit(Complain(f"group {group.name!r} could not tick", error))
        if now - self._swept >= SWEEP_S:
            self._swept = now
            self._forget_strangers()

    def _forget_strangers(self) -> None:
        """Drops who has no connection and no place in any group, and groups that hold nothing to remember."""
        self._group_of = {
            peer_id: name
            for peer_id, name in self._group_of.items()
            if peer_id in self.liveness.peers or self.groups[name].has(peer_id) or peer_id in self.groups[name].lost
        }
        for name in [name for name, group in self.groups.items() if group.forgettable]:
            if name not in self._group_of.values():
                del self.groups[name], self.durable.groups[name]

    def _group(self, name: str, now: float) -> Group:
        if name not in self.groups:
            self.groups[name] = Group(
                name,
                self.durable,
                self._settings,
                emit=self._emit,
                next_round=self._next_round,
                census=self._census,
                now=now,
            )
        return self.groups[name]

    def _emit(self, action: Action) -> None:
        self._out.append(action)

    def _next_round(self) -> Round:
        self._rounds += 1
        return (self.identity.boot, self._rounds)

    def _census(self) -> dict[str, int]:
        sizes = [size for group in self.groups.values() if (size := len(group.living))]
        return {
            Attribute.GLOBAL_WORLD_SIZE.value: sum(sizes),
            Attribute.NUM_DISTINCT_PEER_GROUPS.value: len(sizes),
            Attribute.LARGEST_PEER_GROUP_WORLD_SIZE.value: max(sizes, default=0),
        }
