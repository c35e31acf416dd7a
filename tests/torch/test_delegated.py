"""Groups whose data Gloo moves: right numbers, the same bits, and errors that name both sides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_pccl import DataType, QuantizationAlgorithm, QuantizationOptions, ReduceOp, Settings
from ray_pccl.testing import MasterProcess, PeerGroup, PeerProcess, PeerStarter, eventually
from tests.collectives import programs
from tests.collectives.calls import Call, perform
from tests.collectives.conftest import check, together
from tests.torch import delegating

pytestmark = pytest.mark.slow  # each peer takes seconds to import torch

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
PATIENT = Settings.from_env(None, last_call_s=0.0, op_timeout_s=20.0)


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PeerStarter]:
    calm = Settings.from_env(None, heartbeat_timeout_s=10, stall_timeout_s=30)
    master = MasterProcess(Path(tmp_path_factory.mktemp("master")), calm)
    try:
        master.start()
        starter = PeerStarter(master.endpoint, master.ownership)
        yield starter
        starter.end()
    finally:
        master.close()


@pytest.fixture(scope="module")
def group(starter: PeerStarter) -> PeerGroup:
    """Three peers, by rank, that every test leaves in working order."""
    group = starter(3, environment=ONE_THREAD, peer_group="gloo", backend="gloo", settings=PATIENT)
    group._peers.sort(key=lambda peer: peer.rank)
    return group


@pytest.mark.parametrize("kind", programs.KINDS)
def test_small_tensors_of_every_type_come_out_right(group: PeerGroup, kind: str) -> None:
    dtypes = ("float32", "int64", "uint64", "int16", "bool")
    check(together(group, programs.small, kind, ("numpy",), dtypes))
    assert all(peer.run(delegating.has_session) for peer in group), "Gloo has done it"


@pytest.mark.parametrize("kind", programs.KINDS)
def test_large_and_half_precision_tensors_come_out_right(group: PeerGroup, kind: str) -> None:
    check(together(group, programs.large, kind, ("numpy",), ("float32",)))
    check(together(group, programs.small, kind, ("torch",), ("float16", "bfloat16")))


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PROD])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_results_have_the_same_bits_on_all_peers(group: PeerGroup, dtype: str, op: ReduceOp) -> None:
    for count in (1, 3, 1001, 300_007):
        assert len(set(together(group, delegating.bits_of_sums, count, dtype, op))) == 1


def test_an_average_is_divided_by_the_contributors(group: PeerGroup) -> None:
    assert together(group, delegating.average) == [[2.0]] * 3


def test_the_largest_of_a_nan_and_a_number_is_a_nan_as_everywhere(group: PeerGroup) -> None:
    assert together(group, delegating.largest) == [[True] * 3] * 3


def test_operations_pair_by_tag_in_any_order_of_launch(group: PeerGroup) -> None:
    assert together(group, delegating.in_any_order, 40) == [[3.0 * tag for tag in range(40)]] * 3


def test_nobody_leaves_a_barrier_before_all_have_come(group: PeerGroup) -> None:
    for times in zip(*together(group, programs.barriers, 6), strict=True):
        assert max(entered for entered, _ in times) <= min(left for _, left in times)


def _apart(group: PeerGroup, calls: list[Call]) -> list[Any]:
    started = [peer.run_async(perform, call) for peer, call in zip(group, calls, strict=True)]
    return [future.result(30) for future in started]


@pytest.mark.parametrize("other", [Call(count=17), Call(dtype="int32"), Call(op=ReduceOp.MAX), Call(kind="barrier")])
def test_members_that_call_different_things_are_all_told_so_and_go_on(group: PeerGroup, other: Call) -> None:
    outcomes = _apart(group, [Call(), Call(), other])
    assert {outcome.error for outcome in outcomes} == {"CollectiveMismatchError"}, outcomes
    assert all(outcome.untouched for outcome in outcomes)
    assert together(group, delegating.add) == [3.0] * 3


def test_quantisation_is_refused_on_all(group: PeerGroup) -> None:
    options = QuantizationOptions(DataType.UINT8, QuantizationAlgorithm.MIN_MAX)
    for error, text in together(group, _quantised, options):
        assert error == "UsageError" and "'gloo' does not quantise" in text
    started = [peer.run_async(_quantised, options if peer.rank == 1 else None) for peer in group]
    for future in started:
        error, text = future.result(30)
        assert error in ("UsageError", "CollectiveMismatchError"), text
    assert together(group, delegating.add) == [3.0] * 3


def _quantised(comm: Any, options: QuantizationOptions | None) -> tuple[str, str]:
    return delegating.what_it_raises(comm, "all_reduce", 100, quantization_options=options)


def test_who_never_comes_is_named_and_the_group_goes_on(group: PeerGroup) -> None:
    first, second, third = group
    started = [peer.run_async(perform, Call(timeout=0.3)) for peer in (first, second)]
    for future in started:
        outcome = future.result(20)
        assert outcome.error == "OperationTimeoutError" and third.peer_id in outcome.text
    assert third.run(perform, Call(timeout=5)).error == "OperationTimeoutError", "its number was consumed"
    assert together(group, delegating.add) == [3.0] * 3


def test_one_that_is_interrupted_after_its_grant_tells_all_and_gloo_keeps_its_order(group: PeerGroup) -> None:
    together(group, delegating.add)
    before = together(group, delegating.name_of_session)
    interrupted = group[1].run_async(delegating.interrupted_after_the_grant, 1000)
    others = [peer.run_async(perform, Call(count=1000, in_place=True)) for peer in (group[0], group[2])]
    assert interrupted.result(30) == "['KeyboardInterrupt']"
    for outcome in [future.result(30) for future in others]:
        assert outcome.error == "PCCLError" and "was interrupted" in outcome.text and outcome.untouched
    assert together(group, delegating.add) == [3.0] * 3
    assert together(group, delegating.name_of_session) == before, "it was done, for nobody, and the group goes on"


def test_a_failure_of_gloo_is_raised_on_all_and_the_next_operation_gets_a_new_group(group: PeerGroup) -> None:
    epoch = group[0].epoch
    together(group, delegating.add)
    group[1].run(delegating.cut_gloo)
    outcomes = _apart(group, [Call(count=100_000, in_place=True)] * 3)
    assert {outcome.error for outcome in outcomes} == {"DelegatedBackendError"}, outcomes
    assert all(outcome.untouched and outcome.details["backend"] == "gloo" for outcome in outcomes)
    assert together(group, delegating.add) == [3.0] * 3
    assert group[0].epoch == epoch, "nobody died"
    group[2].run(delegating.cut_gloo)
    first, *others = together(group, delegating.errors_of_many, 12)
    assert "DelegatedBackendError" in first, "those that wait for their turn are not forgotten"
    assert others == [first, first], "each failed on all, or on none"
    assert together(group, delegating.in_any_order, 12) == [[3.0 * tag for tag in range(12)]] * 3
    for peer in group:
        eventually(lambda peer=peer: not peer.run(delegating.sessions_left), 10, "the old group is gone")


def test_members_of_two_backends_are_told_both(starter: PeerStarter) -> None:
    ours = starter(1, peer_group="mixed", min_world_size=2, settings=PATIENT, connect=False, environment=ONE_THREAD)
    theirs = starter(
        1, peer_group="mixed", min_world_size=2, settings=PATIENT, backend="gloo", connect=False, environment=ONE_THREAD
    )
    both: list[PeerProcess] = [*ours, *theirs]
    for peer in both:
        peer.connect()
    for peer in both:
        peer.result_of(peer.joined, 30, "connect()")
    for count in (10, 500_000):
        for error, text in together(both, delegating.what_it_raises, "all_reduce", count):
            assert error == "CollectiveMismatchError"
            assert "backend='ring'" in text and "backend='gloo'" in text
            assert all(peer.peer_id in text for peer in both)
