"""Operations in flight together pair by tag, in whatever order they were launched."""

from __future__ import annotations

import itertools

import pytest

from ray_pccl import UsageError
from ray_pccl.testing import PeerGroup
from tests.collectives import concurrency
from tests.collectives.conftest import over, together

KIB = 1 << 10
_gates = itertools.count()


def _none(found: list[list[str]]) -> None:
    assert not any(found), found


@pytest.mark.parametrize("count", [100, 20 * KIB, 100 * KIB])
@over(2, 3)
def test_64_in_flight_in_another_order_on_each_peer_all_commit(group: PeerGroup, count: int) -> None:
    _none(together(group, concurrency.in_flight, 64, ("all_reduce",), count))


@over(3)
def test_64_of_all_kinds_in_flight_all_commit(group: PeerGroup) -> None:
    _none(together(group, concurrency.in_flight, 64, concurrency.KINDS, 70 * KIB))


@over(2, 3, 4)
def test_a_storm_of_operations_of_all_kinds_and_sizes_comes_out_right(group: PeerGroup) -> None:
    for seed in range(3):
        _none(together(group, concurrency.storm, seed, 6))


@over(2, 3)
def test_more_tags_than_a_board_has_entries_may_be_used_over_time(group: PeerGroup) -> None:
    _none(together(group, concurrency.many_tags, 0, 500))


@over(3)
def test_tags_that_come_again_after_many_others_are_not_mixed_up(group: PeerGroup) -> None:
    _none(together(group, concurrency.same_tags_again))


@pytest.mark.parametrize("count", [4, 100 * KIB])
@over(2, 3)
def test_an_operation_may_stay_open_while_hundreds_of_others_finish(group: PeerGroup, count: int) -> None:
    _none(together(group, concurrency.one_stays_open, count))


@over(2)
def test_as_many_operations_as_a_board_has_entries_are_in_flight_together_and_one_more_is_refused(
    group: PeerGroup,
) -> None:
    _none(together(group, concurrency.in_flight, 128, ("all_reduce",), 10))
    with pytest.raises(UsageError, match="128 operations are in flight already"):
        group[0].run(concurrency.too_many, 129)
    _none(together(group, concurrency.in_flight, 128, ("barrier",), 10))


# ------------------------------------------------------------------------------------------------------------ handles


@over(2)
def test_a_handle_tells_how_its_operation_ended(group: PeerGroup) -> None:
    _none(together(group, concurrency.handle_that_succeeds))
    _none(together(group, concurrency.handles_that_fail))
    _none(together(group, concurrency.handle_that_succeeds))


@pytest.mark.parametrize("count", [4, 100 * KIB])
@over(2, 3)
def test_a_wait_that_ran_out_leaves_the_operation_to_commit(group: PeerGroup, count: int) -> None:
    _none(together(group, concurrency.wait_that_runs_out, count, f"gate {next(_gates)}"))


@pytest.mark.parametrize("count", [4, 100 * KIB])
@over(2, 3)
def test_a_dropped_handle_leaves_the_operation_to_commit(group: PeerGroup, count: int) -> None:
    _none(together(group, concurrency.handle_that_is_dropped, count, f"gate {next(_gates)}"))
