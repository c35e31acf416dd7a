"""What goes into a peer's membership, and what it wants done."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from ray_pccl.control.messages import Message, Probe
from ray_pccl.errors import PCCLError
from ray_pccl.types import Member, MembershipEvent


@dataclass(frozen=True, slots=True)
class Identity:
    """Who joins what, and how."""

    peer_id: str
    group: str
    host: str
    min_world_size: int = 1
    max_world_size: int | None = None
    rank: int | None = None
    watched: bool = False
    address: str = ""
    """Where this peer's data plane listens."""
    expected: int = 0
    """When this many have joined, the group forms without a last call."""


@dataclass(frozen=True, slots=True)
class View:
    """An epoch as this peer sees it: immutable, so that any thread may read it."""

    epoch: int = 0
    rank: int = -1
    members: tuple[Member, ...] = ()
    min_world_size: int = 1
    attributes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Send:
    """Send the message to the master, if there is a connection; what matters is sent again after a reconnect."""

    message: Message


@dataclass(frozen=True, slots=True)
class Settle:
    """A call has its result."""

    call: Hashable
    value: Any = None


@dataclass(frozen=True, slots=True)
class Fail:
    """A call has failed."""

    call: Hashable
    error: PCCLError


@dataclass(frozen=True, slots=True)
class Tell:
    """Callbacks may want to know."""

    event: MembershipEvent


@dataclass(frozen=True, slots=True)
class Inform:
    """A call goes on, and whoever waits for it may want to know how far it is."""

    call: Hashable
    value: Any


@dataclass(frozen=True, slots=True)
class Measure:
    """Measure the way to another member, and hand the outcome to `Membership.probed`."""

    probe: Probe


Effect = Send | Settle | Fail | Tell | Inform | Measure
