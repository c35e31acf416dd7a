"""Who is in which call for all, and until when; how many such calls were served.

The counts are durable (`VoteCounted`, `EpochBegan`); who is in a call is said again after a restart.
"""

from __future__ import annotations

from collections.abc import Sequence

from master_actor.core.records import DurableGroup
from ray_pccl.control.messages import Failure, OpenVote, VoteCount, VoteKind


class Ballot:
    """The open votes of one group."""

    def __init__(self, durable: DurableGroup) -> None:
        self._durable = durable
        self.open: dict[VoteKind, dict[str, float]] = {kind: {} for kind in VoteKind}
        """Who is in which call, and until when."""
        self.only: dict[str, tuple[str, ...] | None] = {}
        """Whom each voter means to admit; all who wait, if None."""

    def counted(self, kind: VoteKind) -> VoteCount:
        """How many votes of a kind the group has served, and the last answer."""
        return self._durable.votes.get(kind.value, VoteCount())

    def was_served(self, vote: OpenVote) -> bool:
        """Whether the vote was served already, so that its caster only has to be told again."""
        return vote.kind is not VoteKind.AWAIT_MINIMUM and vote.count < self.counted(vote.kind).served

    def cast(self, peer_id: str, vote: OpenVote, now: float) -> None:
        """A member is in the call."""
        self.open[vote.kind][peer_id] = now + vote.timeout_s
        if vote.kind is VoteKind.UPDATE_TOPOLOGY:
            self.only[peer_id] = vote.only

    def withdraw(self, peer_id: str, *kinds: VoteKind) -> None:
        """A member is not in these calls any more; without kinds, in none."""
        for kind in kinds or VoteKind:
            self.open[kind].pop(peer_id, None)

    def all_in(self, members: Sequence[str], *kinds: VoteKind) -> bool:
        """Whether every member is in one of these calls."""
        return all(any(peer_id in self.open[kind] for kind in kinds) for peer_id in members)

    def overdue(self, now: float) -> list[VoteKind]:
        """The calls in which someone has waited long enough."""
        return [kind for kind, voters in self.open.items() if any(now >= deadline for deadline in voters.values())]

    def too_few(self, members: Sequence[str]) -> Failure:
        """The error for who waits for a minimum that does not come."""
        text = (
            f"group {self._durable.name!r} has {len(members)} members in epoch {self._durable.epoch}, needs "
            f"{self._durable.min_world_size}, and no newcomer came in time: start more peers"
        )
        return Failure("TooFewPeersError", text)

    def stuck(self, kind: VoteKind, members: Sequence[str]) -> Failure:
        """The error for members that wait in different calls: it says who is in which (R12)."""
        calls = {
            peer_id: ", ".join(k.value for k in VoteKind if peer_id in self.open[k]) or "no call known to the master"
            for peer_id in members
        }
        who = "; ".join(f"{peer_id} (rank {rank}): {calls[peer_id]}" for rank, peer_id in enumerate(members))
        text = (
            f"not all members of group {self._durable.name!r} came to {kind.value}() in epoch {self._durable.epoch}: "
            f"{who}. Every member has to make the same calls in the same order"
        )
        return Failure("OperationTimeoutError", text, {"calls": calls})
