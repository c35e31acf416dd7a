"""Orders of few peers, held against all orders there are; what is promised of the arguments; what an error explains."""

from __future__ import annotations

import math
import pickle
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ray_pccl import PCCLError
from ray_pccl.errors import SettingsError
from ray_pccl.topology import exact, heuristic
from ray_pccl.topology.ordering import NoRingError, RingOrder, order_ring
from tests.topology.matrices import brute_force, counted, together

Case = tuple[NDArray[np.float64], list[int]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Up to 7 peers on up to 7 hosts, some of whose edges are missing, and many alike."""
    n = draw(st.integers(2, 7))
    hosts = draw(st.lists(st.integers(0, n - 1), min_size=n, max_size=n))
    rates = st.integers(0, 6) if draw(st.booleans()) else st.floats(0.5, 100.0)
    missing = st.sampled_from([False, False, False, draw(st.booleans())])
    rows = [[0.0 if draw(missing) else float(draw(rates)) for _ in range(n)] for _ in range(n)]
    return np.array(rows), hosts


def _checked(case: Case, ring: RingOrder) -> RingOrder:
    """It is a ring, and worth what it says."""
    bandwidth, hosts = case
    assert sorted(ring.order) == list(range(len(hosts)))
    assert ring.order[0] == 0
    assert together(hosts, ring.order)
    rates = counted(bandwidth, hosts, ring.order)
    assert ring.bottleneck == min(rates)
    assert ring.total == pytest.approx(sum(rates))
    return ring


def _explains(error: NoRingError, bandwidth: NDArray[np.float64]) -> None:
    """It names edges, and none of them can connect."""
    assert error.edges
    assert all(bandwidth[edge] == 0 for edge in error.edges)
    i, j = error.edges[0]
    assert f"{i}->{j}" in str(error)


@given(cases())
@settings(max_examples=200, deadline=None)
def test_the_order_of_few_peers_is_the_best_of_all(case: Case) -> None:
    best = brute_force(*case)
    try:
        ring = _checked(case, order_ring(*case))
    except NoRingError as error:
        assert best is None
        _explains(error, case[0])
        return
    assert best is not None
    assert (ring.bottleneck, ring.total) == pytest.approx(best)
    assert ring.optimal


@given(cases())
@settings(max_examples=100, deadline=None)
def test_the_heuristic_never_claims_too_much(case: Case) -> None:
    best = brute_force(*case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "LIMIT", 0)
        try:
            ring = _checked(case, order_ring(*case, budget_s=0.2))
        except NoRingError as error:
            _explains(error, case[0])
            assert best is None or "none was found in the time given" in str(error)
            return
    assert best is not None
    assert ring.bottleneck <= best[0]
    assert not ring.optimal or ring.bottleneck == best[0]


def test_the_heuristic_finds_the_best_of_small_rings_nearly_always() -> None:
    rng, reached = np.random.default_rng(1), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "LIMIT", 0)
        patch.setattr(heuristic, "ROUNDS", 2)  # so that moves end the search, not time
        for _ in range(60):
            case = rng.random((6, 6)), rng.integers(0, 5, 6).tolist()
            best = brute_force(*case)
            assert best is not None
            reached += order_ring(*case, budget_s=60.0).bottleneck == best[0]
    assert reached >= 58


def test_the_slowest_edge_comes_before_the_sum() -> None:
    bandwidth = np.array([[0, 10, 3], [3, 0, 10], [1, 3, 0]], dtype=float)
    ring = order_ring(bandwidth)
    assert ring == RingOrder((0, 2, 1), 3.0, 9.0, True)  # the other way round the sum is 21, but 2 sends 1 to 0


def test_edges_have_a_direction() -> None:
    bandwidth = np.array([[0, 9, 1], [1, 0, 9], [9, 1, 0]], dtype=float)
    assert order_ring(bandwidth).order == (0, 1, 2)
    assert order_ring(bandwidth.T).order == (0, 2, 1)


def test_one_peer_is_a_ring_without_edges() -> None:
    assert order_ring(np.zeros((1, 1))) == RingOrder((0,), math.inf, 0.0, True)


def test_two_peers_are_a_ring_of_two_edges() -> None:
    assert order_ring(np.array([[0.0, 2.0], [5.0, 0.0]])) == RingOrder((0, 1), 2.0, 7.0, True)


def test_the_diagonal_is_ignored() -> None:
    bandwidth = np.random.default_rng(0).random((6, 6))
    expected = order_ring(bandwidth)
    for value in (np.nan, np.inf, -1.0, 0.0):
        np.fill_diagonal(bandwidth, value)
        assert order_ring(bandwidth) == expected


def test_what_is_not_known_counts_as_the_median_of_what_is() -> None:
    bandwidth = np.array([[0, np.nan, 1], [9, 0, 4], [3, 2, 0]], dtype=float)
    filled = np.where(np.isnan(bandwidth), 3.0, bandwidth)
    assert order_ring(bandwidth) == order_ring(filled)
    assert order_ring(np.full((4, 4), np.nan)).bottleneck == 1.0


def test_edges_within_a_host_do_not_count_even_if_they_are_slow_or_missing() -> None:
    bandwidth = np.full((4, 4), 5.0)
    bandwidth[0, 2] = bandwidth[2, 0] = 0.0
    bandwidth[1, 3] = bandwidth[3, 1] = 1.0
    ring = order_ring(bandwidth, [7, 8, 7, 8])
    assert (ring.bottleneck, ring.total) == (5.0, 10.0)


def test_with_all_peers_on_one_host_their_edges_count() -> None:
    bandwidth = np.random.default_rng(2).random((5, 5))
    assert order_ring(bandwidth, [3] * 5) == order_ring(bandwidth)


def test_the_largest_exact_case_takes_less_than_a_second() -> None:
    bandwidth = np.random.default_rng(3).random((18, 18))
    begin = time.monotonic()
    assert order_ring(bandwidth).optimal
    assert time.monotonic() - begin < 2.0  # 0.3 s where nothing else runs


@pytest.mark.parametrize("n", [7, 60])
def test_a_start_is_never_made_worse(n: int) -> None:
    rng = np.random.default_rng(4)
    bandwidth = rng.random((n, n))
    best = order_ring(bandwidth, budget_s=1.0)
    for _ in range(5):
        start = rng.permutation(n).tolist()
        worth = counted(bandwidth, range(n), start)
        ring = order_ring(bandwidth, start=start, budget_s=0.001)
        assert (ring.bottleneck, ring.total) >= (min(worth), math.fsum(worth))
    again = order_ring(bandwidth, start=best.order[3:] + best.order[:3], budget_s=0.001)
    assert (again.bottleneck, again.total) >= (best.bottleneck, best.total)


def test_a_start_that_can_not_be_bettered_is_kept() -> None:
    start = (0, 3, 1, 4, 2, 5)
    assert order_ring(np.ones((6, 6)), start=start).order == start
    assert order_ring(np.ones((30, 30)), start=range(29, -1, -1)).order == (0, *range(29, 0, -1))


def test_a_start_that_parts_a_host_is_no_more_than_a_hint() -> None:
    bandwidth = np.ones((6, 6))
    ring = order_ring(bandwidth, [0, 0, 1, 1, 2, 2], start=[0, 2, 4, 1, 3, 5])
    assert together([0, 0, 1, 1, 2, 2], ring.order)


@pytest.mark.parametrize("hosts", [None, [i // 2 for i in range(80)]])
def test_the_same_seed_gives_the_same_order(hosts: list[int] | None) -> None:
    bandwidth = np.random.default_rng(5).random((80, 80))
    first, second = (order_ring(bandwidth, hosts, seed=9, budget_s=20.0) for _ in range(2))
    assert first == second


def test_a_peer_that_can_send_to_nobody_is_named() -> None:
    bandwidth = np.ones((5, 5))
    bandwidth[3] = 0.0
    with pytest.raises(NoRingError, match="peer 3 can send to nobody") as caught:
        order_ring(bandwidth)
    assert set(caught.value.edges) == {(3, j) for j in (0, 1, 2, 4)}


def test_a_host_that_nobody_can_send_to_is_named() -> None:
    bandwidth = np.ones((4, 4))
    bandwidth[:2, 2:] = 0.0
    with pytest.raises(NoRingError, match="nobody can send to the host of peers 2, 3") as caught:
        order_ring(bandwidth, [0, 1, 2, 2])
    assert set(caught.value.edges) == {(0, 2), (0, 3), (1, 2), (1, 3)}


def test_a_cut_is_named_by_the_edges_across_it() -> None:
    bandwidth = np.ones((6, 6))
    bandwidth[:2, 2:] = 0.0
    with pytest.raises(NoRingError, match="nothing leads from 2 of the hosts to the other 4") as caught:
        order_ring(bandwidth)
    assert set(caught.value.edges) == {(i, j) for i in range(2) for j in range(2, 6)}


def test_peers_that_compete_for_too_few_receivers_are_named() -> None:
    bandwidth = np.zeros((5, 5))
    bandwidth[:2, 2:] = bandwidth[2:, :2] = 1.0
    with pytest.raises(NoRingError, match="3 hosts can send to only 2 in all") as caught:
        order_ring(bandwidth)
    assert set(caught.value.edges) == {(i, j) for i in (2, 3, 4) for j in (2, 3, 4) if i != j}


@pytest.mark.parametrize("n", [9, 41])
def test_a_peer_that_all_ways_lead_through_is_named(n: int) -> None:
    middle = n // 2
    bandwidth = np.zeros((n, n))
    bandwidth[: middle + 1, : middle + 1] = bandwidth[middle:, middle:] = 1.0
    with pytest.raises(NoRingError, match=f"nor be reached by them, but through peer {middle}") as caught:
        order_ring(bandwidth, budget_s=0.3)
    _explains(caught.value, bandwidth)


def test_a_peer_that_all_ways_lead_through_in_one_direction_is_no_obstacle() -> None:
    bandwidth = np.zeros((4, 4))
    for edge in ((0, 1), (1, 2), (2, 3), (3, 0), (1, 3), (2, 1)):
        bandwidth[edge] = 1.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "LIMIT", 0)
        assert order_ring(bandwidth).order == (0, 1, 2, 3)


def test_the_error_is_one_of_ours_and_survives_pickling() -> None:
    with pytest.raises(NoRingError) as caught:
        order_ring(np.zeros((3, 3)))
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, PCCLError)
    assert isinstance(again, ValueError)
    assert again.edges == caught.value.edges


@pytest.mark.parametrize(
    ("bandwidth", "options"),
    [
        (np.ones((2, 3)), {}),
        (np.ones(4), {}),
        (np.zeros((0, 0)), {}),
        (-np.ones((3, 3)), {}),
        (np.full((3, 3), np.inf), {}),
        (np.ones((3, 3)), {"hosts": [0, 1]}),
        (np.ones((3, 3)), {"start": [0, 1, 1]}),
        (np.ones((3, 3)), {"start": [0, 1]}),
        (np.ones((3, 3)), {"budget_s": 0.0}),
        (np.ones((3, 3)), {"budget_s": math.nan}),
    ],
)
def test_arguments_that_make_no_sense_are_refused(bandwidth: NDArray[np.float64], options: dict[str, object]) -> None:
    with pytest.raises(SettingsError):
        order_ring(bandwidth, **options)  # type: ignore[arg-type]
