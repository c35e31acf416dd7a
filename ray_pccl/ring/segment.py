"""The memory that a rank shows to the others of its host: its board, its slots, its windows.

Each rank writes only its own segment; the others map it read-only, and the kernel holds them to it (a seal), so a
zombie that wakes up can't write into live memory (R8). It has no name: the kernel frees it with the last process.

The board has an entry for each tag. An entry's words are written in an order, and read in the opposite one: a flag is
set last and read last. `IDENT` (epoch and tag) changes only while the flags are invalid. Flags, headers and slots come
in pairs that alternate with the operation's number, so that a rank that has failed one and shows the next does not
seem to have gone through it: only its own number counts, or `LAST`, which says that its owner has committed it.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np

from ray_pccl.errors import ProtocolError
from ray_pccl.ring.header import HEADER_BYTES

ENTRIES = 128
ENTRY_WORDS = 16
CLOSED, ASLEEP = 0, 8
"""Words of the first page: the epoch up to which nothing published counts any more, and how many threads sleep."""
IDENT, LAST, DONE, WINDOW, SOURCE, FLAGS, HEADERS = 0, 1, 2, 3, 4, 5, 8
"""Words of an entry. There are two flags and two headers, one for even and one for odd numbers."""
HEADER_WORDS = HEADER_BYTES // 8
INVALID = -1
UNSET = -1 << 63
"""A flag of no operation. A flag that was withdrawn is inverted: so this must be none of those either."""
STAGE_BITS = 21
STAGE_MASK = (1 << STAGE_BITS) - 1
TAG_BITS = 31
TAG_MASK = (1 << TAG_BITS) - 1
"""Larger than any tag, so that an invalid entry belongs to none."""

SLOT_BYTES = 256 << 10
WINDOWS = 2
PARTS = 3
PART_BYTES = 2 << 20
_FIRST_ENTRY = mmap.PAGESIZE // 8
_SLOTS_AT = 1 << 16
_WINDOWS_AT = _SLOTS_AT + ENTRIES * 2 * SLOT_BYTES
SEGMENT_BYTES = _WINDOWS_AT + WINDOWS * PARTS * PART_BYTES
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 0x2, 0x4, 0x10

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def ident_of(epoch: int, tag: int) -> int:
    """The word that says whose entry it is, in which epoch."""
    return epoch << TAG_BITS | tag


def seal(fd: int, *, against_writing: bool = True) -> None:
    """From now on nobody can change the file's size, nor, if asked for, map it for writing."""
    fcntl.fcntl(fd, _ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW | (_SEAL_FUTURE_WRITE if against_writing else 0))


def is_sealed(fd: int) -> bool:
    """Whether the file can't be cut short under who has mapped it."""
    return bool(fcntl.fcntl(fd, _GET_SEALS) & _SEAL_SHRINK)


class Segment:
    """A mapped segment: one's own, writable, or another's, read-only."""

    def __init__(self, fd: int | None = None) -> None:
        own = fd is None
        if fd is None:
            fd = os.memfd_create("ray_pccl-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, SEGMENT_BYTES)
        elif os.fstat(fd).st_size != SEGMENT_BYTES or not is_sealed(fd):
            raise ProtocolError("the memory that a neighbour sent is not a segment of this version")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if own else 0)
        self._map = mmap.mmap(fd, SEGMENT_BYTES, prot=protection)
        self.fd = fd
        self.words = memoryview(self._map)[:_SLOTS_AT].cast("q")
        self.bytes: Bytes = np.frombuffer(self._map, dtype=np.uint8)
        board = np.frombuffer(self._map, dtype=np.int64, count=ENTRIES * ENTRY_WORDS, offset=_FIRST_ENTRY * 8)
        self._idents = board.reshape(ENTRIES, ENTRY_WORDS)[:, IDENT]
        self._entry_of: dict[int, int] = {}
        if own:
            seal(fd)
            self._idents[:] = INVALID
            self.words[CLOSED] = 0

    def find(self, tag: int) -> int | None:
        """The word at which the entry of a tag begins, or None if it has none now."""
        at = self._entry_of.get(tag)
        if at is not None and self.words[at] & TAG_MASK == tag:
            return at
        (found,) = np.nonzero(self._idents & TAG_MASK == tag)
        if not len(found):
            return None
        if len(self._entry_of) > 2 * ENTRIES:  # a neighbour's: one's own has no more than there are
            self._entry_of.clear()
        at = self._entry_of[tag] = _FIRST_ENTRY + int(found[0]) * ENTRY_WORDS
        return at

    def is_at_least(self, tag: int, ident: int, number: int, stage: int) -> int | None:
        """Where the entry of a tag begins, if its owner has come this far in this operation of this epoch."""
        at = self.find(tag)
        if at is None:
            return None
        words = self.words
        if words[at] != ident:
            return None
        shown = words[at + FLAGS + (number & 1)]
        far = shown >> STAGE_BITS == number and shown & STAGE_MASK >= stage
        return at if (far or words[at + LAST] >= number) and words[at] == ident else None

    def has_shown(self, tag: int, ident: int, number: int) -> int | None:
        """Where the entry of a tag begins, if the operation was ever shown there in this epoch.

        What was withdrawn counts: its owner may find that it must not be, and put it back.
        """
        at = self.find(tag)
        if at is None or self.words[at] != ident:
            return None
        shown = self.words[at + FLAGS + (number & 1)]
        mine = (~shown if shown < 0 else shown) >> STAGE_BITS == number
        return at if (mine or self.words[at + LAST] >= number) and self.words[at] == ident else None

    def header(self, at: int, number: int) -> bytes:
        """The header of an operation whose flag is set."""
        first = at + HEADERS + (number & 1) * HEADER_WORDS
        return bytes(self.words[first : first + HEADER_WORDS])

    def slot(self, at: int, number: int, size: int) -> Bytes:
        """Where the input of a small operation lies."""
        index = (at - _FIRST_ENTRY) // ENTRY_WORDS
        start = _SLOTS_AT + (2 * index + (number & 1)) * SLOT_BYTES
        return self.bytes[start : start + size]

    def part(self, window: int, part: int) -> Bytes:
        """One part of a window, through which large operations pass in rounds."""
        start = _WINDOWS_AT + (window * PARTS + part) * PART_BYTES
        return self.bytes[start : start + PART_BYTES]

    def close_fd(self) -> None:
        """Lets go of the descriptor, once; the memory goes with the last array that lies in it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class OwnSegment(Segment):
    """The one that this process writes."""

    def __init__(self) -> None:
        super().__init__()
        self._free = [_FIRST_ENTRY + index * ENTRY_WORDS for index in reversed(range(ENTRIES))]

    def take(self, tag: int) -> int | None:
        """The entry of a tag: the one it has, or a free one; None if all are taken."""
        at = self._entry_of.get(tag)
        if at is None and self._free:
            at = self._entry_of[tag] = self._free.pop()
        return at

    def give_back(self, tag: int) -> None:
        """Nobody reads this tag's entry any more."""
        at = self._entry_of.pop(tag)
        self._invalidate(at)
        self.words[at + IDENT] = INVALID
        self._free.append(at)

    @property
    def tags(self) -> list[int]:
        """The tags that have an entry, in the order in which they got it."""
        return list(self._entry_of)

    def dedicate(self, at: int, ident: int, number: int) -> None:
        """The entry is of this epoch from now on. Before its slots are written: who still reads them must notice."""
        words = self.words
        if words[at] != ident:
            self._invalidate(at)
            words[at] = ident
            words[at + DONE] = number

    def _invalidate(self, at: int) -> None:
        self.words[at + FLAGS] = self.words[at + FLAGS + 1] = UNSET
        self.words[at + LAST] = INVALID

    def post(self, at: int, number: int, header: bytes, flag: int) -> None:
        """Shows an operation to the others: the flag last, as all before it must be there when it is seen."""
        words = self.words
        first = at + HEADERS + (number & 1) * HEADER_WORDS
        words[first : first + HEADER_WORDS] = memoryview(header).cast("q")
        words[at + FLAGS + (number & 1)] = flag
