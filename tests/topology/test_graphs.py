"""Rings of graphs: forced edges, covers and walks, held against all orders there are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from ray_pccl.topology.chains import Contradiction, forced_chains, search
from ray_pccl.topology.covers import cover, cycles_of, rows_of, strongly_connected
from ray_pccl.topology.improving import or_opt
from ray_pccl.topology.walking import Walk, find_ring
from tests.topology.matrices import edges_of, together

Graph = NDArray[np.bool_]


def _never() -> bool:
    return False


def _graphs(number: int, largest: int = 7) -> list[Graph]:
    rng, graphs = np.random.default_rng(number), []
    for _ in range(number):
        n = int(rng.integers(2, largest + 1))
        graphs.append(rng.random((n, n)) < rng.uniform(0.2, 0.7))
        np.fill_diagonal(graphs[-1], False)
    return graphs


def _rings(graph: Graph) -> list[tuple[int, ...]]:
    orders = [(0, *rest) for rest in itertools.permutations(range(1, len(graph)))]
    return [order for order in orders if all(graph[edge] for edge in edges_of(order))]


def _sparse(n: int, others: float, seed: int) -> Graph:
    """A ring, and some edges more."""
    rng = np.random.default_rng(seed)
    graph = rng.random((n, n)) < others / n
    np.fill_diagonal(graph, False)
    ring = rng.permutation(n)
    graph[ring, np.roll(ring, -1)] = True
    return graph


def test_forced_chains_are_in_every_ring() -> None:
    for graph in _graphs(400):
        rings = _rings(graph)
        try:
            chains = forced_chains(graph)
        except Contradiction:
            assert not rings
            continue
        assert sorted(itertools.chain(*chains)) == list(range(len(graph)))
        forced = {edge for chain in chains for edge in itertools.pairwise(chain)}
        assert all(forced <= set(edges_of(ring)) for ring in rings)
        assert len(chains) > 1 or rings


def test_a_search_finds_a_ring_or_proves_that_there_is_none() -> None:
    rng = np.random.default_rng(0)
    for graph in _graphs(400):
        try:
            ring = search(graph, 10**6, _never, rng)
        except Contradiction:
            assert not _rings(graph)
        else:
            assert ring is not None
            assert sorted(ring) == list(range(len(graph)))
            assert all(graph[edge] for edge in edges_of(ring))


def test_a_search_with_hosts_enters_each_once() -> None:
    rng, found = np.random.default_rng(1), 0
    for graph in _graphs(300, largest=6):
        hosts = rng.integers(0, 3, len(graph))
        usable = graph | (hosts[:, None] == hosts[None, :])
        np.fill_diagonal(usable, False)
        rings = [ring for ring in _rings(usable) if together(hosts.tolist(), ring)]
        if len(set(hosts.tolist())) == 1:
            continue
        try:
            ring = search(usable, 10**6, _never, rng, hosts)
        except Contradiction:
            assert not rings
        else:
            assert ring is not None
            assert all(usable[edge] for edge in edges_of(ring))
            assert together(hosts.tolist(), ring)
            found += 1
    assert found > 50


def test_a_search_ends_at_its_limit_and_when_time_is_up() -> None:
    graph = np.ones((40, 40), dtype=bool)
    np.fill_diagonal(graph, False)
    assert search(graph, 3, _never, np.random.default_rng(0)) is None
    assert search(graph, 10**6, lambda: True, np.random.default_rng(0)) is None


def test_a_cover_gives_each_node_another_to_follow_it_or_proves_that_none_can() -> None:
    for graph in _graphs(400):
        found = cover(rows_of(graph))
        if found.complete:
            assert sorted(found.following) == list(range(len(graph)))
            assert all(graph[edge] for edge in enumerate(found.following))
            assert sorted(itertools.chain(*cycles_of(found.following))) == list(range(len(graph)))
        else:
            stuck = [node for node in range(len(graph)) if found.stuck >> node & 1]
            assert graph[stuck].any(axis=0).sum() < len(stuck)
            assert not _rings(graph)


def test_what_has_a_ring_is_strongly_connected() -> None:
    connected = [strongly_connected(rows_of(graph), rows_of(graph.T)) for graph in _graphs(200)]
    for graph, is_connected in zip(_graphs(200), connected, strict=True):
        power = np.linalg.matrix_power(np.eye(len(graph)) + graph, len(graph))
        assert is_connected == bool((power > 0).all())


def test_a_walk_counts_its_gaps_and_finds_rings() -> None:
    rng, found, there = np.random.default_rng(2), 0, 0
    for graph in _graphs(300):
        rings = _rings(graph)
        try:
            order, gaps = find_ring(graph, rng, 300, _never)
        except Contradiction:
            assert not rings
            continue
        assert sorted(order) == list(range(len(graph)))
        assert gaps == sum(not graph[edge] for edge in edges_of(order))
        found, there = found + (not gaps), there + bool(rings)
    assert found == there > 50


def test_a_walk_that_gets_nowhere_still_knows_its_gaps() -> None:
    rng, left = np.random.default_rng(3), 0
    for seed in range(40):
        graph = _sparse(30, 1.5, seed)
        walk = Walk(graph, rng.permutation(30), rng)
        for _ in range(20):
            walk.run(10, _never)
            order = walk.best.tolist()
            assert sorted(order) == list(range(30))
            assert walk.fewest == sum(not graph[edge] for edge in edges_of(order))
        left += walk.fewest > 0
    assert left > 5


def test_a_small_graph_without_a_ring_is_proven_to_have_none() -> None:
    graph = np.zeros((9, 9), dtype=bool)
    graph[:5, :5] = graph[4:, 4:] = True  # two parts that share one node
    np.fill_diagonal(graph, False)
    assert len(forced_chains(graph)) == 9
    with pytest.raises(Contradiction):
        find_ring(graph, np.random.default_rng(0), 10_000, _never)


@pytest.mark.parametrize(("n", "others"), [(100, 2.0), (300, 1.5), (300, 4.0), (1000, 3.0)])
def test_rings_of_sparse_graphs_are_found(n: int, others: float) -> None:
    for seed in range(4):
        graph = _sparse(n, others, seed)
        order, gaps = find_ring(graph, np.random.default_rng(0), 10_000, _never)
        assert gaps == 0
        assert all(graph[edge] for edge in edges_of(order))


@pytest.mark.parametrize("n", [2, 3, 4, 5, 40])
def test_moving_stretches_makes_the_sum_larger_and_uses_no_forbidden_edge(n: int) -> None:
    rng = np.random.default_rng(n)
    worth = rng.random((n, n))
    order = rng.permutation(n).tolist()
    forbidden = rng.random((n, n)) < 0.3
    for edge in edges_of(order):
        forbidden[edge] = False
    improved = or_opt(np.where(forbidden, -np.inf, worth), order, _never)
    assert sorted(improved) == list(range(n))
    assert not any(forbidden[edge] for edge in edges_of(improved))
    before, after = (sum(float(worth[edge]) for edge in edges_of(each)) for each in (order, improved))
    assert after >= before - 1e-9
    assert n < 40 or after > 0.8 * n
