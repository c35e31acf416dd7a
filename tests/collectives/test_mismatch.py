"""Members that mean different things under one tag are all told so, at once, and go on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ray_pccl import DataType, QuantizationAlgorithm, ReduceOp
from ray_pccl.testing import PeerGroup
from tests.collectives import programs
from tests.collectives.calls import Call, Outcome, perform
from tests.collectives.conftest import check, over, together

SMALL, MIDDLE, LARGE = 16, (64 << 10) // 4, (256 << 10) // 4
MIN_MAX, ZERO_POINT = QuantizationAlgorithm.MIN_MAX, QuantizationAlgorithm.ZERO_POINT_SCALE
PLAIN = Call()
DIFFERENT = {
    "count": (PLAIN, replace(PLAIN, count=17)),
    "no elements": (PLAIN, replace(PLAIN, count=0)),
    "count around 64 KiB": (replace(PLAIN, count=MIDDLE), replace(PLAIN, count=MIDDLE + 1)),
    "count around 256 KiB": (replace(PLAIN, count=LARGE), replace(PLAIN, count=LARGE + 1)),
    "count of a few and of many": (PLAIN, replace(PLAIN, count=4 * LARGE)),
    "large counts": (replace(PLAIN, count=3 * LARGE), replace(PLAIN, count=4 * LARGE)),
    "dtype": (PLAIN, replace(PLAIN, dtype="int32")),
    "dtype around 256 KiB": (replace(PLAIN, count=LARGE), replace(PLAIN, count=LARGE, dtype="float64")),
    "op": (PLAIN, replace(PLAIN, op=ReduceOp.MAX)),
    "retry": (PLAIN, replace(PLAIN, retry=False)),
    "blocking or not": (PLAIN, replace(PLAIN, retry=False, behind=True)),
    "root": (replace(PLAIN, kind="reduce", root=0), replace(PLAIN, kind="reduce", root=1)),
    "root of a large broadcast": (
        replace(PLAIN, kind="broadcast", count=2 * LARGE, root=0),
        replace(PLAIN, kind="broadcast", count=2 * LARGE, root=1),
    ),
    "quantised or not": (PLAIN, replace(PLAIN, algorithm=MIN_MAX)),
    "quantised or not, large": (replace(PLAIN, count=4 * LARGE), replace(PLAIN, count=4 * LARGE, algorithm=MIN_MAX)),
    "algorithm": (replace(PLAIN, algorithm=ZERO_POINT), replace(PLAIN, algorithm=MIN_MAX)),
    "code": (replace(PLAIN, algorithm=MIN_MAX), replace(PLAIN, algorithm=MIN_MAX, quantized=DataType.UINT16)),
    "kind": (PLAIN, replace(PLAIN, kind="reduce")),
    "barrier or broadcast": (replace(PLAIN, kind="barrier"), replace(PLAIN, kind="broadcast")),
    "gather or scatter": (replace(PLAIN, kind="gather"), replace(PLAIN, kind="scatter")),
    "small or large and over links": (
        replace(PLAIN, kind="all_gather", count=LARGE),
        replace(PLAIN, kind="all_gather", count=LARGE + 1),
    ),
    "large kinds over links": (
        replace(PLAIN, kind="all_gather", count=2 * LARGE),
        replace(PLAIN, kind="broadcast", count=2 * LARGE),
    ),
    "memory or links": (replace(PLAIN, count=2 * LARGE), replace(PLAIN, kind="all_gather", count=2 * LARGE)),
}


def _at_once(group: PeerGroup, calls: list[Call]) -> list[Outcome]:
    started = [peer.run_async(perform, call) for peer, call in zip(group, calls, strict=True)]
    return [peer.result_of(answer, 30, "the call") for peer, answer in zip(group, started, strict=True)]


@pytest.mark.parametrize("what", DIFFERENT)
@over(2, 3)
def test_what_differs_is_told_to_every_peer_within_a_second(group: PeerGroup, what: str) -> None:
    one, other = DIFFERENT[what]
    for odd in (0, len(group) - 1):
        outcomes = _at_once(group, [other if rank == odd else one for rank in range(len(group))])
        assert [outcome.error for outcome in outcomes] == ["CollectiveMismatchError"] * len(group), outcomes
        late = max(outcome.ended for outcome in outcomes) - max(outcome.entered for outcome in outcomes)
        assert late < 1.0
        for outcome in outcomes:
            calls = outcome.details["calls"]
            assert group[odd].peer_id in calls and len(set(calls.values())) >= 2, calls
            assert all(f"{peer_id}" in outcome.text and call in outcome.text for peer_id, call in calls.items())
            assert outcome.untouched
        good = _at_once(group, [replace(one, count=5)] * len(group))
        assert all(not outcome.error for outcome in good), "the next operation of the tag"


@over(3)
def test_mismatches_in_a_row_leave_no_trace(group: PeerGroup) -> None:
    for _ in range(3):
        for one, other in DIFFERENT.values():
            _at_once(group, [one, other, one])
    check(together(group, programs.meet, "numpy", "float32"))


@over(3)
def test_a_mismatch_under_one_tag_does_not_disturb_another(group: PeerGroup) -> None:
    running = [peer.run_async(perform, Call(value=2**rank, tag=1, count=LARGE * 8)) for rank, peer in enumerate(group)]
    _at_once(group, [Call(tag=2), Call(tag=2, count=1), Call(tag=2)])
    for peer, answer in zip(group, running, strict=True):
        assert peer.result_of(answer, 20, "all_reduce").results == (7.0,)
