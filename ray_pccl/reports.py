"""What the master tells of itself and its groups: the one form that the command line, the live page and users read.

`ray_pccl.report()` asks for it. It is a snapshot, made in one go by the master; as JSON it has the same names.
"""

from __future__ import annotations

from enum import Enum

import msgspec


class HappeningKind(Enum):
    """What the timeline of a group is made of."""

    BOOTED = "booted"
    """A master began to serve; of no group. `reason` tells which of its lives it is."""
    WAITING = "waiting"
    """A peer came, and waits for the group to form or to admit it."""
    WITHDRAWN = "withdrawn"
    """A waiting peer gave up, died, or was refused."""
    JOINED = "joined"
    """A peer is a member from this epoch on."""
    LOST = "lost"
    """A member died or was evicted; `reason` says how that was noticed."""
    LEFT = "left"
    """A member left by `close()`."""
    EPOCH = "epoch"
    """A new epoch after nobody's death: the group formed, admitted, or was linked anew. `reason` says which."""
    RECOVERED = "recovered"
    """A new epoch after a death. `took_ms`: from the master's first notice until all survivors were told."""
    RETURNED = "returned"
    """After a restart of the master its group is as it was. `took_ms`: since the boot."""
    CLOSED = "closed"
    """Nobody joins any more."""
    EMPTIED = "emptied"
    """The last member is gone."""


class Happening(msgspec.Struct, frozen=True, gc=False):
    """One line of the timeline."""

    number: int
    """Counts up for as long as the master's process lives."""
    at: float
    """Seconds since 1970, by the master's clock."""
    kind: HappeningKind
    group: str = ""
    epoch: int = 0
    peer_id: str | None = None
    reason: str = ""
    members: int = 0
    """How many the group has from then on."""
    took_ms: float | None = None


class InFlight(msgspec.Struct, frozen=True, gc=False):
    """An operation that members are in."""

    tag: int
    what: str
    """Such as ``all_reduce SUM of 1048576 FLOAT``."""
    members: int
    """How many members are in it, by what they told last: within the last second, or 1/200 s for each member."""
    seconds: float
    """For how long the first of them was in it when it told."""


class Sample(msgspec.Struct, frozen=True, gc=False):
    """What a group did in one stretch of time, all members together."""

    at: float
    """The end of the stretch, in seconds since 1970."""
    bytes_per_s: float
    """Bytes of the tensors of collectives that committed: the sum over the members."""
    operations_per_s: float
    """Collectives that committed: the mean over the members."""


class MemberReport(msgspec.Struct, frozen=True, gc=False):
    """One member of a group, as it last told."""

    peer_id: str
    host: str
    silent_s: float
    """Seconds since the master last heard of it."""
    rate_to_next: float | None = None
    """Bytes per second to the next member of the ring; None: not known, or on the same host."""
    operations: int = 0
    """Collectives that it has committed."""
    bytes: int = 0
    """Bytes of their tensors: of the output, or of the input where a peer gets none."""
    aborts: int = 0
    """Attempts that a death ended."""
    retries: int = 0
    """Attempts after the first."""
    failures: int = 0
    """Collectives that raised."""
    in_flight: int = 0
    store_bytes: int = 0
    """What it keeps for the driver's ObjectRefs."""


class GroupReport(msgspec.Struct, frozen=True, gc=False):
    """One group."""

    name: str
    epoch: int
    phase: str
    """Such as ``steady``, ``forming``, ``asking``: `master_actor.core.phases`."""
    closed: bool
    min_world_size: int
    max_world_size: int | None
    members: tuple[MemberReport, ...]
    """In the order of the ring: the place is the rank."""
    waiting: tuple[str, ...]
    in_flight: tuple[InFlight, ...]
    """The longest-running ones."""
    history: tuple[Sample, ...]
    bottleneck: float | None = None
    """The slowest edge of the ring between hosts, in bytes per second, where all are known."""
    age_s: float | None = None
    """How old the oldest figure of these is."""
    recoveries: int = 0
    """Epochs after a death, since this master booted."""
    losses: int = 0
    """Members that died or were evicted, since this master booted."""
    evictions: int = 0
    """Those of them whose process may still have been running."""


class MasterReport(msgspec.Struct, frozen=True, gc=False):
    """All that a master tells."""

    version: str
    boot: int
    """How often the master was started on its journal."""
    master_id: str
    host: str
    port: int
    pid: int
    at: float
    """When the report was made, in seconds since 1970."""
    booted_at: float
    dashboard: str
    """The address of the live page, with its token if it needs one; empty if there is none."""
    groups: tuple[GroupReport, ...]
    happenings: tuple[Happening, ...]
    """The timeline, oldest first: the last ones, or those after the number that was asked for."""


def to_json(report: MasterReport) -> bytes:
    """The report as JSON."""
    return msgspec.json.encode(report)


def from_json(text: bytes | str) -> MasterReport:
    """The report that was written as JSON."""
    return msgspec.json.decode(text, type=MasterReport)
