"""R0 to R3: what becomes of an operation after a death, for every combination of what survivors may hold."""

from __future__ import annotations

from itertools import product

import pytest

from master_actor.core.agreement import agree
from ray_pccl.control.messages import Failure, OperationReport, OperationState, Outcome, Verdict

RUNNING, PREPARED, COMMITTED, FAILED = OperationState
REFUSAL = Failure("UsageError", "two different counts")
LOST = (("z", "its process is exiting"),)
A_DEATH = Failure(
    "PeerLostError",
    "peer z was lost: its process is exiting",
    {"peers": ("z",), "reason": "its process is exiting"},
)
HOLDINGS = [
    None,
    *((state, epoch, retry) for state in OperationState for epoch in (1, 2) for retry in (True, False)),
]


def _report(holding: tuple[OperationState, int, bool] | None) -> list[OperationReport]:
    if holding is None:
        return []
    state, epoch, retry = holding
    return [OperationReport(0, 7, state, epoch, retry, REFUSAL if state is FAILED else None)]


def _expected(holdings: tuple, lost: tuple) -> tuple[Verdict, Failure | None] | None:
    """The rules, read once more from the protocol, in their own words."""
    entered = [holding for holding in holdings if holding is not None]
    if not entered:
        return None  # nobody knows of it: there is nothing to decide
    states = [state for state, _, _ in entered]
    if COMMITTED in states:  # R0: a commit anywhere implies that all were prepared
        return Verdict.COMMIT, None
    if FAILED in states:  # R3: failed for good by one is consumed by all
        return Verdict.CONSUME, REFUSAL
    everyone = len(entered) == len(holdings)
    same_inputs = len({epoch for _, epoch, _ in entered}) == 1
    if everyone and same_inputs and set(states) == {PREPARED}:  # R0: every survivor is prepared
        return Verdict.COMMIT, None
    if lost and any(not retry for _, _, retry in entered):  # R3: its caller wanted no retry
        return Verdict.CONSUME, A_DEATH
    return Verdict.ABORT, None


@pytest.mark.parametrize("survivors", [1, 2, 3])
@pytest.mark.parametrize("lost", [(), LOST])
def test_every_combination_of_what_survivors_hold_is_decided_by_the_rules(survivors: int, lost: tuple) -> None:
    for holdings in product(HOLDINGS, repeat=survivors):
        answers = {f"p{place}": _report(holding) for place, holding in enumerate(holdings)}
        decided = [(outcome.verdict, outcome.failure) for outcome in agree(answers, lost)]
        expected = _expected(holdings, lost)
        assert decided == ([] if expected is None else [expected]), holdings


def test_whoever_returned_holds_the_survivors_answer_in_every_reachable_state() -> None:
    """Dead and evicted peers included: the reason for the rule, over all states that three peers can be in."""
    checked = 0
    for world in product((None, RUNNING, PREPARED, COMMITTED), repeat=3):
        if COMMITTED in world and not set(world) <= {PREPARED, COMMITTED}:
            continue  # unreachable: a commit needs *prepared* from all
        for alive in product((True, False), repeat=3):
            survivors = {f"p{n}": world[n] for n in range(3) if alive[n]}
            if not survivors:
                continue
            answers = {p: [] if s is None else [OperationReport(0, 0, s, 1)] for p, s in survivors.items()}
            outcomes = agree(answers, [(f"p{n}", "dead") for n in range(3) if not alive[n]])
            commits = [outcome.verdict for outcome in outcomes] == [Verdict.COMMIT]
            if COMMITTED in world:
                assert commits, (world, alive)
            if commits:
                assert set(survivors.values()) <= {PREPARED, COMMITTED}, (world, alive)
            checked += 1
    assert checked > 200


def test_a_majority_is_not_enough() -> None:
    answers = {p: [OperationReport(0, 0, PREPARED, 1)] for p in "abcd"} | {"e": [OperationReport(0, 0, RUNNING, 1)]}
    assert agree(answers, LOST) == (Outcome(0, 0, Verdict.ABORT, 1),)


def test_an_operation_that_one_survivor_has_not_entered_is_aborted() -> None:
    assert agree({"a": [OperationReport(0, 0, PREPARED, 1)], "b": []}, LOST) == (Outcome(0, 0, Verdict.ABORT, 1),)


def test_prepared_in_different_epochs_is_not_the_same_result() -> None:
    answers = {"a": [OperationReport(0, 0, PREPARED, 1)], "b": [OperationReport(0, 0, PREPARED, 2)]}
    assert agree(answers, LOST) == (Outcome(0, 0, Verdict.ABORT, 2),)


def test_a_commit_is_told_with_the_epoch_whose_inputs_it_has() -> None:
    answers = {"a": [OperationReport(0, 0, COMMITTED, 1)], "b": [OperationReport(0, 0, PREPARED, 1)]}
    assert agree(answers, LOST) == (Outcome(0, 0, Verdict.COMMIT, 1),)


def test_without_a_loss_an_operation_without_retry_goes_on_after_a_relink() -> None:
    assert agree({"a": [OperationReport(0, 0, RUNNING, 1, retry=False)]}, ()) == (Outcome(0, 0, Verdict.ABORT, 1),)


def test_a_consumed_operation_names_everyone_who_was_lost() -> None:
    answers = {"a": [OperationReport(0, 0, RUNNING, 1, retry=False)], "b": []}
    (outcome,) = agree(answers, [("x", "gone"), ("y", "cut off")])
    assert outcome.verdict is Verdict.CONSUME and outcome.failure is not None
    assert outcome.failure.error == "PeerLostError"
    assert outcome.failure.details == {"peers": ("x", "y"), "reason": "gone; cut off"}
    assert "x" in outcome.failure.text and "cut off" in outcome.failure.text


def test_each_operation_is_decided_for_itself_and_in_order() -> None:
    answers = {
        "a": [
            OperationReport(1, 0, PREPARED, 1),
            OperationReport(0, 5, PREPARED, 1),
            OperationReport(0, 4, COMMITTED, 1),
        ],
        "b": [
            OperationReport(0, 5, RUNNING, 1),
            OperationReport(1, 0, PREPARED, 1),
            OperationReport(0, 4, PREPARED, 1),
        ],
    }
    assert agree(answers, LOST) == (
        Outcome(0, 4, Verdict.COMMIT, 1),
        Outcome(0, 5, Verdict.ABORT, 1),
        Outcome(1, 0, Verdict.COMMIT, 1),
    )


def test_an_operation_whose_root_is_lost_is_consumed() -> None:
    answers = {"a": [OperationReport(0, 0, RUNNING, 1, root="x")], "b": []}
    (outcome,) = agree(answers, [("x", "gone")])
    assert outcome.verdict is Verdict.CONSUME and outcome.failure is not None
    assert outcome.failure.details["peers"] == ("x",)
    assert agree(answers, [("y", "gone")]) == (Outcome(0, 0, Verdict.ABORT, 1),)


def test_too_few_survivors_commit_what_is_prepared_and_retry_nothing() -> None:
    answers = {"a": [OperationReport(0, 0, PREPARED, 1), OperationReport(1, 0, RUNNING, 1)]}
    commit, consume = agree(answers, LOST, 2)
    assert commit.verdict is Verdict.COMMIT
    assert consume.failure is not None and consume.failure.error == "TooFewPeersError"
