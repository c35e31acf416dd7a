"""The waiting room: who wants in, until when, and when enough are there (R11).

It serves both the first rendezvous of a group and those who come late. It decides nothing about epochs.
"""

from __future__ import annotations

from dataclasses import dataclass

from ray_pccl.control.messages import Failure, Join


@dataclass(frozen=True, slots=True)
class Waiter:
    """A peer that wants to be a member."""

    join: Join
    deadline: float


class WaitingRoom:
    """Peers in the order they came."""

    def __init__(self, group: str) -> None:
        self._group = group
        self.waiters: dict[str, Waiter] = {}
        self.last_call_ends = 0.0
        self.expected: int | None = None
        """How many are to be waited for, if somebody knows better than those who came."""

    def __len__(self) -> int:
        return len(self.waiters)

    def __contains__(self, peer_id: object) -> bool:
        return peer_id in self.waiters

    def refusal(self, join: Join, limits: tuple[int, int | None] | None, *, forming: bool) -> Failure | None:
        """Why this peer can't be let in, if so. `limits` are the live group's, if there is one."""
        others = [waiter.join for peer_id, waiter in self.waiters.items() if peer_id != join.peer_id]
        if limits is None and others:
            limits = (others[0].min_world_size, others[0].max_world_size)
        asked = (join.min_world_size, join.max_world_size)
        if limits is not None and asked != limits:
            text = (
                f"group {self._group!r} has min_world_size={limits[0]}, max_world_size={limits[1]}, but peer "
                f"{join.peer_id} asked for {asked[0]} and {asked[1]}: all peers of a group must ask for the same"
            )
            return Failure("GroupMismatchError", text)
        holder = next((other.peer_id for other in others if forming and None is not other.rank == join.rank), None)
        if holder is not None:
            text = f"rank {join.rank} of group {self._group!r} is asked for by peer {holder} already"
            return Failure("RankTakenError", text, {"rank": join.rank, "holder": holder})
        return None

    def admit(self, join: Join, now: float) -> None:
        """Lets the peer wait. One that comes again, after a lost connection, keeps its place."""
        self.waiters[join.peer_id] = Waiter(join, now + join.timeout_s)

    def remove(self, peer_id: str) -> None:
        """The peer waits no more."""
        self.waiters.pop(peer_id, None)

    @property
    def first(self) -> Waiter:
        """The one that has waited longest: its deadline is the round's."""
        return next(iter(self.waiters.values()))

    def is_complete(self) -> bool:
        """Whether nobody else is to be waited for."""
        join = self.first.join
        expected = join.expected if self.expected is None else self.expected
        return len(self) >= expected > 0 or (join.max_world_size is not None and len(self) >= join.max_world_size)

    def take(self, room: int | None) -> list[Join]:
        """Lets the first `room` waiters (None: all) out as members, in the order they came."""
        taken = [waiter.join for waiter in list(self.waiters.values())[:room]]
        for join in taken:
            self.remove(join.peer_id)
        return taken

    def expired(self, now: float) -> list[Join]:
        """Those whose own time is up."""
        return [waiter.join for waiter in self.waiters.values() if now >= waiter.deadline]

    def timeout(self, join: Join, members: int) -> Failure:
        """The error for a waiter whose time is up."""
        there = f"{len(self.waiters)} waiting" if not members else f"{members} members did not vote to admit it"
        text = (
            f"peer {join.peer_id} waited {join.timeout_s:g} s for group {self._group!r}, which needs "
            f"{join.min_world_size} peers: {there}. Check that all peers were started and name the same group"
            + ("; members admit newcomers when all of them call update_topology()" if members else "")
        )
        return Failure("RendezvousTimeoutError", text)


def by_requested_rank(joins: list[Join]) -> list[Join]:
    """The order of a first epoch: who asked for a rank that exists gets it, the others fill the gaps."""
    places: list[Join | None] = [None] * len(joins)
    rest = []
    for join in sorted(joins, key=lambda join: join.rank is None):
        if join.rank is not None and join.rank < len(places) and places[join.rank] is None:
            places[join.rank] = join
        else:
            rest.append(join)
    # A rank beyond the group's size: the last places, in the order asked for.
    fill = iter(sorted(rest, key=lambda join: -1 if join.rank is None else join.rank))
    return [place if place is not None else next(fill) for place in places]
