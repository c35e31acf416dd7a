"""Rings of many peers: a planted one is found, in time; nothing makes the search outstay its budget."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from ray_pccl.topology.heuristic import greedy_order
from ray_pccl.topology.ordering import NoRingError, RingOrder, order_ring
from tests.topology.matrices import Matrix, counted, regions, sparse, together, uniform

Make = Callable[[int, np.random.Generator], Matrix]
KINDS = [
    pytest.param(uniform, id="all others slower"),
    pytest.param(sparse(0.3), id="few others as fast"),
    pytest.param(sparse(1.0), id="one other as fast"),
    pytest.param(sparse(2.0), id="two others as fast"),
    pytest.param(sparse(6.0), id="six others as fast"),
    pytest.param(regions, id="regions"),
]


def _timed(bandwidth: Matrix, hosts: list[int] | None = None, *, budget_s: float) -> RingOrder:
    """Within the budget, with a fifth more, and what a machine with other work needs."""
    begin = time.monotonic()
    ring = order_ring(bandwidth, hosts, budget_s=budget_s)
    assert time.monotonic() - begin < 1.2 * budget_s + 0.5
    assert sorted(ring.order) == list(range(len(bandwidth)))
    rates = counted(bandwidth, hosts or range(len(bandwidth)), ring.order)
    assert ring.bottleneck == min(rates)
    return ring


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_a_planted_ring_of_100_peers_is_reached_within_a_second(make: Make, seed: int) -> None:
    ring = _timed(make(100, np.random.default_rng(seed)), budget_s=1.0)
    assert ring.bottleneck >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize("make", KINDS)
def test_a_planted_ring_of_1000_peers_is_reached_within_ten_seconds(make: Make) -> None:
    ring = _timed(make(1000, np.random.default_rng(7)), budget_s=10.0)
    assert ring.bottleneck >= 0.95


@pytest.mark.parametrize("peers_a_host", [2, 4, 8])
def test_a_planted_ring_of_hosts_is_reached(peers_a_host: int) -> None:
    rng = np.random.default_rng(8)
    n, hosts = 96, [peer // peers_a_host for peer in range(96)]
    bandwidth = rng.uniform(0.0, 1.0, (n, n))
    ring = rng.permutation(n // peers_a_host) * peers_a_host
    entries, exits = rng.integers(peers_a_host // 2, size=(2, len(ring)))
    bandwidth[ring + exits, np.roll(ring, -1) + peers_a_host // 2 + entries] = 1.0
    found = _timed(bandwidth, hosts, budget_s=1.0)
    assert found.bottleneck >= 0.95
    assert together(hosts, found.order)


@pytest.mark.parametrize("seed", range(3))
def test_a_ring_of_hosts_with_few_fast_edges_is_reached(seed: int) -> None:
    """Each peer has about three fast edges besides those of the planted ring, so that ports matter."""
    rng = np.random.default_rng(seed)
    hosts = [peer // 4 for peer in range(100)]
    bandwidth = np.where(rng.random((100, 100)) < 0.03, 1.5, rng.uniform(0.0, 0.5, (100, 100)))
    ring = rng.permutation(25) * 4
    entries, exits = rng.integers(2, size=(2, 25))
    bandwidth[ring + exits, np.roll(ring, -1) + 2 + entries] = 1.0
    found = _timed(bandwidth, hosts, budget_s=2.0)
    assert found.bottleneck >= 0.95
    assert together(hosts, found.order)


def test_the_sum_is_made_larger_where_the_slowest_edge_allows_it() -> None:
    bandwidth = np.random.default_rng(9).uniform(1.0, 2.0, (100, 100))
    bandwidth[0], bandwidth[0, 1] = 0.4, 0.5  # whatever the rest, no ring is faster than this
    ring = order_ring(bandwidth)
    assert (ring.bottleneck, ring.optimal) == (0.5, True)
    plain = greedy_order(bandwidth)
    assert ring.total > sum(counted(bandwidth, range(100), plain)) + 0.5


def _two_cliques(n: int) -> Matrix:
    """One edge there, one back."""
    bandwidth = np.zeros((n, n))
    bandwidth[: n // 2, : n // 2] = bandwidth[n // 2 :, n // 2 :] = 1.0
    bandwidth[1, n - 1] = bandwidth[n - 2, 3] = 0.5
    return bandwidth


def _through_one(n: int) -> Matrix:
    """There is no ring, which no simple reason shows."""
    bandwidth = np.zeros((n, n))
    bandwidth[: n // 2, : n // 2] = bandwidth[n // 2 - 1 :, n // 2 - 1 :] = 1.0
    return bandwidth


def _ladder(n: int) -> Matrix:
    """Every edge has another rate, and good ones lead into dead ends."""
    i, j = np.indices((n, n))
    return np.where((j - i) % n < n // 3, 1.0 + (i * n + j) / n**2, 1e-9)


@pytest.mark.parametrize("make", [_two_cliques, _through_one, _ladder, lambda n: np.ones((n, n))])
@pytest.mark.parametrize(("n", "budget_s"), [(100, 0.3), pytest.param(1000, 1.0, marks=pytest.mark.slow)])
def test_no_matrix_makes_it_outstay_its_budget(make: Callable[[int], Matrix], n: int, budget_s: float) -> None:
    begin = time.monotonic()
    try:
        order_ring(make(n), budget_s=budget_s)
    except NoRingError as error:
        assert error.edges
    assert time.monotonic() - begin < 1.2 * budget_s + 0.5
