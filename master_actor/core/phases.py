"""The life of a group, as one table.

A change of phase that is not in the table is a bug of ours, and raises with the whole story of the group.
"""

from __future__ import annotations

from collections import Counter, deque
from enum import Enum


class Phase(Enum):
    """Where a group is in its life."""

    EMPTY = "empty"
    """Nobody is a member, nobody waits."""
    FORMING = "forming"
    """Joiners gather; fewer than the minimum."""
    LAST_CALL = "last call"
    """The minimum is there; waiting a moment for one more."""
    STEADY = "steady"
    """An epoch is live."""
    ASKING = "asking"
    """A round is under way: members freeze and answer."""
    RETURNING = "returning"
    """The master restarted; members of the journalled epoch come back."""
    LEASED = "leased"
    """Every member is gone, but one may still run where we can't see it: its lease has to pass."""


TRANSITIONS: dict[tuple[Phase, Phase], str] = {
    (Phase.EMPTY, Phase.FORMING): "a first joiner, below the minimum",
    (Phase.FORMING, Phase.LAST_CALL): "the minimum is reached",
    (Phase.LAST_CALL, Phase.FORMING): "someone went, and the minimum is lost",
    (Phase.FORMING, Phase.EMPTY): "all joiners went, timed out, or were refused",
    (Phase.LAST_CALL, Phase.STEADY): "the group forms",
    (Phase.STEADY, Phase.ASKING): "a death, a broken link, an admission, a better order, a member that is behind",
    (Phase.ASKING, Phase.STEADY): "all that are left have answered: a new epoch",
    (Phase.STEADY, Phase.EMPTY): "the last member is gone for certain",
    (Phase.ASKING, Phase.EMPTY): "the last member is gone for certain",
    (Phase.STEADY, Phase.LEASED): "the last member is gone, and one may still run unseen",
    (Phase.ASKING, Phase.LEASED): "the last member is gone, and one may still run unseen",
    (Phase.RETURNING, Phase.STEADY): "all members are back, and agree",
    (Phase.RETURNING, Phase.ASKING): "a member is missing, behind or frozen",
    (Phase.RETURNING, Phase.EMPTY): "all members turned out to be dead for certain",
    (Phase.RETURNING, Phase.LEASED): "no member came back",
    (Phase.LEASED, Phase.EMPTY): "the lease has passed, or nobody is left to hold it",
}


class InvalidTransition(AssertionError):
    """A change of phase that the table does not know."""


class PhaseLog:
    """The present phase of a group and how it got there."""

    def __init__(self, group: str, start: Phase) -> None:
        self._group = group
        self.phase = start
        self.fired: Counter[tuple[Phase, Phase]] = Counter()
        self._story: deque[str] = deque([f"starts {start.value}"], maxlen=50)

    def enter(self, phase: Phase, now: float) -> None:
        """Changes the phase, if the table allows it."""
        step = (self.phase, phase)
        if step not in TRANSITIONS:
            story = "\n  ".join(self._story)
            raise InvalidTransition(
                f"group {self._group!r} can't go from {self.phase.value} to {phase.value} at {now:.3f}:\n  {story}"
            )
        self.fired[step] += 1
        self._story.append(f"{now:.3f} {self.phase.value} -> {phase.value}: {TRANSITIONS[step]}")
        self.phase = phase
