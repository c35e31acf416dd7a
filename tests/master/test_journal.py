"""The journal, in every storage that needs nothing else: one writer at a time, and no crash loses anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from master_actor.journal import FileStorage, Journal, MemoryStorage, Storage, Superseded
from ray_pccl.errors import MasterError

Open = Callable[[], Storage]


@pytest.fixture(params=["memory", "file"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens the same storage, as another process would."""
    if request.param == "memory":
        shared = MemoryStorage()
        return lambda: shared
    opened: list[FileStorage] = []

    def open_file() -> Storage:
        opened.append(FileStorage(str(tmp_path / "journal")))
        return opened[-1]

    request.addfinalizer(lambda: [file.close() for file in opened])
    return open_file


class Crash(BaseException):
    """The process is gone."""


class Faulty:
    """A storage whose process crashes before its n-th change, or whose answers get lost."""

    def __init__(self, inner: Storage, *, changes: int = 10**9, lose_answers: bool = False) -> None:
        self.inner, self.changes, self.lose_answers = inner, changes, lose_answers

    def _change(self) -> None:
        if self.changes == 0:
            raise Crash
        self.changes -= 1

    def create(self, key: str, value: bytes) -> bool:
        self._change()
        created = self.inner.create(key, value)
        # A client that tried again after a lost answer finds the key taken, by itself.
        return created and not self.lose_answers

    def read(self, key: str) -> bytes | None:
        return self.inner.read(key)

    def keys(self, prefix: str) -> list[str]:
        return self.inner.keys(prefix)

    def delete(self, key: str) -> None:
        self._change()
        self.inner.delete(key)

    def close(self) -> None:
        self.inner.close()


def _loaded(storage: Storage) -> tuple[Journal, bytes | None, list[bytes]]:
    journal = Journal(storage)
    return journal, *journal.load()


def _with(storage: Storage, *entries: bytes) -> Journal:
    journal, _, _ = _loaded(storage)
    for entry in entries:
        journal.append(entry)
    return journal


# -------------------------------------------------------------------------------------------------------- storage


def test_a_key_is_created_once(storage: Open) -> None:
    first, second = storage(), storage()
    value = b"one"
    assert first.create("k", value) is True
    assert first.create("k", value) is False
    assert second.create("k", b"two") is False
    assert second.read("k") == b"one"


def test_a_key_that_was_deleted_can_be_created_again(storage: Open) -> None:
    store = storage()
    store.create("k", b"one")
    store.delete("k")
    store.delete("k")
    assert store.read("k") is None
    assert store.create("k", b"two") is True


def test_keys_are_listed_by_their_prefix(storage: Open) -> None:
    store = storage()
    for key in ("log/1", "log/2", "logs/3", "snapshot/1"):
        store.create(key, b"")
    assert sorted(store.keys("log/")) == ["log/1", "log/2"]
    assert store.keys("nothing/") == []


# ----------------------------------------------------------------------------------------------- append and load


def test_an_empty_journal_has_nothing(storage: Open) -> None:
    assert _loaded(storage())[1:] == (None, [])


def test_entries_are_loaded_in_the_order_they_were_written(storage: Open) -> None:
    entries = [b"%d" % place for place in range(25)]
    _with(storage(), *entries)
    assert _loaded(storage())[1:] == (None, entries)


def test_writing_goes_on_where_it_ended(storage: Open) -> None:
    _with(storage(), b"one")
    _with(storage(), b"two")
    assert _loaded(storage())[2] == [b"one", b"two"]


def test_a_second_writer_supersedes_the_first_which_has_written_nothing(storage: Open) -> None:
    first = _with(storage(), b"one")
    second = _with(storage(), b"boot of the second")
    with pytest.raises(Superseded):
        first.append(b"too late")
    second.append(b"more")
    with pytest.raises(Superseded):
        first.append(b"still too late")
    assert _loaded(storage())[2] == [b"one", b"boot of the second", b"more"]


def test_of_two_that_boot_at_the_same_time_one_wins(storage: Open) -> None:
    first, _, _ = _loaded(storage())
    second, _, _ = _loaded(storage())
    second.append(b"second")
    with pytest.raises(Superseded):
        first.append(b"first")


def test_two_writers_of_the_same_bytes_are_still_two(storage: Open) -> None:
    first, _, _ = _loaded(storage())
    second, _, _ = _loaded(storage())
    first.append(b"same")
    with pytest.raises(Superseded):
        second.append(b"same")


def test_verify_notices_a_successor_without_writing(storage: Open) -> None:
    first = _with(storage(), b"one")
    first.verify()
    second = _with(storage(), b"two")
    with pytest.raises(Superseded):
        first.verify()
    second.verify()


def test_verify_notices_a_successor_that_has_compacted(storage: Open) -> None:
    first = _with(storage(), b"one")
    second = _with(storage(), b"two", b"three")
    second.compact(b"all")
    with pytest.raises(Superseded):
        first.verify()


def test_an_own_entry_whose_answer_was_lost_is_no_conflict(storage: Open) -> None:
    journal, _, _ = _loaded(Faulty(storage(), lose_answers=True))
    journal.append(b"one")
    journal.append(b"two")
    assert _loaded(storage())[2] == [b"one", b"two"]


# ------------------------------------------------------------------------------------------------------- compaction


def test_a_snapshot_replaces_what_was_before_it(storage: Open) -> None:
    journal = _with(storage(), b"one", b"two")
    assert journal.entries_since_snapshot == 2
    journal.compact(b"one and two")
    assert journal.entries_since_snapshot == 0
    journal.append(b"three")
    assert _loaded(storage())[1:] == (b"one and two", [b"three"])
    assert len(storage().keys("log/")) == len(storage().keys("snapshot/")) == 1


def test_snapshots_follow_each_other(storage: Open) -> None:
    journal = _with(storage(), b"one")
    for place in range(5):
        journal.compact(b"snapshot %d" % place)
        journal.append(b"entry %d" % place)
    assert _loaded(storage())[1:] == (b"snapshot 4", [b"entry 4"])
    assert len(storage().keys("log/")) == len(storage().keys("snapshot/")) == 1


def test_entries_since_the_snapshot_are_known_after_a_restart(storage: Open) -> None:
    journal = _with(storage(), b"one", b"two")
    journal.compact(b"both")
    journal.append(b"three")
    assert _loaded(storage())[0].entries_since_snapshot == 1


def test_a_stale_writer_below_a_snapshot_is_superseded_and_leaves_nothing(storage: Open) -> None:
    stale = _with(storage(), b"one")
    second = _with(storage(), b"two", b"three")
    second.compact(b"all three")  # the position that the stale one would take is free again
    with pytest.raises(Superseded):
        stale.append(b"from the past")
    second.append(b"four")
    assert _loaded(storage())[1:] == (b"all three", [b"four"])


def test_a_snapshot_of_the_same_history_again_changes_nothing(storage: Open) -> None:
    journal = _with(storage(), b"one", b"two")
    journal.compact(b"one two")
    journal.compact(b"one two")
    assert _loaded(storage())[1:] == (b"one two", [])
    again, _, _ = _loaded(storage())
    again.compact(b"one two")
    assert _loaded(storage())[1:] == (b"one two", [])


@pytest.mark.parametrize("changes", range(6))
def test_a_crash_in_any_step_of_a_compaction_loses_nothing(storage: Open, changes: int) -> None:
    journal = _with(faulty := Faulty(storage()), b"one")
    journal.compact(b"one")
    for entry in (b"two", b"three", b"four"):
        journal.append(entry)
    faulty.changes = changes  # of: the snapshot, three entries, the snapshot before it
    try:
        journal.compact(b"one two three four")
        assert changes == 5
    except Crash:
        assert changes < 5
    again, snapshot, entries = _loaded(storage())
    assert b" ".join([*([snapshot] if snapshot else []), *entries]) == b"one two three four"
    again.append(b"five")
    again.compact(b"one two three four five")
    again.append(b"six")
    assert _loaded(storage())[1:] == (b"one two three four five", [b"six"])
    faulty.changes = 10**9
    with pytest.raises(Superseded):
        journal.append(b"from the past")


def test_a_journal_that_was_erased_is_new(storage: Open) -> None:
    journal = _with(storage(), b"one", b"two")
    journal.compact(b"both")
    journal.append(b"three")
    journal.erase()
    assert _loaded(storage())[1:] == (None, [])
    assert storage().keys("") == []


def test_a_journal_with_a_gap_is_an_error_and_not_a_shorter_history(storage: Open) -> None:
    _with(storage(), b"one", b"two", b"three")
    store = storage()
    store.delete(sorted(store.keys("log/"))[1])
    with pytest.raises(MasterError):
        _loaded(storage())


def test_a_file_survives_its_process(tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    store = FileStorage(path)
    _with(store, b"one")
    store.close()
    again = FileStorage(path)
    assert _loaded(again)[2] == [b"one"]
    again.close()


def test_a_file_that_holds_the_key_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    store = FileStorage(str(path))
    store.create("k", b"v")
    modes = {file.name: oct(file.stat().st_mode & 0o777) for file in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("journal", "journal-wal", "journal-shm"), "0o600")
    store.close()
