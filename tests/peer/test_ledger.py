"""What a peer holds of each operation: nothing moves while frozen, and a decision is applied as a whole (R0 to R3)."""

from __future__ import annotations

import pytest

from ray_pccl.control.messages import Failure, OperationReport, OperationState, Outcome, Verdict
from ray_pccl.errors import PCCLError
from ray_pccl.peer.ledger import FrozenError, Ledger

RUNNING, PREPARED, COMMITTED, FAILED = OperationState
LOST = Failure("PeerLostError", "peer c was lost", {"peers": ["c"], "reason": "its process is exiting"})
NOW = 1.0


def _in(state: OperationState) -> Ledger:
    """A ledger whose only operation, (0, 0) of epoch 1, is in this state."""
    ledger = Ledger()
    key = ledger.enter(0, 1, NOW)
    if state in (PREPARED, COMMITTED):
        ledger.prepare(key, NOW)
    if state is COMMITTED:
        ledger.commit(key, NOW)
    if state is FAILED:
        ledger.fail(key, LOST, NOW)
    assert ledger.operations[key].state is state
    return ledger


def _settle(ledger: Ledger, *outcomes: Outcome, epoch: int = 2, restart_numbers: bool = False) -> None:
    ledger.freeze()
    ledger.settle(outcomes, epoch, restart_numbers=restart_numbers)


def test_numbers_count_for_each_tag() -> None:
    ledger = Ledger()
    assert [ledger.enter(tag, 1, NOW) for tag in (0, 0, 5, 0, 5)] == [(0, 0), (0, 1), (5, 0), (0, 2), (5, 1)]


def test_numbers_go_on_after_a_recovery_and_restart_with_an_admission() -> None:
    ledger = Ledger()
    ledger.enter(0, 1, NOW)
    _settle(ledger)
    assert ledger.enter(0, 2, NOW) == (0, 1)
    _settle(ledger, restart_numbers=True)
    assert ledger.operations == {}
    assert ledger.enter(0, 3, NOW) == (0, 0)


@pytest.mark.parametrize("step", ["enter", "prepare", "commit", "fail"])
def test_nothing_moves_while_frozen(step: str) -> None:
    ledger = _in(PREPARED if step == "commit" else RUNNING)
    ledger.freeze()
    before = ledger.report()
    steps = {
        "enter": lambda: ledger.enter(0, 1, NOW),
        "prepare": lambda: ledger.prepare((0, 0), NOW),
        "commit": lambda: ledger.commit((0, 0), NOW),
        "fail": lambda: ledger.fail((0, 0), LOST, NOW),
    }
    with pytest.raises(FrozenError):
        steps[step]()
    assert ledger.report() == before
    ledger.settle((), 1, restart_numbers=False)
    steps[step]()


def test_nothing_is_begun_in_an_epoch_that_is_over() -> None:
    ledger = _in(RUNNING)
    _settle(ledger, Outcome(0, 0, Verdict.ABORT, 1))
    with pytest.raises(FrozenError):
        ledger.enter(0, 1, NOW)
    with pytest.raises(FrozenError):
        ledger.again((0, 0), 1, NOW)
    assert ledger.enter(0, 2, NOW) == (0, 1), "what was refused took no number"


def test_an_entry_that_was_refused_while_frozen_used_up_no_number() -> None:
    ledger = Ledger()
    ledger.freeze()
    with pytest.raises(FrozenError):
        ledger.enter(0, 1, NOW)
    ledger.settle((), 2, restart_numbers=False)
    assert ledger.enter(0, 2, NOW) == (0, 0)


def test_a_report_tells_everything_in_order() -> None:
    ledger = Ledger()
    last = ledger.enter(1, 1, NOW, retry=False)
    first, second = ledger.enter(0, 1, NOW), ledger.enter(0, 1, NOW)
    ledger.prepare(first, NOW)
    ledger.commit(first, NOW)
    ledger.fail(second, LOST, NOW)
    ledger.prepare(last, NOW)
    assert ledger.report() == (
        OperationReport(0, 0, COMMITTED, 1),
        OperationReport(0, 1, FAILED, 1, True, LOST),
        OperationReport(1, 0, PREPARED, 1, False),
    )


def test_finished_operations_are_answered_for_until_all_are_known_to_be_past_them() -> None:
    ledger = _in(COMMITTED)
    for _ in range(1000):
        ledger.enter(1, 1, NOW)
    assert ledger.report()[0] == OperationReport(0, 0, COMMITTED, 1)
    ledger.forget((0, 0))
    ledger.forget((0, 0))
    assert all(report.tag == 1 for report in ledger.report())


@pytest.mark.parametrize("state", [PREPARED, COMMITTED])
def test_only_an_unprepared_operation_may_fail_on_one_peer_alone(state: OperationState) -> None:
    ledger = _in(state)
    with pytest.raises(PCCLError, match="prepared" if state is PREPARED else "decided"):
        ledger.fail((0, 0), LOST, NOW)
    assert ledger.operations[0, 0].state is state


@pytest.mark.parametrize("verdict", [Verdict.ABORT, Verdict.COMMIT, Verdict.CONSUME])
def test_an_attempt_of_an_epoch_that_was_decided_meanwhile_changes_nothing(verdict: Verdict) -> None:
    ledger = _in(PREPARED)
    _settle(ledger, Outcome(0, 0, verdict, 1, LOST if verdict is Verdict.CONSUME else None))
    decided = ledger.operations[0, 0].state
    for late in (
        lambda: ledger.prepare((0, 0), NOW, 1),
        lambda: ledger.commit((0, 0), NOW, epoch=1),
        lambda: ledger.fail((0, 0), LOST, NOW, 1),
    ):
        with pytest.raises(FrozenError):
            late()
    assert ledger.operations[0, 0].state is decided


@pytest.mark.parametrize(
    ("state", "verdict", "after", "epoch"),
    [
        (RUNNING, Verdict.ABORT, RUNNING, 2),
        (PREPARED, Verdict.ABORT, RUNNING, 2),
        (PREPARED, Verdict.COMMIT, COMMITTED, 1),
        (COMMITTED, Verdict.COMMIT, COMMITTED, 1),
        (RUNNING, Verdict.CONSUME, FAILED, 1),
        (PREPARED, Verdict.CONSUME, FAILED, 1),
        (FAILED, Verdict.CONSUME, FAILED, 1),
        (COMMITTED, Verdict.ABORT, COMMITTED, 1),
        (COMMITTED, Verdict.CONSUME, COMMITTED, 1),
        (FAILED, Verdict.ABORT, FAILED, 1),
    ],
)
def test_a_decision_settles_an_operation(
    state: OperationState, verdict: Verdict, after: OperationState, epoch: int
) -> None:
    ledger = _in(state)
    _settle(ledger, Outcome(0, 0, verdict, 1, LOST if verdict is Verdict.CONSUME else None))
    operation = ledger.operations[0, 0]
    assert (operation.state, operation.epoch) == (after, epoch)
    assert not ledger.frozen


def test_a_commit_without_a_result_is_a_bug_that_is_not_passed_over() -> None:
    with pytest.raises(PCCLError, match="no result"):
        _settle(_in(RUNNING), Outcome(0, 0, Verdict.COMMIT, 1))


def test_an_operation_that_was_consumed_before_it_was_entered_is_found_failed_when_it_is() -> None:
    ledger = Ledger()
    _settle(ledger, Outcome(0, 0, Verdict.CONSUME, 1, LOST))
    key = ledger.enter(0, 2, NOW)
    assert key == (0, 0)
    assert (ledger.operations[key].state, ledger.operations[key].failure) == (FAILED, LOST)
    assert ledger.operations[ledger.enter(0, 2, NOW)].state is RUNNING


@pytest.mark.parametrize("verdict", [Verdict.ABORT, Verdict.COMMIT])
def test_an_outcome_of_an_operation_that_this_peer_has_not_entered_changes_nothing(verdict: Verdict) -> None:
    ledger = Ledger()
    _settle(ledger, Outcome(0, 0, verdict, 1))
    assert ledger.operations == {}


@pytest.mark.parametrize("step", ["enter", "prepare", "commit", "fail"])
def test_after_its_lease_a_peer_takes_not_one_step_more(step: str) -> None:
    ledger = _in(PREPARED if step == "commit" else RUNNING)
    ledger.lease_ends = 5.0
    late = {
        "enter": lambda: ledger.enter(0, 1, 5.0),
        "prepare": lambda: ledger.prepare((0, 0), 5.0),
        "commit": lambda: ledger.commit((0, 0), 5.0),
        "fail": lambda: ledger.fail((0, 0), LOST, 5.0),
    }[step]
    with pytest.raises(FrozenError):
        late()
    assert ledger.frozen
    ledger.lease_ends = 50.0  # heard again: it stays frozen until the master has decided
    with pytest.raises(FrozenError):
        late()


def test_a_commit_forgets_all_that_came_before_it_under_its_tag_also_what_failed() -> None:
    ledger = Ledger()
    for number in range(6):
        key = ledger.enter(0, 1, NOW)
        if number % 2:
            ledger.fail(key, LOST, NOW)
        else:
            ledger.prepare(key, NOW)
            ledger.commit(key, NOW)
    assert sorted(ledger.operations) == [(0, 4), (0, 5)]


def test_an_operation_that_another_refused_fails_here_too_be_it_entered_or_not() -> None:
    ledger = Ledger()
    prepared = ledger.enter(0, 1, NOW)
    ledger.prepare(prepared, NOW)
    assert ledger.refused(prepared, 1, LOST, NOW)
    assert ledger.refused((7, 0), 1, LOST, NOW)
    assert not ledger.refused((7, 0), 1, LOST, NOW), "that is no news"
    assert ledger.enter(7, 1, NOW) == (7, 0)
    assert {op.state for op in ledger.operations.values()} == {FAILED}


def test_what_was_published_by_all_when_the_epoch_froze_is_prepared() -> None:
    ledger = Ledger()
    ledger.enter(0, 1, NOW)
    ledger.enter(1, 1, NOW)
    ledger.close_boards = lambda: [(0, 0), (5, 5)]
    ledger.freeze()
    assert [report.state for report in ledger.report()] == [PREPARED, RUNNING]


def test_a_commit_that_does_not_stand_is_none() -> None:
    ledger = Ledger()
    key = ledger.enter(0, 1, NOW)
    assert not ledger.commit(key, NOW, lambda: False)
    assert ledger.operations[key].state is RUNNING
    assert ledger.commit(key, NOW, lambda: True)
