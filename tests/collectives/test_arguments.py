"""Calls that make no sense say so, and cost nobody else anything."""

from __future__ import annotations

import pytest

from ray_pccl.testing import PeerGroup
from tests.collectives import misuse, programs
from tests.collectives.conftest import check, over, together


@pytest.mark.parametrize("mistake", misuse.MISTAKES)
@over(2)
def test_a_mistake_is_told_to_who_made_it_and_its_tag_goes_on(group: PeerGroup, mistake: str) -> None:
    for complaints in together(group, misuse.commit, mistake):
        assert not complaints, complaints
    check(together(group, programs.meet, "numpy", "float32"))


@pytest.mark.parametrize("misfit", misuse.MISFITS)
@over(2, 3)
def test_tensors_that_do_not_fit_the_world_are_told_to_all_peers_at_once(group: PeerGroup, misfit: str) -> None:
    for everyone in (True, False):
        outcomes = together(group, misuse.misfit, misfit, everyone)
        assert [outcome.error for outcome in outcomes] == ["WorldChangedError"] * len(group), outcomes
        assert max(outcome.ended for outcome in outcomes) - max(outcome.entered for outcome in outcomes) < 1.0
        named = group[0].peer_id
        assert everyone or all(named in outcome.text for outcome in outcomes), outcomes
        check(together(group, programs.meet, "numpy", "float32"))


@over(2, 3)
def test_a_refusal_is_heard_at_whatever_moment_it_comes(group: PeerGroup) -> None:
    outcomes = together(group, misuse.hears_late, f"gate of {group[0].peer_id}")
    assert [outcome.error for outcome in outcomes] == ["WorldChangedError"] * len(group), outcomes
    assert max(outcome.ended - outcome.entered for outcome in outcomes) < 2.0


@pytest.mark.slow
@over(2)
def test_misfits_in_a_row_leave_no_trace(group: PeerGroup) -> None:
    """More than operations could ever be in flight."""
    assert together(group, misuse.many_misfits, 4500) == [4500, 4500]
    check(together(group, programs.meet, "numpy", "float32"))
