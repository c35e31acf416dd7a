"""The commit protocol over very many interleavings: whoever ever returned holds the same answer, and nobody hangs."""

from __future__ import annotations

import pytest

from tests.commit.lives import Lived, explore, live
from tests.commit.plan import MASTER_MOMENTS, PEER_MOMENTS, Fault

FEW, MANY = 3_000, 102_000
DISTINCT = 100_000
OUTCOMES = ("results", "recoveries", "OperationTimeoutError", "PeerEvictedError", "PeerLostError", "TooFewPeersError")


def everything_happened(lived: Lived, at_least: int) -> None:
    """Every fault, every moment for one, and every way to end were there often enough."""
    wanted = (*(fault.name for fault in Fault), *PEER_MOMENTS, *MASTER_MOMENTS, *OUTCOMES)
    rare = {what: lived.seen[what] for what in wanted if lived.seen[what] < at_least}
    assert not rare, f"fewer than {at_least} times in {lived.lives} lives: {rare}"


def test_no_life_among_a_few_thousand_has_two_answers_or_a_call_that_hangs() -> None:
    lived = explore(range(FEW))
    assert len(lived.traces) > 0.97 * FEW
    everything_happened(lived, at_least=5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_life_among_a_hundred_thousand_different_ones_has_two_answers_or_a_call_that_hangs() -> None:
    lived = explore(range(FEW, FEW + MANY))
    assert len(lived.traces) >= DISTINCT
    everything_happened(lived, at_least=500)


def test_a_seed_leads_to_the_same_life_each_time() -> None:
    assert [live(seed).trace for seed in range(50)] == [live(seed, tell=True).trace for seed in range(50)]
