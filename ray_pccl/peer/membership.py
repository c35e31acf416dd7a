"""One peer's life in a group, as a pure machine: what the master says goes in, effects come out.

It holds all that a master could ask for after a restart. No socket, no thread and no clock lives here.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum

import msgspec

from ray_pccl.control import frames
from ray_pccl.control.messages import (
    LEFT,
    Answer,
    Ask,
    Beat,
    Decide,
    Edge,
    Evicted,
    Farewell,
    FromMaster,
    Join,
    Leave,
    LinkBroken,
    Measured,
    Message,
    News,
    OpenVote,
    Poll,
    Probe,
    Query,
    Question,
    Refused,
    Register,
    Registered,
    Reply,
    Round,
    Stopped,
    StoreOp,
    StoreRequest,
    Surveying,
    Vote,
    VoteCount,
    VoteFailed,
    VoteKind,
    VoteServed,
    Welcome,
    Withdraw,
    error_of,
)
from ray_pccl.errors import (
    MasterStoppedError,
    MasterUnreachableError,
    NotConnectedError,
    OperationTimeoutError,
    PCCLError,
    PeerEvictedError,
    ProtocolError,
    RendezvousTimeoutError,
    UsageError,
)
from ray_pccl.peer.effects import Effect, Fail, Identity, Inform, Measure, Send, Settle, Tell, View
from ray_pccl.peer.ledger import Ledger
from ray_pccl.peer.network import Network
from ray_pccl.ring import fault_points
from ray_pccl.settings import Settings
from ray_pccl.topology.progress import TopologyProgress
from ray_pccl.types import Member, MembershipChange, MembershipEvent

JOIN = "join"
SLACK_S = 2.0
"""How much longer than the master a peer waits for an answer that the master owes it."""
_UNKNOWN_REASON = "it was lost while the master restarted"


class Standing(Enum):
    """What the peer is to its group."""

    JOINING = "joining"
    MEMBER = "member"
    REFUSED = "refused"
    EVICTED = "evicted"
    STOPPED = "stopped"
    LEFT = "left"


ENDED = (Standing.REFUSED, Standing.EVICTED, Standing.STOPPED, Standing.LEFT)


@dataclass(slots=True)
class _Call:
    """A request that the master owes an answer to, and the latest time for it."""

    message: Message
    deadline: float
    own_deadline: float = 0.0
    """The caller's, where a master has asked for more time since."""


class Membership:
    """The machine. Every method that changes something returns the effects to carry out, in order."""

    def __init__(self, identity: Identity, settings: Settings, now: float, ledger: Ledger | None = None) -> None:
        self.identity = identity
        self.settings = settings
        self.standing = Standing.JOINING
        self.view = View()
        self.ledger = Ledger() if ledger is None else ledger
        self.ending: PCCLError | None = None
        """Why the peer is no member any more."""
        self.boot = 0
        self.master_id = ""
        self._admitted_in = 0
        self._round: Round = (0, 0)
        self._heard = now
        self._polled = now
        self._join_ends = now
        self._ever_welcomed = False
        self._dials = 0
        self._registered = now
        self._number = 0
        self._counts: dict[str, VoteCount] = {}
        self._votes: dict[VoteKind, _Call] = {}
        self._requests: dict[int, _Call] = {}
        self._broken_links: set[str] = set()
        self.network = Network(identity.peer_id)

    # ---------------------------------------------------------------------------------------------- connections

    def welcome(self, welcome: Welcome, now: float) -> list[Message]:
        """A master answered: what to tell it first. Raises `ProtocolError` for one that was replaced (R6)."""
        same = welcome.master_id == self.master_id
        if same and welcome.boot < self.boot:
            raise ProtocolError(f"this is the master of boot {welcome.boot}, and {self.boot} has replaced it")
        if not same:  # another master altogether, whose rounds count from the start
            self._round = (0, 0)
        self.boot, self.master_id = welcome.boot, welcome.master_id
        self.settings = self.settings.with_shared(welcome.shared)
        self._ever_welcomed = True
        self._dials += 1
        me, passive = self.identity, self._passive_timeout()
        if self.standing is Standing.JOINING:
            self.heard(now)
            timeout = max(0.0, self._join_ends - now)
            last_call = self.settings.last_call_s
            limits = (me.min_world_size, me.max_world_size, me.rank)
            who = (me.peer_id, me.group, me.host)
            dials, data = self._dials, me.address
            return [Join(*who, *limits, timeout, last_call, me.watched, passive, dials, data, me.expected)]
        return self._registration(now)

    def _registration(self, now: float) -> list[Message]:
        """All that a master needs to know of a member, and what the member still waits for."""
        self.ledger.check_lease(now)
        self.ledger.lease_missed = False
        self._registered = now
        me, passive = self.identity, self._passive_timeout()
        for call in self._votes.values():
            self._take_time_back(call, now)
        votes = tuple(
            msgspec.structs.replace(call.message.vote, timeout_s=max(0.0, call.deadline - SLACK_S - now))
            for call in self._votes.values()
            if isinstance(call.message, Vote)
        )
        register = Register(
            me.peer_id,
            me.group,
            me.host,
            self.view.epoch,
            self.view.members,
            self.ledger.frozen,
            votes,
            tuple(sorted(self._broken_links)),
            me.watched,
            passive,
            self._dials,
        )
        return [register, *(self._again(call, now) for call in self._requests.values())]

    def _take_time_back(self, call: _Call, now: float) -> None:
        """What one master asked for, the next may not need: it gets time enough to ask again."""
        if call.own_deadline:
            soon = self.settings.register_grace_s + 2 * self.settings.answer_timeout_s + SLACK_S
            call.deadline = min(call.deadline, max(call.own_deadline, now + soon))

    def disconnected(self) -> list[Effect]:
        """The connection is lost; it will be made anew."""
        return [self._tell(MembershipChange.MASTER_LOST)] if self.standing is Standing.MEMBER else []

    def heard(self, sent: float) -> None:
        """The master echoed a beat that was sent at this time: the lease runs from there (R7)."""
        self._heard = max(self._heard, sent)
        self.ledger.lease_ends = self._heard + self.settings.master_lease_s

    @property
    def last_heard(self) -> float:
        """When the master was known to be there for the last time."""
        return self._heard

    def _passive_timeout(self) -> float | None:
        return None if self.settings.proactive_recovery else self.settings.passive_timeout_s

    @staticmethod
    def _again(call: _Call, now: float) -> Message:
        if isinstance(call.message, StoreRequest):
            return msgspec.structs.replace(call.message, timeout_s=max(0.0, call.deadline - SLACK_S - now))
        return call.message

    # ---------------------------------------------------------------------------------------------------- calls

    def join(self, timeout_s: float, now: float) -> None:
        """The peer wants in, within this time."""
        self._join_ends = now + timeout_s

    def vote(
        self, kind: VoteKind, timeout_s: float, now: float, only: tuple[str, ...] | None = None
    ) -> tuple[Hashable, list[Effect]]:
        """The peer enters a call in which all members meet, and which may admit others: `only` these, if given."""
        self.require_member()
        if kind in self._votes:
            raise UsageError(f"{kind.value}() of group {self.identity.group!r} is running in another thread already")
        vote = OpenVote(kind, self.served(kind), timeout_s, only)
        self._votes[kind] = _Call(Vote(vote), now + timeout_s + SLACK_S)
        self._polled = now
        return kind, [Send(Vote(vote))]

    def request(
        self,
        op: StoreOp,
        now: float,
        *,
        keys: tuple[str, ...] = (),
        values: tuple[bytes, ...] = (),
        amount: int = 0,
        timeout_s: float = 0.0,
    ) -> tuple[Hashable, list[Effect]]:
        """The peer asks something of the group's store."""
        self.require_member()
        acknowledged = min(self._requests, default=self._number)
        message = StoreRequest(self._number, acknowledged, op, keys, values, amount, timeout_s)
        frames.check(message)
        self._number += 1
        waits = op in (StoreOp.GET, StoreOp.WAIT)
        return self._owed(message.number, message, timeout_s if waits else self.settings.master_timeout_s, now)

    def query(self, what: Question, now: float) -> tuple[Hashable, list[Effect]]:
        """The peer asks something about its group."""
        self.require_member()
        message = Query(self._number, what)
        self._number += 1
        return self._owed(message.number, message, self.settings.master_timeout_s, now)

    def abandon(self, call: Hashable) -> list[Effect]:
        """Nobody waits for this call any more."""
        if isinstance(call, VoteKind) and self._votes.pop(call, None) is not None:
            return [Send(Withdraw(call))]
        if isinstance(call, int):
            self._requests.pop(call, None)
        return []

    def link_broken(self, other: str) -> list[Effect]:
        """The link to a neighbour broke, though nobody said that it died."""
        self.require_member()
        self._broken_links.add(other)
        return [Send(LinkBroken(self.view.epoch, other))]

    def probed(self, probe: Probe, edges: tuple[Edge, ...], now: float) -> list[Effect]:
        """A probe that the master asked for has ended."""
        return [Send(self.network.probed(probe.survey, edges, now))]

    def leave(self) -> list[Effect]:
        """The peer says goodbye."""
        if self.standing in ENDED:
            return []
        error = NotConnectedError(f"the communicator of group {self.identity.group!r} was closed")
        return [Send(Leave()), *self._end(Standing.LEFT, error)]

    def refused(self, error: PCCLError) -> list[Effect]:
        """The master can't be talked to at all, now or later."""
        return [] if self.standing in ENDED else self._end(Standing.REFUSED, error)

    def give_up(self, error: PCCLError) -> None:
        """The peer's thread has ended: if nothing else did, this ended the membership."""
        self.refused(error)

    def master_gone(self, error: MasterStoppedError) -> list[Effect]:
        """There is no master any more, and there will be none."""
        return [] if self.standing in ENDED else self._end(Standing.STOPPED, error)

    def require_member(self) -> None:
        """Raises unless the peer is a member: with the reason why it is none any more, if it was one."""
        if self.standing is Standing.MEMBER:
            return
        if self.ending is not None:
            raise self.ending.again()
        raise NotConnectedError(
            f"the communicator is no member of group {self.identity.group!r} yet: call connect() first"
        )

    def served(self, kind: VoteKind) -> int:
        """How many votes of a kind the group has served, as far as this peer knows."""
        return self._counts.get(kind.value, VoteCount()).served

    def _owed(self, number: int, message: Message, timeout_s: float, now: float) -> tuple[Hashable, list[Effect]]:
        self._requests[number] = _Call(message, now + timeout_s + SLACK_S)
        return number, [Send(message)]

    # ------------------------------------------------------------------------------------- what the master says

    def received(self, message: FromMaster, now: float) -> list[Effect]:
        """Takes one message into account."""
        if self.standing in ENDED:
            return []
        match message:
            case Ask(round_):
                return self._asked(round_)
            case Decide():
                return self._decided(message, now)
            case Registered(votes):
                # Counted from when we spoke, as with beats: a Welcome alone proves no place in the group.
                self.heard(self._registered)
                known = [Send(measured) for measured in self.network.again(now)]
                return [self._tell(MembershipChange.MASTER_BACK), *self._settle_votes(votes), *known]
            case VoteServed(VoteKind.AWAIT_MINIMUM):
                return self._settle_vote(VoteKind.AWAIT_MINIMUM, value=True)
            case VoteServed(kind, count):
                return self._settle_votes({kind.value: count})
            case VoteFailed(kind, failure):
                return [Fail(kind, error_of(failure))] if self._votes.pop(kind, None) else []
            case Reply():
                return self._replied(message)
            case Probe():
                return self._told_to_probe(message)
            case Surveying():
                return self._surveying(message, now)
            case News(change, peer_id, reason):
                return [self._tell(MembershipChange(change), peer_id, reason)]
            case Refused(failure):
                return self._end(Standing.REFUSED, error_of(failure))
            case Evicted(reason):
                return self._evicted(reason)
            case Stopped(reason):
                text = f"the master of group {self.identity.group!r} ended for good: {reason}"
                return self._end(Standing.STOPPED, MasterStoppedError(text))
            case Welcome() | Beat():
                return []

    def _asked(self, round_: Round) -> list[Effect]:
        if round_ < self._round:
            return []
        self._round = round_
        self.ledger.freeze()
        fault_points.reach("frozen")
        return [Send(Answer(round_, self.view.epoch, self.ledger.report()))]

    def _told_to_probe(self, probe: Probe) -> list[Effect]:
        if VoteKind.OPTIMIZE_TOPOLOGY in self._votes:
            return [Measure(probe)]
        # It has left the call: what it does now is not to be disturbed, and the others need not wait for it.
        return [Send(Measured((Edge(self.identity.peer_id, probe.other, None),), probe.survey))]

    def _surveying(self, message: Surveying, now: float) -> list[Effect]:
        """All are in the call: from now on the master says how long the next step may take."""
        self.network.surveyed = True
        call = self._votes.get(VoteKind.OPTIMIZE_TOPOLOGY)
        if call is None:
            return []
        call.own_deadline = call.own_deadline or call.deadline
        call.deadline = max(call.deadline, now + message.within_s + SLACK_S)
        progress = TopologyProgress(message.stage, message.probed, message.to_probe)
        return [Inform(VoteKind.OPTIMIZE_TOPOLOGY, progress)]

    def _decided(self, decide: Decide, now: float) -> list[Effect]:
        if decide.epoch <= self.view.epoch:
            return []
        members = self._members_of(decide)
        before = [member.peer_id for member in self.view.members]
        ids = [member.peer_id for member in members]
        fault_points.reach("decided")
        self.ledger.settle(decide.outcomes, decide.epoch, restart_numbers=decide.admitted_in > self._admitted_in)
        self._admitted_in = decide.admitted_in
        self._broken_links.clear()
        self.network.keep(set(ids))
        self._polled = now
        self.view = View(
            decide.epoch, ids.index(self.identity.peer_id), members, decide.min_world_size, decide.attributes
        )
        effects: list[Effect] = []
        reasons = dict(decide.lost)
        here = set(ids)
        for peer_id in before:
            if peer_id not in here:
                reason = reasons.get(peer_id, _UNKNOWN_REASON)
                change = MembershipChange.LEFT if reason == LEFT else MembershipChange.LOST
                effects.append(self._tell(change, peer_id, reason))
        effects.append(self._tell(MembershipChange.EPOCH))
        if self.standing is Standing.JOINING:
            self.standing = Standing.MEMBER
            effects.append(Settle(JOIN))
        effects += self._settle_votes(decide.votes)
        if len(ids) >= decide.min_world_size:
            effects += self._settle_vote(VoteKind.AWAIT_MINIMUM, value=True)
        return effects

    def _members_of(self, decide: Decide) -> tuple[Member, ...]:
        if not decide.base:
            return decide.members
        if decide.base != self.view.epoch:
            raise ProtocolError(f"a change to epoch {decide.base}, but this peer is in epoch {self.view.epoch}")
        gone = set(decide.removed)
        return (*(member for member in self.view.members if member.peer_id not in gone), *decide.members)

    def _settle_votes(self, counts: dict[str, VoteCount]) -> list[Effect]:
        effects: list[Effect] = []
        for name, count in counts.items():
            if count.served > self._counts.get(name, VoteCount()).served:
                self._counts[name] = count
                effects += self._settle_vote(VoteKind(name), value=count.value)
        return effects

    def _settle_vote(self, kind: VoteKind, *, value: bool) -> list[Effect]:
        return [Settle(kind, value)] if self._votes.pop(kind, None) is not None else []

    def _replied(self, reply: Reply) -> list[Effect]:
        if self._requests.pop(reply.number, None) is None:
            return []
        if reply.failure is not None:
            return [Fail(reply.number, error_of(reply.failure))]
        return [Settle(reply.number, reply)]

    def _evicted(self, reason: str) -> list[Effect]:
        text = (
            f"peer {self.identity.peer_id} was evicted from group {self.identity.group!r} in epoch {self.view.epoch}: "
            f"{reason}. connect() joins again, as a new peer"
        )
        event = self._tell(MembershipChange.EVICTED, self.identity.peer_id, reason)
        ended = self._end(Standing.EVICTED, PeerEvictedError(text, reason=reason))
        return [Send(Farewell()), event, *ended]

    def _end(self, standing: Standing, error: PCCLError) -> list[Effect]:
        """Nothing more happens in any epoch; every call gets the error."""
        joining = self.standing is Standing.JOINING
        self.standing, self.ending = standing, error
        self.ledger.freeze()
        return [*([Fail(JOIN, error)] if joining else []), *self._fail_calls(error)]

    def _fail_calls(self, error: PCCLError) -> list[Effect]:
        calls: list[Hashable] = [*self._votes, *self._requests]
        self._votes.clear()
        self._requests.clear()
        return [Fail(call, error) for call in calls]

    # ----------------------------------------------------------------------------------------------------- time

    def tick(self, now: float) -> list[Effect]:
        """Ends what has waited too long: the lease, calls, the join."""
        effects: list[Effect] = []
        silence = now - self._heard
        if self.standing is Standing.MEMBER:
            self.ledger.check_lease(now)
            if self.ledger.lease_missed and now < self.ledger.lease_ends:
                # Heard again on the same connection: the master has to know that we froze.
                effects += [Send(message) for message in self._registration(now)]
        if self.standing is Standing.JOINING and now >= self._join_ends + (SLACK_S if self._ever_welcomed else 0.0):
            return self._end(Standing.REFUSED, self._join_timeout())
        if self.standing is Standing.MEMBER and silence >= self.settings.master_timeout_s:
            effects += self._fail_calls(self._unreachable(silence))
        for kind in [kind for kind, call in self._votes.items() if now >= call.deadline]:
            del self._votes[kind]
            text = f"the master of group {self.identity.group!r} did not settle {kind.value}() in time"
            effects += [Send(Withdraw(kind)), Fail(kind, OperationTimeoutError(text, calls={}))]
        for number in [number for number, call in self._requests.items() if now >= call.deadline]:
            del self._requests[number]
            effects.append(Fail(number, self._unreachable(silence)))
        passive = not self.settings.proactive_recovery and self.standing is Standing.MEMBER
        if passive and now - self._polled >= self.settings.passive_timeout_s:
            self._polled = now
            effects.append(Send(Poll()))
        return effects

    def _unreachable(self, silence: float) -> PCCLError:
        return MasterUnreachableError(
            f"the master of group {self.identity.group!r} was not heard for {silence:.1f} s "
            f"(master_timeout_s={self.settings.master_timeout_s:g}); it may come back, and the peer goes on trying"
        )

    def _join_timeout(self) -> PCCLError:
        group = self.identity.group
        if not self._ever_welcomed:
            return MasterUnreachableError(
                f"no master answered within the time to join group {group!r}: check the endpoint, and that it runs"
            )
        return RendezvousTimeoutError(f"the master did not let this peer into group {group!r} in time, nor refuse it")

    def _tell(self, change: MembershipChange, peer_id: str | None = None, reason: str = "") -> Tell:
        members = tuple(member.peer_id for member in self.view.members)
        return Tell(MembershipEvent(change, self.identity.group, self.view.epoch, peer_id, reason, members))
