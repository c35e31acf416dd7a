"""Deaths in groups whose data Gloo moves: in every phase, by every means; and nothing is left of the groups before."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ray_pccl import Settings
from ray_pccl.testing import Faults, PeerGroup, PeerProcess, PeerStarter, eventually
from tests.chaos.campaign import GLOO, Campaign
from tests.collectives.calls import Call, Outcome, is_inside, perform
from tests.collectives.conftest import on, together
from tests.torch import delegating

pytestmark = pytest.mark.slow  # each peer takes seconds to import torch

PATIENT = Settings.from_env(None, last_call_s=60.0, op_timeout_s=20.0)
LARGE = 1_000_000
GROWTH_BYTES = 8 << 20
"""More than what comes and goes; less than the buffers and stacks of a hundred groups."""
PHASES = ("delegate_building", "delegate_running", "prepared")
"""Chaos has the others, too."""


@pytest.fixture
def master_settings() -> Settings:
    """Calm: a death is seen by its signal, and a stopped process is not taken for dead too early."""
    return Settings.from_env(None, heartbeat_timeout_s=2.0, stall_timeout_s=30)


def _group(peer_group: PeerStarter, size: int, **more: object) -> PeerGroup:
    given = {"min_world_size": 1, "expected_world_size": size, "settings": PATIENT, "backend": "gloo"} | more
    group = peer_group(size, environment=on("auto"), **given)
    group._peers.sort(key=lambda peer: peer.rank)
    return group


def _check(outcomes: list[Outcome], survivors: list[PeerProcess], everyone: list[PeerProcess]) -> None:
    """All survivors have the same answer: of those who are left, or of all, if all had been prepared."""
    answers = {(outcome.results, tuple(outcome.info.contributors)) for outcome in outcomes if outcome.info is not None}
    possible = [((float(len(peers)),), tuple(peer.peer_id for peer in peers)) for peers in (survivors, everyone)]
    assert not any(outcome.error for outcome in outcomes), outcomes
    assert len(answers) == 1 and answers <= set(possible), outcomes


def test_a_kill_in_every_phase_leaves_the_survivors_with_one_answer(peer_group: PeerStarter, faults: Faults) -> None:
    peers = list(_group(peer_group, len(PHASES) + 2))
    for turn, phase in enumerate(PHASES):
        everyone = list(peers)
        victim = peers.pop(0 if turn % 2 else -1)  # the rank that gives the order is one of them
        victim.run(delegating.strike, phase)
        started = [peer.run_async(perform, Call(count=LARGE, in_place=bool(turn % 2))) for peer in everyone]
        outcomes = [future.result(20) for peer, future in zip(everyone, started, strict=True) if peer is not victim]
        _check(outcomes, peers, everyone)
        eventually(lambda victim=victim: not victim.alive, 5, f"it died in the phase {phase}")
    survivor, never_enters = peers
    started = [survivor.run_async(perform, Call(count=LARGE))]
    eventually(lambda: survivor.run(is_inside, 0), 10, "the peer is inside")
    faults.kill(never_enters)
    _check([started[0].result(20)], [survivor], [survivor])


def test_one_that_stops_inside_gloo_holds_nobody_up_and_no_thread(peer_group: PeerStarter, faults: Faults) -> None:
    *survivors, victim = peers = list(_group(peer_group, 3))
    together(peers, delegating.add)
    victim.run(delegating.strike, "delegate_running", signal.SIGSTOP)
    started = [peer.run_async(perform, Call(count=LARGE)) for peer in peers]
    outcomes = [future.result(20) for future in started[:2]]
    assert [outcome.results for outcome in outcomes] == [(2.0,)] * 2
    for peer in survivors:
        eventually(lambda peer=peer: not peer.run(delegating.sessions_left), 2, "Gloo has let go", every_s=0.05)
    faults.resume(victim)
    late = started[2].result(20)
    assert late.error == "PeerEvictedError" and late.untouched
    assert together(survivors, delegating.add) == [2.0] * 2


def test_operations_go_on_without_the_master_with_newcomers_and_after_a_loss_that_it_missed(
    peer_group: PeerStarter, faults: Faults
) -> None:
    settings = Settings.from_env(None, last_call_s=60.0, op_timeout_s=20.0, heartbeat_timeout_s=0.5)
    group = _group(peer_group, 2, settings=settings)
    assert together(group, delegating.add) == [2.0] * 2
    faults.kill_master(restart=False)
    assert [outcome.results for outcome in together(group, perform, Call(count=LARGE))] == [(2.0,)] * 2
    faults.start_master()
    (newcomer,) = group.add()
    eventually(lambda: group[0].call("num_waiting") == 1, 30, "it waits for admission")
    for vote in [peer.call_async("update_topology") for peer in group[:2]]:
        vote.result(20)
    newcomer.result_of(newcomer.joined, 30, "connect()")
    assert together(group, delegating.add) == [3.0] * 3
    assert together(group, delegating.in_any_order, 8) == [[3.0 * tag for tag in range(8)]] * 3

    faults.kill_master(restart=False)
    newcomer.run(delegating.strike, "delegate_running")
    started = [peer.run_async(perform, Call(count=LARGE)) for peer in group][:2]
    for peer in group[:2]:
        eventually(lambda peer=peer: peer.run(delegating.has_failed_for, 2), 20, "Gloo has failed long ago")
    assert not any(future.done() for future in started), "what became of it is the master's to decide"
    faults.start_master()
    assert [future.result(20).results for future in started] == [(2.0,)] * 2


def test_nothing_is_left_of_the_groups_of_two_hundred_epochs(peer_group: PeerStarter) -> None:
    settings = Settings.from_env(None, last_call_s=0.0, op_timeout_s=20.0)
    group = _group(peer_group, 1, settings=settings)
    (keeper,) = group
    (visitor,) = group.add(connect=False)
    threads, descriptors, resident = _visit(keeper, visitor, 20)
    began = keeper.epoch
    more_threads, more_descriptors, more_resident = _visit(keeper, visitor, 100)
    assert keeper.epoch >= began + 200
    assert more_threads <= threads and more_descriptors <= descriptors
    assert more_resident - resident < GROWTH_BYTES, f"{(more_resident - resident) >> 10} KiB more"


def _visit(keeper: PeerProcess, visitor: PeerProcess, times: int) -> tuple[int, int, int]:
    """One peer comes and goes; what the other holds when it is alone again."""
    going = visitor.run_async(delegating.come_and_go, times)
    assert keeper.run(delegating.welcome, times) == [2.0] * times
    going.result(60)
    eventually(lambda: not keeper.run(delegating.sessions_left), 10, "no group is left")
    held: tuple[int, int, int] = keeper.run(delegating.belongings)
    print("threads, descriptors, bytes:", held)
    return held


@pytest.mark.timeout(120)
def test_chaos_with_gloo_leaves_no_wrong_number(tmp_path: Path) -> None:
    report = Campaign(tmp_path, 20_26, transports=[GLOO], faults_a_group=11).run(lambda report: report.groups >= 2)
    print(report)
    assert not report.violations, "\n".join(report.violations[:30])
    assert report.tally.kills >= 12
