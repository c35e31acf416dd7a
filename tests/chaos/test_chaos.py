"""The test that decides: no wrong number, no double count, no hang, whatever dies when."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from ray_pccl.ring.fault_points import NAMES
from tests.chaos.bugs import NO_COMMIT
from tests.chaos.campaign import TRANSPORTS, Campaign, Report

KILLS, INSIDE_PERCENT, KILLS_A_POINT, SECONDS = 200, 70, 20, 480
KILLS_TO_FIND_A_BUG = 150


@pytest.fixture
def seed() -> int:
    given = os.environ.get("RAY_PCCL_CHAOS_SEED")
    chosen = int(given) if given else random.randrange(10**6)
    print(f"RAY_PCCL_CHAOS_SEED={chosen}")
    return chosen


def _fail_on_violations(report: Report) -> None:
    print(report)
    if report.violations:
        pytest.fail("\n".join(report.violations[:30]), pytrace=False)


@pytest.mark.timeout(90)
def test_a_few_kills_over_each_transport_leave_no_wrong_number(tmp_path: Path, seed: int) -> None:
    report = Campaign(tmp_path, seed, faults_a_group=8).run(lambda report: report.groups >= len(TRANSPORTS))
    _fail_on_violations(report)
    assert report.tally.kills >= 10


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 120)
def test_hundreds_of_kills_in_every_phase_leave_no_wrong_number(tmp_path: Path, seed: int) -> None:
    def enough(report: Report) -> bool:
        every_point = all(report.tally.at[name] >= KILLS_A_POINT for name in NAMES)
        return (report.tally.kills >= KILLS and every_point) or report.seconds > SECONDS

    report = Campaign(tmp_path, seed).run(enough, print)
    _fail_on_violations(report)
    assert report.tally.kills >= KILLS
    assert report.tally.inside * 100 >= INSIDE_PERCENT * report.tally.kills
    assert {name: report.tally.at[name] for name in NAMES if report.tally.at[name] < KILLS_A_POINT} == {}
    assert report.seconds < SECONDS


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_with_the_commit_switched_off_wrong_numbers_are_found(tmp_path: Path, seed: int, transport: str) -> None:
    campaign = Campaign(tmp_path, seed, transports=[transport], bug=NO_COMMIT)
    report = campaign.run(lambda report: report.tally.kills >= KILLS_TO_FIND_A_BUG)
    print(report, *report.violations[:10], sep="\n")
    assert any("agree" in violation or "returned" in violation for violation in report.violations)
