"""The timeline: what happened to each group, when, and how long it took. It decides nothing.

The core says what happened (`Note`); it is stamped here, when everything before it was written and sent. So the
milliseconds of a recovery are those until the last survivor's news were handed to the network.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from itertools import count

from master_actor.core.actions import Note
from ray_pccl.reports import Happening, HappeningKind

KEPT = 500
"""So many happenings of each group are kept, so that one busy group does not hide the others."""
_ENDS_LOSS = (HappeningKind.RECOVERED, HappeningKind.EMPTIED)


class Chronicle:
    """The happenings of one master, from its boot on.

    Args:
        clock: Seconds that only grow, for how long things take.
        wall: Seconds since 1970, for when they were.
    """

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock, self._wall = clock, wall
        self._numbers = count(1)
        self._booted = clock()
        self.booted_at = wall()
        self._of: dict[str, deque[Happening]] = {}
        self._first_loss: dict[str, float] = {}
        """When the members that a group has not recovered from yet began to be lost."""
        self.counts: Counter[tuple[str, HappeningKind]] = Counter()
        self.evictions: Counter[str] = Counter()

    def booted(self, boot: int) -> Happening:
        """The master serves."""
        self._booted, self.booted_at = self._clock(), self._wall()
        return self.note(Note(HappeningKind.BOOTED, "", reason=f"boot {boot}"))

    def note(self, note: Note) -> Happening:
        """Something has just happened."""
        now = self._clock()
        if note.kind is HappeningKind.LOST:
            self._first_loss.setdefault(note.group, now)
            self.evictions[note.group] += not note.certain
        self.counts[note.group, note.kind] += 1
        happening = Happening(
            next(self._numbers),
            self._wall(),
            note.kind,
            note.group,
            note.epoch,
            note.peer_id,
            note.reason,
            note.members,
            self._took_ms(note, now),
        )
        self._of.setdefault(note.group, deque(maxlen=KEPT)).append(happening)
        return happening

    def _took_ms(self, note: Note, now: float) -> float | None:
        began = self._first_loss.pop(note.group, None) if note.kind in _ENDS_LOSS else None
        if note.kind is HappeningKind.RETURNED:
            began = self._booted
        return None if began is None else round(1000 * (now - began), 3)

    def after(self, number: int) -> tuple[Happening, ...]:
        """All that is kept and has a higher number, oldest first."""
        kept = [happening for of in self._of.values() for happening in of if happening.number > number]
        return tuple(sorted(kept, key=lambda happening: happening.number))

    def forget(self, groups: set[str]) -> None:
        """Drops what is kept of all groups but these."""
        for name in self._of.keys() - groups - {""}:
            del self._of[name]
            self._first_loss.pop(name, None)
            self.evictions.pop(name, None)
            for kind in HappeningKind:
                self.counts.pop((name, kind), None)
