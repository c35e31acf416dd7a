"""What outlives the master: journal records, and the state that is a fold over them.

`Durable.apply` is the only place that changes durable state. The running core applies each record as it emits it, and a
restarted one applies the same records again, so the two can't drift apart.
"""

from __future__ import annotations

import msgspec

from ray_pccl.control.messages import VoteCount, VoteKind
from ray_pccl.types import Member


class Record(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all journal records."""


class Booted(Record, frozen=True):
    """A master started. Its append is what shuts out the master before it."""

    boot: int
    nonce: str
    master_id: str
    host: str
    port: int
    key: bytes
    dashboard_port: int = 0
    """Of the live page; 0: it had none."""


class EpochBegan(Record, frozen=True):
    """A group has a new epoch. The votes it served are part of it, so that both are told or neither."""

    group: str
    epoch: int
    members: tuple[Member, ...]
    admitted_in: int
    votes: dict[str, VoteCount]
    min_world_size: int
    max_world_size: int | None


class VoteCounted(Record, frozen=True):
    """All members voted, and the membership stays as it is."""

    group: str
    kind: VoteKind
    count: VoteCount


class GroupEmptied(Record, frozen=True):
    """The last member is gone: only the epoch's number, and whether the group is closed, stay."""

    group: str


class GroupClosed(Record, frozen=True):
    """Nobody joins this group any more."""

    group: str


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """The answer that a peer's request got, kept until the peer is known to have it."""

    peer_id: str
    number: int
    values: tuple[bytes, ...] = ()
    flag: bool = False
    amount: int = 0


class StoreWritten(Record, frozen=True):
    """A key has a new value, or none; without value and stamps it is forgotten altogether."""

    group: str
    key: str
    value: bytes | None
    stamps: tuple[Stamp, ...] = ()


AnyRecord = Booted | EpochBegan | VoteCounted | GroupEmptied | GroupClosed | StoreWritten


class Stored(msgspec.Struct, array_like=True):
    """A key's value (None: deleted), with the answers that its writers may still ask for again."""

    value: bytes | None
    stamps: tuple[Stamp, ...] = ()


class DurableGroup(msgspec.Struct):
    """What is remembered of a group."""

    name: str
    epoch: int = 0
    members: tuple[Member, ...] = ()
    admitted_in: int = 0
    votes: dict[str, VoteCount] = {}
    min_world_size: int = 1
    max_world_size: int | None = None
    closed: bool = False
    store: dict[str, Stored] = {}


class Durable(msgspec.Struct):
    """What is remembered of everything."""

    identity: Booted | None = None
    groups: dict[str, DurableGroup] = {}

    def group(self, name: str) -> DurableGroup:
        """The group of this name; a new one if there is none."""
        return self.groups.setdefault(name, DurableGroup(name=name))

    def apply(self, record: Record) -> None:
        """Takes one record into account."""
        match record:
            case Booted():
                self.identity = record
            case EpochBegan():
                group = self.group(record.group)
                group.epoch = record.epoch
                group.members = record.members
                group.admitted_in = record.admitted_in
                group.votes = dict(record.votes)
                group.min_world_size = record.min_world_size
                group.max_world_size = record.max_world_size
            case VoteCounted():
                self.group(record.group).votes[record.kind.value] = record.count
            case GroupEmptied():
                old = self.group(record.group)
                # In place: the running core holds this very object.
                old.members, old.votes, old.store = (), {}, {}
                old.min_world_size, old.max_world_size = 1, None
            case GroupClosed():
                self.group(record.group).closed = True
            case StoreWritten():
                store = self.group(record.group).store
                if record.value is None and not record.stamps:
                    store.pop(record.key, None)
                else:
                    store[record.key] = Stored(record.value, record.stamps)
            case _:
                raise TypeError(f"no journal record: {record!r}")


_encoder = msgspec.msgpack.Encoder()
_records = msgspec.msgpack.Decoder(list[AnyRecord])
_snapshot = msgspec.msgpack.Decoder(Durable)


def encode_records(records: list[Record]) -> bytes:
    """One journal entry."""
    return _encoder.encode(records)


def decode_records(entry: bytes) -> list[AnyRecord]:
    """The records of one journal entry."""
    return _records.decode(entry)


def encode_snapshot(durable: Durable) -> bytes:
    """Everything that is remembered, as one value."""
    return _encoder.encode(durable)


def decode_snapshot(value: bytes) -> Durable:
    """What `encode_snapshot` wrote."""
    return _snapshot.decode(value)
