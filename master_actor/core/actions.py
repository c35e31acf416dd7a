"""What goes into the core, and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass

from master_actor.core.records import Record
from ray_pccl.control.messages import FromPeer, FromSentinel, Message
from ray_pccl.reports import HappeningKind

# ------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Received:
    """A peer said something on its connection."""

    peer_id: str
    message: FromPeer


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A peer's connection closed, and no newer one of the same peer took its place."""

    peer_id: str


@dataclass(frozen=True, slots=True)
class SentinelSaid:
    """The sentinel of a host said something, or beat (`message` is None)."""

    host: str
    message: FromSentinel | None


@dataclass(frozen=True, slots=True)
class SentinelGone:
    """The connection of a host's sentinel closed."""

    host: str


@dataclass(frozen=True, slots=True)
class EvictionRequested:
    """Somebody in charge wants a peer out."""

    peer_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class ExpectationChanged:
    """Fewer peers will come to a group that forms than those who came had expected."""

    group: str
    number: int


@dataclass(frozen=True, slots=True)
class Solved:
    """The answer to a `Solve`: places in its `members`, in the order of the ring, or why there is none."""

    group: str
    number: int
    order: tuple[int, ...] = ()
    bottleneck: float = 0.0
    total: float = 0.0
    optimal: bool = False
    edges: tuple[tuple[int, int], ...] = ()
    """Where no ring exists: the edges in the way."""
    error: str = ""
    """Where the search itself failed: how."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The master is to end for good."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    Received
    | Disconnected
    | SentinelSaid
    | SentinelGone
    | EvictionRequested
    | ExpectationChanged
    | Solved
    | StopRequested
    | Tick
)

# ------------------------------------------------------------------------------------------------------ actions


@dataclass(frozen=True, slots=True)
class Append:
    """Write the record to the journal. No later action may be carried out before it is durable."""

    record: Record


@dataclass(frozen=True, slots=True)
class Send:
    """Send the message on the peer's connection, if it has one."""

    peer_id: str
    message: Message


@dataclass(frozen=True, slots=True)
class Complain:
    """Something that must not happen did, in one group; the others go on. Put it into the log."""

    what: str
    error: Exception


@dataclass(frozen=True, slots=True)
class Solve:
    """Find the best ring, away from all that has to go on meanwhile, and answer with `Solved`."""

    group: str
    number: int
    bandwidth: tuple[tuple[float, ...], ...]
    """Bytes per second from each member to each other; 0: they can't connect; nan: unknown."""
    hosts: tuple[int, ...]
    """The host of each member, as a number."""
    budget_s: float


@dataclass(frozen=True, slots=True)
class Note:
    """Something for the timeline. It happens when it is carried out: what came before is then written, and sent."""

    kind: HappeningKind
    group: str
    epoch: int = 0
    peer_id: str | None = None
    reason: str = ""
    members: int = 0
    certain: bool = True
    """For a loss: whether the peer's process can't be running any more. If it may, this is an eviction."""


Action = Append | Send | Complain | Solve | Note
