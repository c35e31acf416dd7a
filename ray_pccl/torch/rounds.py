"""A round of a rendezvous: which nodes are in it, and whether they have to meet again. No I/O."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Round:
    """What all nodes of a round know alike.

    An epoch alone does not name a round: nodes meet again without one when only a worker failed. The count of meetings
    alone does not, either: it begins anew with a group that was empty.
    """

    epoch: int
    meeting: int
    """How many meetings of all members the group has had."""
    rank: int
    members: tuple[str, ...]

    @property
    def world_size(self) -> int:
        """How many nodes are in it."""
        return len(self.members)

    @property
    def prefix(self) -> str:
        """Under which the round's keys are in the group's store."""
        return f"round/{self.epoch}.{self.meeting}"

    @property
    def again_key(self) -> str:
        """The key that a node sets when it has left the round, and wants all others to meet it in the next."""
        return f"again/{self.epoch}.{self.meeting}"


@dataclass(frozen=True, slots=True)
class Sight:
    """What a node sees of its group at some time after a round began."""

    members: tuple[str, ...] | None
    """None: this node itself was taken for dead."""
    waiting: int = 0
    asked_again: bool = False
    """Whether a node has left the round for the next one."""
    closed: bool = False


def lost_nodes(round_: Round, sight: Sight) -> tuple[str, ...]:
    """Who of the round is gone."""
    if sight.members is None:
        return (round_.members[round_.rank],)
    return tuple(member for member in round_.members if member not in sight.members)


def nodes_waiting(round_: Round, sight: Sight, max_nodes: int) -> int:
    """How many nodes an agent is to be told are waiting; it meets the others anew, with new workers, if any are.

    Torch's agent knows no other reason to do so, so a lost node, and one that has gone on to the next round, count as
    waiting. Who waits while the round is full is not counted: meeting would not let it in. Nor does anything count
    once the rendezvous is closed: nobody could meet, and the workers may as well end what they do.
    """
    if sight.closed:
        return 0
    gone = len(lost_nodes(round_, sight))
    room = max(0, max_nodes - (round_.world_size - gone))
    return max(min(sight.waiting, room), 1 if gone or sight.asked_again else 0)
