"""One group: its epochs, the rounds that lead from one to the next, and the votes of its members.

Every method takes the time as an argument and emits actions; nothing here waits. `docs/design/membership.md` says why
each step is as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import msgspec

from master_actor.core.actions import Action, Append, Note, Send, Solved
from master_actor.core.agreement import agree
from master_actor.core.optimizing import QUIET_S, Optimizer, Ring
from master_actor.core.phases import Phase, PhaseLog
from master_actor.core.records import (
    Durable,
    EpochBegan,
    GroupClosed,
    GroupEmptied,
    Record,
    VoteCounted,
)
from master_actor.core.rendezvous import WaitingRoom, by_requested_rank
from master_actor.core.ring import BrokenLinks, Edge, same_ring, turned
from master_actor.core.store import Store
from master_actor.core.topology import describe
from master_actor.core.votes import Ballot
from ray_pccl.control.messages import (
    LEFT,
    Answer,
    Ask,
    Decide,
    Evicted,
    Failure,
    Join,
    LinkBroken,
    Measured,
    Message,
    News,
    Observed,
    OpenVote,
    OperationState,
    Outcome,
    Query,
    Question,
    Refused,
    Register,
    Registered,
    Reply,
    Round,
    StoreRequest,
    Verdict,
    VoteCount,
    VoteFailed,
    VoteKind,
    VoteServed,
)
from ray_pccl.reports import HappeningKind
from ray_pccl.settings import Settings
from ray_pccl.types import Member, MembershipChange

EPITAPHS = 1000
NAMED_NEWCOMERS = 16
"""So many newcomers of an epoch are noted one by one; of the others, their number."""
_FORMING = (Phase.EMPTY, Phase.FORMING, Phase.LAST_CALL)
_ADMITTING = (VoteKind.UPDATE_TOPOLOGY, VoteKind.AWAIT_MINIMUM)
_IN_FLIGHT = (OperationState.RUNNING, OperationState.PREPARED)


@dataclass(slots=True)
class Inquiry:
    """A round under way: who is still to answer, by when, and what the others said."""

    question: Ask
    admit: bool
    deadlines: dict[str, float]
    order: tuple[str, ...] | None = None
    """The order that the next epoch shall have, if nobody is lost."""
    ring: Ring | None = None
    """The same, where `optimize_topology()` found it."""
    answers: dict[str, Answer] = field(default_factory=dict)


class Group:
    """The state machine of one group."""

    def __init__(
        self,
        name: str,
        durable: Durable,
        settings: Settings,
        *,
        emit: Callable[[Action], None],
        next_round: Callable[[], Round],
        census: Callable[[], dict[str, int]],
        now: float,
    ) -> None:
        self.name = name
        self.durable = durable.group(name)
        self._ids = {member.peer_id for member in self.durable.members}
        self._all_durable = durable
        self._settings = settings
        self._emit = emit
        self._next_round = next_round
        self._census = census
        self.log = PhaseLog(name, Phase.RETURNING if self.durable.members else Phase.EMPTY)
        self.room = WaitingRoom(name)
        self.store = Store(self.durable, self._append, self._send)
        self.inquiry: Inquiry | None = None
        self.lost: dict[str, str] = {}
        """Members of this epoch that are gone, and why."""
        self.leases: dict[str, float] = {}
        """Those of `lost` that may still run unseen, and when that ends."""
        self.ballot = Ballot(self.durable)
        self.returned: dict[str, bool] = {}
        """While `RETURNING`: who is back, and whether it agrees with the journal."""
        self.return_ends = now + settings.register_grace_s
        self._passive: dict[str, float] = {}
        self._held: dict[str, Ask] = {}
        self._links = BrokenLinks()
        self._unbearable: Edge | None = None
        self.optimizer = Optimizer(
            name,
            settings,
            emit=emit,
            next_round=next_round,
            members=self.living_members,
            avoid=self._links.to_avoid,
            quiet_at=now + 2 * settings.probe_ms / 1000 + QUIET_S if self.durable.members else 0.0,
        )
        self._joined = {member.peer_id: place for place, member in enumerate(self.durable.members)}
        """In which order members came; after a master's restart, their ranks stand in."""
        self._epitaphs: dict[str, str] = {}
        """Why the last ones were lost, for when they come back and ask."""

    # ------------------------------------------------------------------------------------------------- questions

    @property
    def phase(self) -> Phase:
        """Where the group is in its life."""
        return self.log.phase

    @property
    def living(self) -> list[str]:
        """The members of the epoch that are not known to be gone, in rank order."""
        return [member.peer_id for member in self.durable.members if member.peer_id not in self.lost]

    def living_members(self) -> list[Member]:
        """The same, with where they are."""
        return [member for member in self.durable.members if member.peer_id not in self.lost]

    def has(self, peer_id: str) -> bool:
        """Whether the peer is a member or waits to be one."""
        return peer_id in self.room or self.is_member(peer_id)

    def is_member(self, peer_id: str) -> bool:
        """Whether the peer is a member that is not known to be gone."""
        return peer_id in self._ids and peer_id not in self.lost

    @property
    def forgettable(self) -> bool:
        """Whether nothing would be lost with this group: nobody is here, and it never had an epoch."""
        return self.phase is Phase.EMPTY and not self.durable.epoch and not self.durable.closed

    # ----------------------------------------------------------------------------------------- coming and going

    def join(self, join: Join, now: float) -> None:
        """A new peer wants in."""
        if self.is_member(join.peer_id):
            self._remember_passive(join.peer_id, join.passive_timeout_s)
            # It was admitted, but the master died before it was told: it is simply behind.
            self._returns(join.peer_id, agrees=False, now=now)
            return
        limits = None if self.phase in _FORMING else (self.durable.min_world_size, self.durable.max_world_size)
        refusal = self._closed() or self.room.refusal(join, limits, forming=self.phase in _FORMING)
        if refusal is not None:
            self._send(join.peer_id, Refused(refusal))
            return
        self._remember_passive(join.peer_id, join.passive_timeout_s)
        again = join.peer_id in self.room
        self.room.admit(join, now)
        if not again:
            self._news(MembershipChange.WAITING, join.peer_id)
        if self.phase in _FORMING:
            self._gather(now, newcomer=not again)
            return
        if not again:
            self._note(HappeningKind.WAITING, join.peer_id)
        self._count_votes(now)

    def register(self, register: Register, now: float) -> None:
        """A member comes back after its connection, or the master, was lost."""
        peer_id = register.peer_id
        if not self.is_member(peer_id):
            self._send(peer_id, Evicted(self._epitaphs.get(peer_id, f"group {self.name!r} went on without it")))
            return
        self._remember_passive(peer_id, register.passive_timeout_s)
        for member in register.members if register.epoch < self.durable.epoch else ():
            # The master that wrote the epoch without it died before it told anyone: operations have to know.
            if member.peer_id not in self._ids:
                self.lost.setdefault(member.peer_id, "it was lost while the master restarted")
        agrees = (
            register.epoch == self.durable.epoch and register.members == self.durable.members and not register.frozen
        )
        self.ballot.withdraw(peer_id)  # what it does not say again, it has given up
        for vote in register.votes:
            # A vote that was served meanwhile is settled by `Registered`, or by the `Decide` of the round to come.
            if not self.ballot.was_served(vote):
                self.ballot.cast(peer_id, vote, now)
        self._check_still_optimizing(peer_id)
        self.optimizer.tell_again(peer_id)
        self._returns(peer_id, agrees=agrees, now=now)
        for other in register.broken_links:
            self.link_broken(peer_id, LinkBroken(register.epoch, other), now)
        self._count_votes(now)

    def leave(self, peer_id: str, now: float) -> None:
        """A peer says goodbye."""
        if self.has(peer_id):
            self._gone(peer_id, LEFT, certain=True, now=now)

    def lose(self, peer_id: str, reason: str, *, certain: bool, now: float, tell: bool = True) -> None:
        """A peer is taken for dead. `certain`: its process can't be running any more. `tell`: it may be listening."""
        if self.has(peer_id):
            if tell:
                self._send(peer_id, Evicted(reason))
            self._gone(peer_id, reason, certain=certain, now=now)
        elif certain:
            self.lease_over(peer_id, now)

    def lease_over(self, peer_id: str, now: float) -> None:
        """A lost member can't be running any more."""
        self.leases.pop(peer_id, None)
        if self.phase is Phase.LEASED and not self.leases:
            self._empty(now)

    def froze(self, peer_id: str, now: float) -> None:
        """An evicted member confirms that it does nothing more: that alone ends its epoch (R7)."""
        if peer_id in self.lost:
            self.leases.clear()
            self.lease_over(peer_id, now)

    def close(self, now: float) -> None:
        """Nobody joins any more."""
        if not self.durable.closed:
            self._append(GroupClosed(self.name))
            self._news(MembershipChange.CLOSED, None)
            self._note(HappeningKind.CLOSED)
            failure = self._closed()
            assert failure is not None
            self._refuse_all(lambda _: failure)
            if self.phase in (Phase.FORMING, Phase.LAST_CALL):
                self._gather(now)

    def _gone(self, peer_id: str, reason: str, *, certain: bool, now: float) -> None:
        if peer_id in self.room:
            self._stops_waiting(peer_id, reason, now)
            return
        self._mark_lost(peer_id, reason, certain=certain, now=now)
        if not self.living:
            self._dissolve(now)
        elif self.phase is Phase.RETURNING:
            self._check_returned(now)
        else:
            self._ask(now)

    def _stops_waiting(self, peer_id: str, reason: str, now: float) -> None:
        self.room.remove(peer_id)
        self._passive.pop(peer_id, None)
        self._news(MembershipChange.WITHDRAWN, peer_id, reason)
        self._note(HappeningKind.WITHDRAWN, peer_id, reason)
        if self.phase in _FORMING:
            self._gather(now)

    def _mark_lost(self, peer_id: str, reason: str, *, certain: bool, now: float) -> None:
        self.lost[peer_id] = self._epitaphs[peer_id] = reason
        self._note(HappeningKind.LEFT if reason == LEFT else HappeningKind.LOST, peer_id, reason, certain=certain)
        while len(self._epitaphs) > EPITAPHS:
            del self._epitaphs[next(iter(self._epitaphs))]
        if not certain:
            self.leases[peer_id] = now + self._settings.master_lease_s
        self.ballot.withdraw(peer_id)
        self._held.pop(peer_id, None)
        self._passive.pop(peer_id, None)
        self._joined.pop(peer_id, None)
        self._links.forget(peer_id)
        self.returned.pop(peer_id, None)
        for member in self.durable.members:
            if member.peer_id == peer_id:
                self.optimizer.lost(member, now)

    def _dissolve(self, now: float) -> None:
        if self.inquiry is not None and self.inquiry.answers:
            self.leases.clear()  # whoever answered had frozen, and that ended the epoch (R7)
        self.inquiry = None
        self.returned.clear()
        self.optimizer.reset()
        if self.leases:
            self.log.enter(Phase.LEASED, now)
        else:
            self._empty(now)

    def _empty(self, now: float) -> None:
        self._append(GroupEmptied(self.name))
        self.store.clear()
        self.lost.clear()
        self._links.clear()
        self.optimizer.forget()
        self._note(HappeningKind.EMPTIED)
        self.log.enter(Phase.EMPTY, now)
        self._gather(now, newcomer=True)

    # ----------------------------------------------------------------------------------------------- rendezvous

    def _gather(self, now: float, *, newcomer: bool = False) -> None:
        """Brings a group that has not formed into the phase that its waiting room calls for."""
        count = len(self.room)
        if not count:
            if self.phase is Phase.LAST_CALL:
                self.log.enter(Phase.FORMING, now)
            if self.phase is Phase.FORMING:
                self.log.enter(Phase.EMPTY, now)
            return
        first = self.room.first.join
        if self.phase is Phase.EMPTY:
            self.log.enter(Phase.FORMING, now)
        if count < first.min_world_size:
            if self.phase is Phase.LAST_CALL:
                self.log.enter(Phase.FORMING, now)
            return
        if self.phase is Phase.FORMING:
            self.log.enter(Phase.LAST_CALL, now)
            newcomer = True
        if newcomer:
            self.room.last_call_ends = now + first.last_call_s
        if self.room.is_complete():
            self._form(now)

    def expect(self, number: int, now: float) -> None:
        """So many are to be waited for while the group forms."""
        if self.phase in _FORMING:
            self.room.expected = number
            self._gather(now)

    def _form(self, now: float) -> None:
        self.room.expected = None
        first = self.room.first.join
        taken = self.room.take(first.max_world_size)
        self._joined = {join.peer_id: place for place, join in enumerate(taken)}
        joins = by_requested_rank(taken)
        self.log.enter(Phase.STEADY, now)
        members = tuple(Member(join.peer_id, join.host, join.address) for join in joins)
        self._begin(members, admits=True, limits=(first.min_world_size, first.max_world_size))
        self._count_votes(now)

    def _refuse_all(self, failure: Callable[[Join], Failure]) -> None:
        for join in [waiter.join for waiter in self.room.waiters.values()]:
            self._send(join.peer_id, Refused(failure(join)))
            self._note(HappeningKind.WITHDRAWN, join.peer_id, failure(join).text)
            self._passive.pop(join.peer_id, None)
        self.room.waiters.clear()

    def _closed(self) -> Failure | None:
        if not self.durable.closed:
            return None
        return Failure("RendezvousClosedError", f"group {self.name!r} was closed: nobody joins it any more")

    # --------------------------------------------------------------------------------------------------- rounds

    def answer(self, peer_id: str, answer: Answer, now: float) -> None:
        """A peer has frozen, and tells what it holds."""
        if (
            self.inquiry is not None
            and answer.round == self.inquiry.question.round
            and peer_id in self.inquiry.deadlines
        ):
            del self.inquiry.deadlines[peer_id]
            self.inquiry.answers[peer_id] = answer
            self._decide_if_complete(now)

    def poll(self, peer_id: str, now: float) -> None:
        """A passive peer wants to know what it missed."""
        if (held := self._held.pop(peer_id, None)) is not None and self.inquiry is not None:
            self.inquiry.deadlines[peer_id] = now + self._settings.answer_timeout_s
            self._send(peer_id, held)

    def link_broken(self, peer_id: str, report: LinkBroken, now: float) -> None:
        """Two members that both live can't reach each other (R4). A storm of reports makes one round."""
        living = self.living
        if report.epoch != self.durable.epoch or peer_id == report.other:
            return
        if not self.is_member(peer_id) or not self.is_member(report.other):
            return
        if self.phase is Phase.RETURNING:
            self.returned[peer_id] = False  # no epoch goes on with a broken link: a round will follow
        if self.phase is not Phase.STEADY:
            return
        edge = frozenset((peer_id, report.other))
        self._links.note(edge)
        if self._links.unbearable(edge, living):
            self._unbearable = edge
        self._ask(now)

    def _evict_for_broken_link(self, now: float) -> bool:
        """One end of an unbearable link has to go, if both have answered: a death breaks links, too."""
        edge, self._unbearable = self._unbearable, None
        if edge is None or not all(self.is_member(end) for end in edge):
            return False
        victim = max(edge, key=lambda end: (self._links.count_of(end), self._joined[end]))
        self.lose(victim, f"its link to peer {(*(edge - {victim}),)[0]} keeps breaking", certain=False, now=now)
        return True

    def _ask(
        self, now: float, *, admit: bool = False, order: tuple[str, ...] | None = None, ring: Ring | None = None
    ) -> None:
        """Starts a round with all who live, or lets the one under way go on with fewer."""
        if self.inquiry is not None:
            # Recovery epochs only shrink (R10): whoever voted for an admission, or an order, is asked again after it.
            self.inquiry.admit, self.inquiry.order, self.inquiry.ring = False, None, None
            self.inquiry.deadlines = {p: d for p, d in self.inquiry.deadlines.items() if p not in self.lost}
            self._decide_if_complete(now)
            return
        self.log.enter(Phase.ASKING, now)
        self.inquiry = Inquiry(Ask(self._next_round()), admit, {}, order, ring)
        for peer_id in self.living:
            self._put_question(peer_id, now)

    def _put_question(self, peer_id: str, now: float) -> None:
        assert self.inquiry is not None
        question = self.inquiry.question
        patience = self._settings.answer_timeout_s
        if peer_id in self._passive:
            self._held[peer_id] = question
            patience += self._passive[peer_id]
        else:
            self._send(peer_id, question)
        self.inquiry.deadlines[peer_id] = now + patience

    def _decide_if_complete(self, now: float) -> None:
        inquiry = self.inquiry
        if inquiry is None or inquiry.deadlines or self._evict_for_broken_link(now):
            return
        self.inquiry = None
        survivors = {peer_id: inquiry.answers[peer_id].operations for peer_id in self.living}
        outcomes = agree(survivors, self.lost.items(), self.durable.min_world_size)
        # A vote counts only with nothing in flight (R10): one that gave up voting may have gone on to an operation.
        admits = inquiry.admit and not any(outcome.verdict is Verdict.ABORT for outcome in outcomes)
        if inquiry.admit and not admits:
            self._refuse_busy_voters(inquiry)
        joins = self._admissible(take=True) if admits else []
        for join in joins:
            self._joined[join.peer_id] = max(self._joined.values()) + 1
        by_id = {member.peer_id: member for member in self.durable.members}
        order = list(inquiry.order) if inquiry.order is not None else self.living
        members = tuple(by_id[peer_id] for peer_id in self._links.reordered(order))
        members += tuple(Member(join.peer_id, join.host, join.address) for join in joins)
        self.log.enter(Phase.STEADY, now)
        limits = (self.durable.min_world_size, self.durable.max_world_size)
        answered = {peer_id: answer.epoch for peer_id, answer in inquiry.answers.items()}
        optimizes = inquiry.ring is not None
        self._begin(members, admits=admits, limits=limits, outcomes=outcomes, answered=answered, optimizes=optimizes)
        if inquiry.ring is not None:
            self.optimizer.applied(inquiry.ring, now)
        elif inquiry.order is not None:
            self.optimizer.better = None
        self._count_votes(now)

    def _refuse_busy_voters(self, inquiry: Inquiry) -> None:
        """Those whose operations keep others from being admitted have no vote until they are done."""
        for peer_id, answer in inquiry.answers.items():
            busy = [f"{op.tag}/{op.number}" for op in answer.operations if op.state in _IN_FLIGHT]
            for kind in _ADMITTING:
                if busy and self.ballot.open[kind].pop(peer_id, None) is not None:
                    text = f"{kind.value}() was called with operations in flight (tag/number): {', '.join(busy)}"
                    self._send(peer_id, VoteFailed(kind, Failure("UsageError", text)))

    def _begin(
        self,
        members: tuple[Member, ...],
        *,
        admits: bool,
        limits: tuple[int, int | None],
        outcomes: tuple[Outcome, ...] = (),
        answered: Mapping[str, int] = MappingProxyType({}),
        optimizes: bool = False,
    ) -> None:
        """Writes the next epoch down, then tells its members. `answered`: in which epoch who answered is.

        `admits` and `optimizes` tell which call of all members it serves.
        """
        epoch = self.durable.epoch + 1
        votes = dict(self.durable.votes)
        kinds = [VoteKind.UPDATE_TOPOLOGY] if admits else []
        for kind in [*kinds, *([VoteKind.OPTIMIZE_TOPOLOGY] if optimizes else [])]:
            votes[kind.value] = VoteCount(self.ballot.counted(kind).served + 1, value=True)
            self.ballot.open[kind].clear()
        if len(members) >= limits[0]:
            self.ballot.open[VoteKind.AWAIT_MINIMUM].clear()
        base, before = self.durable.epoch, self.durable.members
        old, new = set(before), set(members)
        newcomers = tuple(member for member in members if member not in old)
        admitted_in = epoch if newcomers else self.durable.admitted_in
        if newcomers:
            self.optimizer.reset()  # nothing is known of their edges
        self._append(EpochBegan(self.name, epoch, members, admitted_in, votes, *limits))
        for peer_id in self.lost:
            self.store.drop(peer_id)
        lost = tuple(self.lost.items())
        self.lost.clear()
        self.leases.clear()
        whole = Decide(epoch, members, admitted_in, outcomes, votes, lost, limits[0], self._census())
        stayed = tuple(member for member in before if member in new)
        removed = tuple(member.peer_id for member in before if member not in new)
        change = msgspec.structs.replace(whole, members=newcomers, base=base, removed=removed)
        in_order = members == stayed + newcomers
        for member in members:
            follows = in_order and answered.get(member.peer_id) == base
            self._send(member.peer_id, change if follows else whole)
        self._note_epoch(newcomers, lost, reordered=not in_order, first=not before)

    def _note_epoch(
        self, newcomers: tuple[Member, ...], lost: tuple[tuple[str, str], ...], *, reordered: bool, first: bool
    ) -> None:
        """What the timeline says of an epoch that has just begun."""
        for member in newcomers[:NAMED_NEWCOMERS]:
            self._note(HappeningKind.JOINED, member.peer_id)
        if len(newcomers) > NAMED_NEWCOMERS:
            self._note(HappeningKind.JOINED, reason=f"{len(newcomers) - NAMED_NEWCOMERS} more")
        deaths = sum(reason != LEFT for _, reason in lost)
        if deaths:
            self._note(HappeningKind.RECOVERED, reason=f"{deaths} lost")
        elif lost:
            self._note(HappeningKind.EPOCH, reason=f"{len(lost)} left")
        elif first:
            self._note(HappeningKind.EPOCH, reason="the group formed")
        elif newcomers:
            self._note(HappeningKind.EPOCH, reason=f"{len(newcomers)} admitted")
        else:
            self._note(HappeningKind.EPOCH, reason="the ring in another order" if reordered else "linked anew")

    # ------------------------------------------------------------------------------ after the master's restart

    def _returns(self, peer_id: str, *, agrees: bool, now: float) -> None:
        self._send(peer_id, Registered(dict(self.durable.votes) if agrees else {}))
        if self.phase is Phase.RETURNING:
            self.returned[peer_id] = agrees
            self._check_returned(now)
        elif self.phase is Phase.ASKING:
            assert self.inquiry is not None
            if peer_id in self.inquiry.deadlines:
                self._put_question(peer_id, now)
        elif not agrees:
            self._ask(now)

    def _check_returned(self, now: float) -> None:
        missing = [peer_id for peer_id in self.living if peer_id not in self.returned]
        if missing and now < self.return_ends:
            return
        reason = f"it did not come back within {self._settings.register_grace_s:g} s of the master's restart"
        for peer_id in missing:
            self._send(peer_id, Evicted(reason))
            self._mark_lost(peer_id, reason, certain=False, now=now)
        if not self.living:
            self._dissolve(now)
            return
        agreed = not self.lost and all(self.returned.values())
        self.returned.clear()
        if agreed:
            self._note(HappeningKind.RETURNED)
            self.log.enter(Phase.STEADY, now)
            self._count_votes(now)
        else:
            self._ask(now)

    # ---------------------------------------------------------------------------------------------------- votes

    def vote(self, peer_id: str, vote: OpenVote, now: float) -> None:
        """A member is in a call in which all members meet."""
        if not self.is_member(peer_id):
            text = f"peer {peer_id} is no member of group {self.name!r}, so it has no vote"
            self._send(peer_id, VoteFailed(vote.kind, Failure("NotAMemberError", text)))
            return
        if self.ballot.was_served(vote):
            self._send(peer_id, VoteServed(vote.kind, self.ballot.counted(vote.kind)))
            return
        self.ballot.cast(peer_id, vote, now)
        self._count_votes(now)

    def withdraw(self, peer_id: str, kind: VoteKind) -> None:
        """A member gave up waiting."""
        self.ballot.withdraw(peer_id, kind)
        self._check_still_optimizing(peer_id)

    def _count_votes(self, now: float) -> None:
        if self.phase is not Phase.STEADY:
            return
        minimum = self.durable.min_world_size
        awaiting = self.ballot.open[VoteKind.AWAIT_MINIMUM]
        if awaiting and len(self.living) >= minimum:
            for peer_id in awaiting:
                self._send(peer_id, VoteServed(VoteKind.AWAIT_MINIMUM, VoteCount()))
            awaiting.clear()
        if self.ballot.all_in(self.living, VoteKind.PEERS_PENDING):
            self._serve(VoteKind.PEERS_PENDING, value=len(self.room) > 0)
        if self.ballot.all_in(self.living, *_ADMITTING):
            newcomers = len(self._admissible())
            better = self.optimizer.better_for(self.living)
            if (newcomers or better) and (not awaiting or (newcomers and len(self.living) + newcomers >= minimum)):
                self._ask(now, admit=True, order=better)
            elif not newcomers and not awaiting:
                self._serve(VoteKind.UPDATE_TOPOLOGY, value=False)
        if self.phase is Phase.STEADY and self.ballot.all_in(self.living, VoteKind.OPTIMIZE_TOPOLOGY):
            self._optimize(now)

    # ------------------------------------------------------------------------------------------------- topology

    def _optimize(self, now: float) -> None:
        """All members want the best order: brings them one step nearer to it."""
        outcome = self.optimizer.advance(now)
        kind = VoteKind.OPTIMIZE_TOPOLOGY
        if isinstance(outcome, Failure):
            self.optimizer.reset()
            for peer_id in self.ballot.open[kind]:
                self._send(peer_id, VoteFailed(kind, outcome))
            self.ballot.open[kind].clear()
        elif outcome is not None and same_ring(outcome.order, self.living):
            self.optimizer.applied(outcome, now)
            self._serve(kind, value=False)
        elif outcome is not None:
            self.optimizer.linking(self._settings.answer_timeout_s + max(self._passive.values(), default=0.0))
            self._ask(now, order=turned(outcome.order, self.living[0]), ring=outcome)

    def _check_still_optimizing(self, peer_id: str) -> None:
        if peer_id not in self.ballot.open[VoteKind.OPTIMIZE_TOPOLOGY]:
            self.optimizer.reset()

    def measured(self, peer_id: str, message: Measured | Observed, now: float) -> None:
        """A member tells what it knows of the network."""
        if not self.is_member(peer_id):
            return
        if isinstance(message, Observed):
            self.optimizer.observed(peer_id, message, now)
        elif self.optimizer.measured(peer_id, message, now):
            self._count_votes(now)

    def solved(self, answer: Solved, now: float) -> None:
        """The best order was found, or that there is none."""
        if self.optimizer.solved(answer):
            self._count_votes(now)

    def _serve(self, kind: VoteKind, *, value: bool) -> None:
        count = VoteCount(self.ballot.counted(kind).served + 1, value)
        self._append(VoteCounted(self.name, kind, count))
        for peer_id in self.ballot.open[kind]:
            self._send(peer_id, VoteServed(kind, count))
        self.ballot.open[kind].clear()

    def _admissible(self, *, take: bool = False) -> list[Join]:
        maximum = self.durable.max_world_size
        room = None if maximum is None else max(0, maximum - len(self.living))
        named = [self.ballot.only.get(voter) for voter in self.ballot.open[VoteKind.UPDATE_TOPOLOGY]]
        wanted = [
            join.peer_id
            for join in (waiter.join for waiter in self.room.waiters.values())
            if all(only is None or join.peer_id in only for only in named)
        ][:room]
        joins = [self.room.waiters[peer_id].join for peer_id in wanted]
        for peer_id in wanted if take else ():
            self.room.remove(peer_id)
        return joins

    def _fail_overdue_votes(self, now: float) -> None:
        for kind in self.ballot.overdue(now):
            if kind is VoteKind.OPTIMIZE_TOPOLOGY and self.optimizer.is_busy:
                continue  # all are here, and each step has a deadline of its own
            minimum = kind is VoteKind.AWAIT_MINIMUM
            failure = self.ballot.too_few(self.living) if minimum else self.ballot.stuck(kind, self.living)
            for peer_id in self.ballot.open[kind]:
                self._send(peer_id, VoteFailed(kind, failure))
            self.ballot.open[kind].clear()

    # ---------------------------------------------------------------------------------------- store and queries

    def store_request(self, peer_id: str, request: StoreRequest, now: float) -> None:
        """A member uses the group's key-value store."""
        if self.is_member(peer_id):
            self.store.request(peer_id, request, now)
        else:
            self._not_a_member(peer_id, request.number, "use its store")

    def query(self, peer_id: str, query: Query, now: float) -> None:
        """A member asks about the group, or closes it."""
        if not self.is_member(peer_id):
            self._not_a_member(peer_id, query.number, "ask about it")
            return
        if query.what is Question.TOPOLOGY:
            values = describe(self.living_members(), self.optimizer.bandwidth, now)
            self._send(peer_id, Reply(query.number, values))
            return
        if query.what is Question.SET_CLOSED:
            self.close(now)
        reply = Reply(query.number, flag=self.durable.closed, amount=len(self.room))
        self._send(peer_id, reply)

    def _not_a_member(self, peer_id: str, number: int, what: str) -> None:
        text = f"peer {peer_id} is no member of group {self.name!r}: only members may {what}"
        self._send(peer_id, Reply(number, failure=Failure("NotAMemberError", text)))

    # ----------------------------------------------------------------------------------------------------- time

    def tick(self, now: float) -> None:
        """Ends every wait whose time is up."""
        self.store.tick(now)
        if self.phase in (Phase.FORMING, Phase.LAST_CALL):
            self._tick_forming(now)
        for join in self.room.expired(now):
            self._send(join.peer_id, Refused(self.room.timeout(join, len(self.living))))
            self._stops_waiting(join.peer_id, "its time to join ran out", now)
        if self.optimizer.tick(now):
            self._count_votes(now)
        if self.phase is Phase.STEADY:
            self._fail_overdue_votes(now)
        elif self.phase is Phase.RETURNING:
            self._check_returned(now)
        elif self.phase is Phase.LEASED:
            for peer_id in [peer for peer, ends in self.leases.items() if now >= ends]:
                self.lease_over(peer_id, now)
        if self.inquiry is not None:
            for peer_id in [peer for peer, ends in self.inquiry.deadlines.items() if now >= ends]:
                reason = f"it did not answer the master within {self._settings.answer_timeout_s:g} s"
                self.lose(peer_id, reason, certain=False, now=now)

    def _tick_forming(self, now: float) -> None:
        first = self.room.first
        if self.phase is Phase.LAST_CALL:
            if now >= min(self.room.last_call_ends, *(w.deadline for w in self.room.waiters.values())):
                self._form(now)
        elif now >= first.deadline:
            self._refuse_all(lambda join: self.room.timeout(join, 0))
            self._gather(now)

    # ------------------------------------------------------------------------------------------------- emitting

    def _append(self, record: Record) -> None:
        self._all_durable.apply(record)
        if isinstance(record, EpochBegan | GroupEmptied):
            self._ids = {member.peer_id for member in self.durable.members}
        self._emit(Append(record))

    def _send(self, peer_id: str, message: Message) -> None:
        self._emit(Send(peer_id, message))

    def _note(self, kind: HappeningKind, peer_id: str | None = None, reason: str = "", *, certain: bool = True) -> None:
        living = len(self._ids - self.lost.keys())
        self._emit(Note(kind, self.name, self.durable.epoch, peer_id, reason, living, certain))

    def _news(self, change: MembershipChange, peer_id: str | None, reason: str = "") -> None:
        for member in self.living:
            if member not in self._passive:
                self._send(member, News(change.value, peer_id, reason))

    def _remember_passive(self, peer_id: str, passive_timeout_s: float | None) -> None:
        if passive_timeout_s is None:
            self._passive.pop(peer_id, None)
        else:
            self._passive[peer_id] = passive_timeout_s
