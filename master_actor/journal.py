"""The journal: a log that only one master at a time can extend.

Each entry is *created* under its own position and never overwritten. Who finds its position taken has been replaced,
and gets `Superseded`: it must exit without having told anyone anything. The log is kept in any key-value storage that
can create a key atomically (`Storage`): memory, an SQLite file, or Ray's internal one (`master_actor.actor`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import threading
from typing import Protocol

from ray_pccl.errors import MasterError

_LOG = "log/"
_SNAPSHOT = "snapshot/"
_NONCE_BYTES = 16
_LOAD_ATTEMPTS = 20


class Superseded(MasterError):
    """Another master has written to the journal: this one is not the master any more."""


class Storage(Protocol):
    """What a journal needs of the place it is kept in. Every call is durable when it returns."""

    def create(self, key: str, value: bytes) -> bool:
        """Stores the value if the key does not exist yet. MUST be atomic; tells whether it did."""

    def read(self, key: str) -> bytes | None:
        """The value, or None."""

    def keys(self, prefix: str) -> list[str]:
        """All keys that start with the prefix, in any order."""

    def delete(self, key: str) -> None:
        """Removes the key, if it is there."""

    def close(self) -> None:
        """Lets go of the storage; what is in it stays."""


class Journal:
    """A log of entries over a `Storage`, with snapshots that stand for a prefix of it."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._position = 0
        self._compacted = 0

    @property
    def entries_since_snapshot(self) -> int:
        """How many entries a restart would have to read."""
        return self._position - self._compacted

    def load(self) -> tuple[bytes | None, list[bytes]]:
        """The newest snapshot, if any, and the entries after it. Appends go on from there."""
        for _ in range(_LOAD_ATTEMPTS):
            newest = self._newest_snapshot()
            snapshot = self._storage.read(_key(_SNAPSHOT, newest)) if newest else None
            positions = sorted(n for key in self._storage.keys(_LOG) if (n := _position(key)) > newest)
            entries = [self._storage.read(_key(_LOG, n)) for n in positions]
            found = [entry for entry in entries if entry is not None]
            complete = len(found) == len(entries) and positions == _following(newest, len(found))
            if complete and (snapshot is not None) == (newest > 0):
                self._compacted = newest
                self._position = newest + len(found)
                return snapshot, [entry[_NONCE_BYTES:] for entry in found]
        raise MasterError("the journal changes faster than it can be read: another master is running on it")

    def append(self, entry: bytes) -> None:
        """Writes the next entry, or raises `Superseded`."""
        position = self._position + 1
        key = _key(_LOG, position)
        value = self._nonce + entry
        # A storage that tries again after a lost answer reports our own entry as a conflict.
        if not self._storage.create(key, value) and self._storage.read(key) != value:
            raise Superseded(f"entry {position} of the journal was written by another master")
        if self._newest_snapshot() >= position:
            self._storage.delete(key)
            raise Superseded(f"entry {position} of the journal lies before another master's snapshot")
        self._position = position

    def compact(self, snapshot: bytes) -> None:
        """Replaces all entries so far with a snapshot. A crash at any point of it loses nothing."""
        self._storage.create(_key(_SNAPSHOT, self._position), snapshot)
        self._compacted = self._position
        # Whatever lies behind it goes, also what an earlier compaction that was cut short left over.
        old_entries = [key for key in self._storage.keys(_LOG) if _position(key) <= self._position]
        old_snapshots = [key for key in self._storage.keys(_SNAPSHOT) if _position(key) < self._position]
        for key in [*old_entries, *old_snapshots]:
            self._storage.delete(key)

    def verify(self) -> None:
        """Raises `Superseded` if another master has written since."""
        taken = self._storage.read(_key(_LOG, self._position + 1)) is not None
        if taken or self._newest_snapshot() > self._position:
            raise Superseded("another master has taken over")

    def erase(self) -> None:
        """Removes everything: this master is not to be remembered."""
        for key in [*self._storage.keys(_LOG), *self._storage.keys(_SNAPSHOT)]:
            self._storage.delete(key)

    def close(self) -> None:
        """Lets go of the storage."""
        self._storage.close()

    def _newest_snapshot(self) -> int:
        return max((_position(key) for key in self._storage.keys(_SNAPSHOT)), default=0)


def _key(prefix: str, position: int) -> str:
    return f"{prefix}{position:020d}"


def _position(key: str) -> int:
    return int(key.rpartition("/")[2])


def _following(position: int, count: int) -> list[int]:
    return list(range(position + 1, position + 1 + count))


class MemoryStorage:
    """Storage that ends with the process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def create(self, key: str, value: bytes) -> bool:
        if key in self.values:
            return False
        self.values[key] = value
        return True

    def read(self, key: str) -> bytes | None:
        return self.values.get(key)

    def keys(self, prefix: str) -> list[str]:
        return [key for key in self.values if key.startswith(prefix)]

    def delete(self, key: str) -> None:
        self.values.pop(key, None)

    def close(self) -> None:
        pass


class FileStorage:
    """Storage in an SQLite file: atomic between processes, and it survives any of them."""

    def __init__(self, path: str) -> None:
        self._lock = threading.Lock()
        try:
            self._open(path)
        except sqlite3.Error as error:
            raise MasterError(f"the journal {path!r} can't be used: {error}") from None

    def _open(self, path: str) -> None:
        # It holds the key that peers prove: for its owner alone. SQLite gives its other files the same permissions.
        with contextlib.suppress(OSError):  # what can't be opened, SQLite says better
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10)
        # Write-ahead without a sync for each commit: what is written survives the process, not a power cut.
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute("CREATE TABLE IF NOT EXISTS journal (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID")

    def create(self, key: str, value: bytes) -> bool:
        with self._lock:
            return self._db.execute("INSERT OR IGNORE INTO journal VALUES (?, ?)", (key, value)).rowcount == 1

    def read(self, key: str) -> bytes | None:
        with self._lock:
            row = self._db.execute("SELECT value FROM journal WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def keys(self, prefix: str) -> list[str]:
        with self._lock:
            rows = self._db.execute(
                "SELECT key FROM journal WHERE key >= ? AND key < ?", (prefix, prefix + "\x7f")
            ).fetchall()
        return [row[0] for row in rows]

    def delete(self, key: str) -> None:
        with self._lock:
            self._db.execute("DELETE FROM journal WHERE key = ?", (key,))

    def close(self) -> None:
        with self._lock:
            self._db.close()
