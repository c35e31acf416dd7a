"""A master's core driven by hand: events in, exact actions out, under a clock that only the test moves."""

from __future__ import annotations

import copy

import msgspec

from master_actor.core.actions import (
    Action,
    Append,
    Disconnected,
    Event,
    EvictionRequested,
    Note,
    Received,
    Send,
    SentinelSaid,
    Tick,
)
from master_actor.core.group import Group
from master_actor.core.master import Master
from master_actor.core.records import Booted, Durable, EpochBegan, decode_records, encode_records
from ray_pccl.control.messages import (
    Answer,
    Ask,
    Beat,
    Decide,
    Evicted,
    FromPeer,
    Join,
    OpenVote,
    OperationReport,
    Outcome,
    ProcessState,
    Register,
    Round,
    Seen,
    Vote,
    VoteCount,
    VoteKind,
)
from ray_pccl.settings import Settings
from ray_pccl.types import Member

SETTINGS = Settings(
    heartbeat_timeout_s=1,
    stall_timeout_s=30,
    answer_timeout_s=5,
    register_grace_s=3,
    master_lease_s=60,
)
EXITING = "its process is exiting"
TOPOLOGY, PENDING, MINIMUM = VoteKind.UPDATE_TOPOLOGY, VoteKind.PEERS_PENDING, VoteKind.AWAIT_MINIMUM


class DrivenMaster:
    """A `Master` whose every action is kept. All peers beat by themselves, unless told to be `silent`."""

    def __init__(self, durable: Durable | None = None, *, boot: int = 1, now: float = 0.0) -> None:
        identity = Booted(boot, "nonce", "master", "127.0.0.1", 48148, b"key")
        self.master = Master(durable if durable is not None else Durable(), identity, SETTINGS, now)
        self.boot = boot
        self.now = now
        self.beating: set[str] = set()
        self.epochs = {(group.name, group.epoch): group.members for group in self.master.durable.groups.values()}
        self.actions: list[Action] = self.master.begin()
        self.notes: list[Note] = []
        """What was said for the timeline; the actions are without it."""

    def group(self, name: str = "g") -> Group:
        return self.master.groups[name]

    def handle(self, event: Event) -> list[Action]:
        """What the event leads to now."""
        done = self.master.handle(event, self.now)
        self.notes += [action for action in done if isinstance(action, Note)]
        actions = [self._in_full(action) for action in done if not isinstance(action, Note)]
        self.actions += actions
        return actions

    def _in_full(self, action: Action) -> Action:
        """A decision that only tells what changed, with what its receiver makes of it."""
        if isinstance(action, Append) and isinstance(action.record, EpochBegan):
            self.epochs[action.record.group, action.record.epoch] = action.record.members
        if not isinstance(action, Send) or not isinstance(action.message, Decide) or not action.message.base:
            return action
        decide = action.message
        known = (members for (_, epoch), members in self.epochs.items() if epoch == decide.base)
        [base] = [members for members in known if action.peer_id in {member.peer_id for member in members}]
        members = tuple(member for member in base if member.peer_id not in decide.removed) + decide.members
        return Send(action.peer_id, msgspec.structs.replace(decide, members=members, base=0, removed=()))

    def say(self, peer_id: str, message: FromPeer) -> list[Action]:
        """A peer says something."""
        self.beating.add(peer_id)
        return self.handle(Received(peer_id, message))

    def at(self, now: float) -> list[Action]:
        """Time passes; then the master ticks."""
        self.now = now
        for peer_id in sorted(self.beating):
            assert self.handle(Received(peer_id, Beat(0))) == []
        return self.handle(Tick())

    def join(self, peer_id: str, **given: object) -> list[Action]:
        return self.say(peer_id, joining(peer_id, **given))

    def answer(self, peer_id: str, number: int = 1, *operations: OperationReport, epoch: int = 1) -> list[Action]:
        return self.say(peer_id, Answer((self.boot, number), epoch, operations))

    def vote(self, peer_id: str, kind: VoteKind, count: int, timeout_s: float = 100.0) -> list[Action]:
        return self.say(peer_id, Vote(OpenVote(kind, count, timeout_s)))

    def dies(self, peer_id: str, host: str = "h") -> list[Action]:
        """The sentinel sees the peer's process exiting."""
        self.beating.discard(peer_id)
        return self.handle(SentinelSaid(host, Seen(peer_id, ProcessState.EXITING)))

    def hangs_up(self, peer_id: str) -> list[Action]:
        self.beating.discard(peer_id)
        return self.handle(Disconnected(peer_id))

    def evict(self, peer_id: str, reason: str = "asked for") -> list[Action]:
        return self.handle(EvictionRequested(peer_id, reason))

    def formed(self, *peers: str, group: str = "g", **given: object) -> DrivenMaster:
        """Has the peers form a group at once."""
        given = {"min_world_size": len(peers), "last_call_s": 0.0, **given}
        for peer_id in peers:
            self.join(peer_id, group=group, **given)
        self.at(self.now)
        assert [member.peer_id for member in self.group(group).durable.members] == list(peers)
        return self

    def records(self) -> list[object]:
        return [action.record for action in self.actions if isinstance(action, Append)]

    def replayed(self) -> Durable:
        """What another master would find in the journal."""
        durable = Durable()
        for record in decode_records(encode_records(self.records())):  # type: ignore[arg-type]
            durable.apply(record)
        return durable

    def restarted(self, after_s: float = 1.0) -> DrivenMaster:
        """A new master on the journal of this one."""
        again = DrivenMaster(self.replayed(), boot=self.boot + 1, now=self.now + after_s)
        again.actions = [*copy.copy(self.actions), *again.actions]
        return again


def joining(peer_id: str, **given: object) -> Join:
    """A `Join` with defaults."""
    fields = {
        "group": "g",
        "host": "h",
        "min_world_size": 2,
        "max_world_size": None,
        "rank": None,
        "timeout_s": 10.0,
        "last_call_s": 0.5,
        "watched": True,
        "passive_timeout_s": None,
        "expected": 0,
    }
    assert set(given) <= set(fields), given
    return Join(peer_id, **(fields | given))  # type: ignore[arg-type]


def registering(peer_id: str, epoch: int, *members: str, frozen: bool = False, **given: object) -> Register:
    """A `Register` with defaults."""
    fields = {"votes": (), "broken_links": (), "watched": True, "passive_timeout_s": None}
    return Register(peer_id, "g", "h", epoch, of(*members), frozen, **(fields | given))  # type: ignore[arg-type]


def of(*peers: str) -> tuple[Member, ...]:
    """Members on the usual host."""
    return tuple(Member(peer_id, "h") for peer_id in peers)


def census(world: int, groups: int = 1, largest: int | None = None) -> dict[str, int]:
    return {
        "global_world_size": world,
        "num_distinct_peer_groups": groups,
        "largest_peer_group_world_size": world if largest is None else largest,
    }


def new_epoch(
    epoch: int,
    *members: str,
    admitted_in: int | None = None,
    topology: int = 1,
    pending: VoteCount | None = None,
    lost: tuple[tuple[str, str], ...] = (),
    outcomes: tuple[Outcome, ...] = (),
    limits: tuple[int, int | None] = (2, None),
    group: str = "g",
    attributes: dict[str, int] | None = None,
) -> list[Action]:
    """The actions that begin an epoch: written down once, then told to each member."""
    admitted_in = epoch if admitted_in is None else admitted_in
    votes = {"update_topology": VoteCount(topology, True)}
    if pending is not None:
        votes["are_peers_pending"] = pending
    numbers = census(len(members)) if attributes is None else attributes
    decide = Decide(epoch, of(*members), admitted_in, outcomes, votes, lost, limits[0], numbers)
    record = EpochBegan(group, epoch, of(*members), admitted_in, votes, *limits)
    return [Append(record), *(Send(peer_id, decide) for peer_id in members)]


def asked(*peers: str, number: int = 1, boot: int = 1) -> list[Action]:
    """The question of a round to each of the peers."""
    question: Round = (boot, number)
    return [Send(peer_id, Ask(question)) for peer_id in peers]


def evicted(peer_id: str, reason: str) -> Action:
    return Send(peer_id, Evicted(reason))
