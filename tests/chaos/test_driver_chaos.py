"""The driver's collectives, while actors and the master are killed: no wrong number, no double count, no hang."""

from __future__ import annotations

import logging
import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.driver import FAULTS, KILL_EVERY_S, STYLES, Round, run_round
from tests.chaos.driver_calls import Report
from tests.chaos.driver_faults import PHASES

pytestmark = [pytest.mark.slow, pytest.mark.ray]

KILLS, KILLS_A_PHASE = 50, 5
LOOP_S, KILLS_IN_LOOP = 60.0, 25


@pytest.fixture
def seed(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> int:
    caplog.set_level(logging.INFO, "ray_pccl")
    given = os.environ.get("RAY_PCCL_CHAOS_SEED")
    chosen = int(given) if given else random.randrange(10**6)
    print(f"again: RAY_PCCL_CHAOS_SEED={chosen} pytest {request.node.nodeid}", flush=True)
    return chosen


def _say(line: str) -> None:
    print(line, flush=True)


def _fail_on_violations(report: Report) -> None:
    _say(str(report))
    if report.violations:
        pytest.fail("\n".join(report.violations[:10]), pytrace=False)


@pytest.mark.timeout(900)
def test_kills_in_every_phase_leave_no_wrong_number_and_no_call_hanging(
    ray_local: Any, tmp_path: Path, seed: int
) -> None:
    report = Report()
    for style in STYLES:
        run_round(style, tmp_path, seed, report, lambda course: course.strike_all(FAULTS, _say))
        _fail_on_violations(report)
    assert report.tally.kills >= KILLS
    assert {phase: report.tally.phases[phase] for phase in PHASES if report.tally.phases[phase] < KILLS_A_PHASE} == {}
    assert {kind for kind in FAULTS if not report.tally.kinds[kind]} == set()


@pytest.mark.timeout(400)
def test_an_actor_that_dies_every_two_seconds_for_a_minute_spoils_nothing(
    ray_local: Any, tmp_path: Path, seed: int
) -> None:
    report = Report()

    def course(round_: Round) -> None:
        round_.kill_every(KILL_EVERY_S, LOOP_S, _say)

    run_round("sync", tmp_path, seed, report, course)
    _fail_on_violations(report)
    assert report.tally.kills >= KILLS_IN_LOOP
