"""A page that a peer process and the test share: what the peer is in, and where it is to be struck.

It is a file, so what a killed peer wrote last is still there: that tells whether it died inside an operation.
"""

from __future__ import annotations

import mmap
from enum import IntEnum
from pathlib import Path

from ray_pccl.ring.fault_points import DELEGATE_NAMES, NAMES

POINTS = (*NAMES, *DELEGATE_NAMES)
"""Where peers can be struck."""
_BYTES = 4096


class Word(IntEnum):
    """The words of the page."""

    STATE = 0
    IN_CALL = 1
    """How many collectives it is in."""
    PROGRESS = 2
    """Grows with every call that ends."""
    STEP = 3
    EPOCH = 4
    POINT = 5
    """1 + the index of the fault point at which it is to be struck; 0 for none."""
    COUNTDOWN = 6
    """At which visit of it, from 1."""
    ACTION = 7
    STRUCK = 8
    """1 + the index of the point at which it was."""
    CUTS = 9
    """How many links it is to cut: one for each increment."""


class State(IntEnum):
    """How far a peer has come."""

    JOINING = 0
    MEMBER = 1
    ENDED = 2
    """It was told that it is no member any more, and has ended by itself."""


class Action(IntEnum):
    """What befalls a peer at a fault point."""

    KILL = 1
    STOP = 2
    CUT = 3
    DELAY = 4
    """The thread that is there sleeps, while the rest of the process goes on."""


class Board:
    """The page of one peer, mapped."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_BYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _BYTES)
        self._words = memoryview(self._map).cast("q")

    def __getitem__(self, word: Word) -> int:
        return self._words[word]

    def __setitem__(self, word: Word, value: int) -> None:
        self._words[word] = value

    def arm(self, point: int, countdown: int, action: Action) -> None:
        """Has the peer struck at a visit of a point. The point comes last: it is what the peer looks at."""
        self[Word.STRUCK] = 0
        self[Word.COUNTDOWN] = countdown
        self[Word.ACTION] = action
        self[Word.POINT] = point + 1

    def disarm(self) -> None:
        """Takes it back."""
        self[Word.POINT] = 0

    def visit(self, point: int) -> Action | None:
        """The peer is at a point: what is to happen to it there, if anything."""
        if self[Word.POINT] != point + 1:
            return None
        self[Word.COUNTDOWN] -= 1
        if self[Word.COUNTDOWN] > 0:
            return None
        self[Word.POINT] = 0
        self[Word.STRUCK] = point + 1
        return Action(self[Word.ACTION])
