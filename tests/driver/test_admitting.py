"""Votes to let actors in, without a group."""

from __future__ import annotations

from typing import Any

import pytest

from ray_pccl.driver.reducing import Member
from ray_pccl.settings import Settings


class Voter:
    """A communicator that only notes its votes."""

    members = ("one", "two")
    _settings = Settings()

    def __init__(self) -> None:
        self.votes: list[tuple[str, ...]] = []

    def _vote(self, _kind: Any, _timeout_s: float, only: tuple[str, ...]) -> None:
        self.votes.append(only)


@pytest.mark.parametrize(
    ("admits", "votes"), [(("three",), 1), (("two", "three"), 0), (("two",), 0)], ids=["out", "both", "in"]
)
def test_members_vote_only_if_all_whom_they_would_let_in_are_out(admits: tuple[str, ...], votes: int) -> None:
    """Who is in already was not asked to vote: the others would wait for it, and who is out would, too."""
    voter = Voter()
    member = Member(voter, 1, retry=True)  # type: ignore[arg-type]

    member.admit(admits)

    assert voter.votes == [admits] * votes
