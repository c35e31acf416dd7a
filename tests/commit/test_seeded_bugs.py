"""The model is shown to bite: each rule that is broken is noticed within so many lives."""

from __future__ import annotations

import pytest

from tests.commit import board_bugs  # noqa: F401  (registers its own)
from tests.commit.bugs import BUGS
from tests.commit.lives import hunt
from tests.commit.plan import AIMS

MOST_LIVES = 20_000


@pytest.mark.parametrize("name", BUGS)
def test_it_is_noticed_when(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks, aim = BUGS[name]
    breaks(monkeypatch)
    assert hunt(range(MOST_LIVES), aim) is not None, f"{name}: nobody noticed in {MOST_LIVES} lives"


def test_nothing_is_noticed_when_nothing_is_broken() -> None:
    assert len(BUGS) >= 12
    for aim in AIMS:
        assert hunt(range(500), aim) is None
