"""What each member tells all others in a round of a sync: a row of fixed size, whatever the state."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from enum import Enum

DIGEST_BYTES = 16
NOWHERE = bytes(DIGEST_BYTES)
"""The `sync` of a member that has just begun."""
_ROW = struct.Struct(f"<8s{DIGEST_BYTES}sqqq{DIGEST_BYTES}s{DIGEST_BYTES}s{DIGEST_BYTES}sqqBBBB")
ROW_BYTES = _ROW.size


class SharedStateSyncStrategy(Enum):
    """What a member expects of a sync. Either all say ENFORCE_POPULAR, or each says one of the other two."""

    ENFORCE_POPULAR = 0
    """The content that most hold wins; who has another one receives it."""
    RECEIVE_ONLY = 1
    """This member's content does not count, and nothing is sent from here."""
    SEND_ONLY = 2
    """This member's content is the one that everyone will hold: it receives nothing. All who say so must agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One member in a sync."""

    nonce: bytes
    """Of this call: no two calls have the same."""
    sync: bytes = NOWHERE
    """Which election this member acts on; `NOWHERE` before its first."""
    revision: int
    known: int | None
    """The revision of the last sync that this member took part in, as a member of this group."""
    since: int = 0
    """The revision of the first one."""
    strategy: SharedStateSyncStrategy = SharedStateSyncStrategy.ENFORCE_POPULAR
    form: bytes
    """A digest of the tensors' names, types, shapes and flags."""
    content: bytes
    """A digest of what has to be the same everywhere."""
    loose: bytes = NOWHERE
    """A digest of what may differ."""
    has_loose: bool = False
    missing: int = 0
    """Bytes that have not arrived yet."""
    overdue: bool = False
    """Nothing has arrived for longer than this member waits."""
    spoilt: int = -1
    """A piece that no source could send as it was announced."""

    def pack(self) -> bytes:
        """Its bytes."""
        return _ROW.pack(
            self.nonce,
            self.sync,
            self.revision,
            0 if self.known is None else self.known,
            self.since,
            self.form,
            self.content,
            self.loose,
            self.missing,
            self.spoilt,
            self.strategy.value,
            self.known is not None,
            self.has_loose,
            self.overdue,
        )

    @classmethod
    def unpack(cls, data: bytes) -> Row:
        """The row of these bytes."""
        nonce, sync, revision, known, since, form, content, loose, missing, spoilt, strategy, knows, has, late = (
            _ROW.unpack(data)
        )
        return cls(
            nonce=nonce,
            sync=sync,
            revision=revision,
            known=known if knows else None,
            since=since,
            strategy=SharedStateSyncStrategy(strategy),
            form=form,
            content=content,
            loose=loose,
            has_loose=bool(has),
            missing=missing,
            overdue=bool(late),
            spoilt=spoilt,
        )

    def at(self, sync: bytes, *, missing: int = 0, overdue: bool = False, spoilt: int = -1) -> Row:
        """The row of the same call, further on."""
        return replace(self, sync=sync, missing=missing, overdue=overdue, spoilt=spoilt)
