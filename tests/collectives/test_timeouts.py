"""Members that do not all come: an error that says who is where, the same on all, and the next operation works."""

from __future__ import annotations

import pytest

from ray_pccl.testing import PeerGroup
from tests.collectives import programs
from tests.collectives.calls import Call, perform
from tests.collectives.conftest import check, over, together

COUNTS = pytest.mark.parametrize("count", [10, 20_000, 500_000])


@COUNTS
@pytest.mark.parametrize("kind", ["all_reduce", "broadcast", "all_gather", "barrier"])
@over(2, 3)
def test_who_waits_in_vain_is_told_who_did_not_come_and_who_comes_later_is_told_the_same(
    group: PeerGroup, kind: str, count: int
) -> None:
    call = Call(kind=kind, count=count, timeout=0.5)
    early = [peer.run_async(perform, call) for peer in group[:-1]]
    outcomes = [future.result(10) for future in early]
    for outcome in outcomes:
        assert outcome.error == "OperationTimeoutError" and outcome.untouched, outcome
        assert outcome.ended - outcome.entered < 1.5
        calls = outcome.details["calls"]
        assert calls[group[-1].peer_id] == "nothing under tag 0" and group[-1].peer_id in outcome.text
        assert any(text.startswith(f"{kind}(") for text in calls.values())
    first = min(outcome.entered for outcome in outcomes)
    assert min(outcome.ended for outcome in outcomes) - first > 0.4, "the first to come waits for its whole time"
    late = group[-1].run(perform, call)
    assert late.error == "OperationTimeoutError" and late.ended - late.entered < 0.4, late
    assert late.text in {outcome.text for outcome in outcomes}, "the number was consumed, by the same error"
    check(together(group, programs.meet, "numpy", "float32"))


@COUNTS
@over(2, 3)
def test_nobody_waits_for_longer_than_the_least_patient(group: PeerGroup, count: int) -> None:
    patient = Call(count=count, timeout=20)
    started = [peer.run_async(perform, patient) for peer in group[1:-1]]
    started.append(group[0].run_async(perform, Call(count=count, timeout=0.3)))
    for future in started:
        outcome = future.result(10)
        assert outcome.error == "OperationTimeoutError" and outcome.ended - outcome.entered < 2.0, outcome
    assert group[-1].run(perform, patient).error == "OperationTimeoutError"
    check(together(group, programs.meet, "numpy", "float32"))


@over(2)
def test_a_timeout_of_nothing_is_a_look_whether_the_others_are_there(group: PeerGroup) -> None:
    outcome = group[0].run(perform, Call(timeout=0))
    assert outcome.error == "OperationTimeoutError"
    assert group[1].run(perform, Call()).error == "OperationTimeoutError"
    check(together(group, programs.meet, "numpy", "float32"))


@over(2)
def test_timeouts_in_a_row_leave_no_trace(group: PeerGroup) -> None:
    complaints = together(group, programs.many_in_vain, 50)
    assert not any(complaints), complaints
    check(together(group, programs.meet, "numpy", "float32"))


@pytest.mark.slow
@over(2)
def test_a_timeout_counts_until_all_have_entered_and_not_while_data_moves(group: PeerGroup) -> None:
    for complaints in together(group, programs.long_with_a_short_timeout):
        assert complaints == []
