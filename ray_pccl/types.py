"""The plain values that users see: attributes, members, membership events."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Attribute(Enum):
    """What `Communicator.get_attribute` tells. A snapshot of the epoch, the same on all members."""

    GLOBAL_WORLD_SIZE = "global_world_size"
    """Members of all groups of this master."""
    PEER_GROUP_WORLD_SIZE = "peer_group_world_size"
    """Members of this communicator's group."""
    LOCAL_WORLD_SIZE = "peer_group_world_size"
    """PCCL's Python name for `PEER_GROUP_WORLD_SIZE`."""
    NUM_DISTINCT_PEER_GROUPS = "num_distinct_peer_groups"
    """Groups with at least one member."""
    LARGEST_PEER_GROUP_WORLD_SIZE = "largest_peer_group_world_size"
    """Members of the largest group."""


@dataclass(frozen=True, slots=True)
class Member:
    """One member of an epoch; its rank is its place in the epoch's list."""

    peer_id: str
    """Its name, unique for ever."""
    host: str
    """Its host, as far as one sentinel can see."""
    address: str = ""
    """Where its data plane listens; empty for one that has none."""


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """What the master tells of a group to who is not in it."""

    group: str
    """Its name."""
    epoch: int
    """The number of its present epoch; 0 before the first."""
    members: tuple[str, ...]
    """The `peer_id` of every member, by rank."""
    waiting: tuple[str, ...]
    """Who waits for admission, or for the group to form."""
    entries: dict[str, bytes]
    """What the group's key-value store holds under the keys that were asked for."""


class MembershipChange(Enum):
    """What happened to a group."""

    WAITING = "waiting"
    """A peer came and waits for admission."""
    WITHDRAWN = "withdrawn"
    """A waiting peer gave up or died."""
    LOST = "lost"
    """A member died or was evicted; the event has the reason."""
    LEFT = "left"
    """A member left by `close()`."""
    EPOCH = "epoch"
    """A new epoch began; the event has its number and members."""
    CLOSED = "closed"
    """The group was closed: nobody joins it any more."""
    EVICTED = "evicted"
    """This peer itself was put out."""
    MASTER_LOST = "master_lost"
    """The connection to the master broke; collectives go on, the peer reconnects."""
    MASTER_BACK = "master_back"
    """The peer is registered with the master again."""


@dataclass(frozen=True, slots=True)
class MembershipEvent:
    """What `Communicator.on_membership` hands to its callback."""

    change: MembershipChange
    """What happened."""
    group: str
    """Which group it is about."""
    epoch: int
    """The epoch that began, or the one in which it happened."""
    peer_id: str | None = None
    """Whom it happened to, if to one."""
    reason: str = ""
    """Why, of a loss and of an eviction: how it was noticed."""
    members: tuple[str, ...] = ()
    """Of a new epoch: the `peer_id` of every member, by rank."""
