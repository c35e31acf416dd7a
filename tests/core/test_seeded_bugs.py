"""The simulation is shown to bite: each of these bugs, patched into the real code, is found by it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import pytest

from master_actor.core import agreement, store
from master_actor.core.actions import Append
from master_actor.core.group import Group
from master_actor.core.master import Master
from master_actor.core.optimizing import Optimizer
from master_actor.core.phases import Phase
from master_actor.core.records import Durable, EpochBegan, GroupEmptied
from master_actor.core.votes import Ballot
from master_actor.journal import Journal
from ray_pccl.control.messages import OperationState, Outcome, Registered, Verdict
from ray_pccl.peer.ledger import Ledger
from tests.core import simulation, test_scenarios
from tests.core.drivers import hunt
from tests.core.simulation import Violation
from tests.core.test_crash_points import lived, points

Patch = pytest.MonkeyPatch


def _lives(scenario: Callable[..., None]) -> list[Callable[[], None]]:
    """The scenario at each of its stages, if it has some."""
    staged = "stage" in signature(scenario).parameters
    return [partial(scenario, stage) for stage in test_scenarios.STAGES] if staged else [scenario]


SCENARIOS = [
    life for name, scenario in vars(test_scenarios).items() if name.startswith("test_") for life in _lives(scenario)
]
BUGS: dict[str, Callable[[Patch], None]] = {}


def bug(function: Callable[[Patch], None]) -> Callable[[Patch], None]:
    BUGS[function.__name__] = function
    return function


@bug
def commit_on_majority(patch: Patch) -> None:
    right = agreement._decide

    def decide(key: Any, reports: Any, survivors: int, *rest: Any) -> Outcome:
        outcome = right(key, reports, survivors, *rest)
        prepared = sum(report.state is OperationState.PREPARED for report in reports)
        if outcome.verdict is Verdict.ABORT and prepared > survivors / 2:
            return Outcome(*key, Verdict.COMMIT, outcome.epoch)
        return outcome

    patch.setattr(agreement, "_decide", decide)


@bug
def commit_only_what_a_survivor_committed(patch: Patch) -> None:
    right = agreement._decide

    def decide(key: Any, reports: Any, survivors: int, *rest: Any) -> Outcome:
        outcome = right(key, reports, survivors, *rest)
        if outcome.verdict is Verdict.COMMIT and all(r.state is not OperationState.COMMITTED for r in reports):
            return Outcome(*key, Verdict.ABORT, outcome.epoch)
        return outcome

    patch.setattr(agreement, "_decide", decide)


@bug
def epoch_numbers_start_again_when_a_group_was_empty(patch: Patch) -> None:
    right = Durable.apply

    def apply(self: Durable, record: Any) -> None:
        right(self, record)
        if isinstance(record, GroupEmptied):
            self.group(record.group).epoch = 0

    patch.setattr(Durable, "apply", apply)


@bug
def a_restart_forgets_the_epochs(patch: Patch) -> None:
    right = simulation.decode_records
    patch.setattr(
        simulation, "decode_records", lambda entry: [r for r in right(entry) if not isinstance(r, EpochBegan)]
    )


@bug
def pushes_leave_before_the_journal_is_written(patch: Patch) -> None:
    right = Master.handle

    def handle(self: Master, event: Any, now: float) -> list[Any]:
        return sorted(right(self, event, now), key=lambda action: isinstance(action, Append))

    patch.setattr(Master, "handle", handle)


@bug
def an_answer_does_not_bind(patch: Patch) -> None:
    patch.setattr(Ledger, "freeze", lambda self: None)


@bug
def a_question_aborts_operations_at_once(patch: Patch) -> None:
    right = Ledger.freeze

    def freeze(self: Ledger) -> None:
        right(self)
        for operation in self.operations.values():
            if operation.state is OperationState.PREPARED:
                operation.state = OperationState.RUNNING

    patch.setattr(Ledger, "freeze", freeze)


@bug
def finished_operations_are_not_answered_for(patch: Patch) -> None:
    right = Ledger.report
    patch.setattr(
        Ledger, "report", lambda self: tuple(r for r in right(self) if r.state is not OperationState.COMMITTED)
    )


@bug
def a_served_vote_is_not_repeated_to_who_returns(patch: Patch) -> None:
    right = Group._send

    def send(self: Group, peer_id: str, message: Any) -> None:
        right(self, peer_id, Registered({}) if isinstance(message, Registered) else message)

    patch.setattr(Group, "_send", send)
    patch.setattr(Ballot, "was_served", lambda self, vote: False)


@bug
def the_lease_of_silent_members_is_ignored(patch: Patch) -> None:
    right = Group._dissolve

    def dissolve(self: Group, now: float) -> None:
        self.leases.clear()
        right(self, now)

    patch.setattr(Group, "_dissolve", dissolve)


@bug
def an_evicted_peer_is_taken_back(patch: Patch) -> None:
    right = Group.register

    def register(self: Group, register: Any, now: float) -> None:
        if register.peer_id not in self.living:
            self._send(register.peer_id, Registered({}))
        else:
            right(self, register, now)

    patch.setattr(Group, "register", register)


@bug
def who_does_not_answer_is_waited_for_for_ever(patch: Patch) -> None:
    right = Group._put_question

    def put(self: Group, peer_id: str, now: float) -> None:
        right(self, peer_id, now)
        assert self.inquiry is not None
        self.inquiry.deadlines[peer_id] = float("inf")

    patch.setattr(Group, "_put_question", put)


@bug
def late_joiners_form_a_second_group(patch: Patch) -> None:
    right = Group.join

    def join(self: Group, join: Any, now: float) -> None:
        right(self, join, now)
        if self.phase is Phase.STEADY and len(self.room) >= join.min_world_size:
            joins = self.room.take(None)
            members = tuple(simulation.Member(j.peer_id, j.host, j.address) for j in joins)
            self._begin(members, admits=True, limits=(join.min_world_size, join.max_world_size))

    patch.setattr(Group, "join", join)


@bug
def a_replaced_master_goes_on(patch: Patch) -> None:
    def append(self: Journal, entry: bytes) -> None:
        self._position += 1
        self._storage.values[f"log/{self._position:020d}"] = self._nonce + entry  # type: ignore[attr-defined]

    patch.setattr(Journal, "append", append)
    patch.setattr(Journal, "verify", lambda self: None)


@bug
def a_link_is_mended_inside_the_epoch(patch: Patch) -> None:
    patch.setattr(Group, "link_broken", lambda self, peer_id, report, now: None)


@bug
def newcomers_are_admitted_while_operations_are_in_flight(patch: Patch) -> None:
    right = Group._decide_if_complete

    def decide(self: Group, now: float) -> None:
        if self.inquiry is not None:
            self.inquiry.admit = True
        right(self, now)

    patch.setattr(Group, "_decide_if_complete", decide)
    patch.setattr("master_actor.core.group.Verdict", type("NoVerdict", (), {"ABORT": object()}))


@bug
def a_restarted_master_ignores_who_is_frozen(patch: Patch) -> None:
    right = Group._returns
    patch.setattr(Group, "_returns", lambda self, peer_id, *, agrees, now: right(self, peer_id, agrees=True, now=now))


@bug
def a_repeated_store_request_counts_twice(patch: Patch) -> None:
    right = store._changed

    def changed(old: Any, peer_id: str, request: Any, place: int) -> Any:
        value, stamp = right(old, peer_id, request, place)
        return value, type(stamp)(peer_id, -1, stamp.values, stamp.flag, stamp.amount)

    patch.setattr(store, "_changed", changed)


@bug
def a_master_without_its_journal_goes_on_as_if_it_were_the_master(patch: Patch) -> None:
    patch.setattr(simulation.MasterProcess, "is_ours", lambda self: True)


@bug
def who_was_given_up_is_still_encouraged(patch: Patch) -> None:
    patch.setattr(Master, "belongs", lambda self, peer_id: True)


@bug
def an_order_that_was_found_before_a_death_is_put_into_force(patch: Patch) -> None:
    right = Group._ask

    def ask(self: Group, now: float, **given: Any) -> None:
        inquiry = self.inquiry
        kept = (inquiry.order, inquiry.ring) if inquiry is not None else None
        if inquiry is not None and kept is not None:
            deadlines, inquiry.deadlines = inquiry.deadlines, {"nobody": 0.0}
            right(self, now, **given)
            inquiry.order, inquiry.ring = kept
            inquiry.deadlines = {peer_id: ends for peer_id, ends in deadlines.items() if peer_id not in self.lost}
            self._decide_if_complete(now)
        else:
            right(self, now, **given)

    patch.setattr(Group, "_ask", ask)


@bug
def nobody_goes_on_when_the_solver_has_answered(patch: Patch) -> None:
    right = Optimizer.solved
    patch.setattr(Optimizer, "solved", lambda self, answer: right(self, answer) and False)


@bug
def a_survey_that_has_ended_by_a_report_is_not_noticed(patch: Patch) -> None:
    right = Optimizer.measured
    patch.setattr(Optimizer, "measured", lambda self, *args: right(self, *args) and False)


def caught(seeds: range = range(1000)) -> Violation | None:
    """What scenarios, the crashes at every point of a fixed life, and then random lives bring to light."""
    lives = [partial(lived, {point}) for point in range(1, points() + 1)]
    for life in [*SCENARIOS, *lives]:
        try:
            life()
        except Violation as violation:
            return violation
        except TypeError:
            raise  # a bug that does not fit what it was put into any more is none that was found
        except Exception as error:
            return Violation(f"{type(error).__name__}: {error}")
    return hunt(seeds)


@pytest.mark.parametrize("name", BUGS)
def test_the_simulation_finds(name: str, monkeypatch: Patch) -> None:
    points()  # counted before the bug is there
    BUGS[name](monkeypatch)
    assert caught() is not None, f"the bug {name!r} went unnoticed"


def test_there_are_at_least_ten_of_them_and_none_is_found_where_there_is_none() -> None:
    assert len(BUGS) >= 10
    assert caught(seeds=range(150)) is None
