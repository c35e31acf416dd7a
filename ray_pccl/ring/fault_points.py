"""Named points in the protocols at which a test can strike. They cost one comparison when nobody does."""

from __future__ import annotations

from collections.abc import Callable

NAMES = (
    "before_show",
    "before_publish",
    "published",
    "reading_slots",
    "before_commit",
    "round",
    "prepared",
    "told_prepared",
    "committed",
    "frozen",
    "answered",
    "decided",
    "before_retry",
)
"""Those of every collective."""
STATE_NAMES = ("state_round", "state_sending", "state_arrived", "state_committing")
"""Those of a sync of the shared state."""
PROBE_NAMES = ("probing", "probed")
"""Those of a probe of the way to another peer."""
TRAINING_NAMES = ("training_met", "training_reducing", "training_committed")
"""Those of a step of an `ElasticTrainer`."""
DELEGATE_NAMES = ("delegate_building", "delegate_running", "delegate_done")
"""Those of a group whose data another library moves."""
_strike: Callable[[str], None] | None = None


def install(strike: Callable[[str], None] | None) -> None:
    """Has `strike` called with the name of every point that is reached, in whichever thread; None ends it."""
    global _strike  # noqa: PLW0603
    _strike = strike


def reach(name: str) -> None:
    """The code has come to this point."""
    if _strike is not None:
        _strike(name)
