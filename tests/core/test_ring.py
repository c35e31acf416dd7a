from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from master_actor.core.ring import broken_edges, order_avoiding


def _edges(*pairs: str) -> set[frozenset[str]]:
    return {frozenset(pair) for pair in pairs}


def test_a_ring_without_broken_edges_stays_as_it_is() -> None:
    assert order_avoiding("abcd", _edges("ac")) == ["a", "b", "c", "d"]


def test_broken_edges_are_counted_around_the_ring() -> None:
    assert broken_edges("abcd", _edges("ab", "da", "ac")) == 2


def test_the_edge_that_closes_the_ring_is_avoided_too() -> None:
    order = order_avoiding("abcd", _edges("ad"))
    assert order is not None and broken_edges(order, _edges("ad")) == 0


def test_three_peers_have_only_one_ring() -> None:
    assert order_avoiding("abc", _edges("ab")) is None


def test_two_peers_have_no_way_around_their_edge() -> None:
    assert order_avoiding("ab", _edges("ab")) is None


def test_one_peer_needs_no_edge() -> None:
    assert order_avoiding("a", _edges("ab")) == ["a"]


def test_a_peer_with_a_single_working_edge_fits_into_no_ring() -> None:
    assert order_avoiding("abcd", _edges("ab", "ac")) is None


@given(st.integers(4, 7), st.data())
def test_one_or_two_broken_edges_are_avoided_wherever_a_ring_exists(size: int, data: st.DataObject) -> None:
    peers = "abcdefg"[:size]
    pairs = [a + b for a in peers for b in peers if a < b]
    avoid = _edges(*data.draw(st.lists(st.sampled_from(pairs), min_size=1, max_size=2, unique=True)))
    exists = any(broken_edges(order, avoid) == 0 for order in permutations(peers))
    found = order_avoiding(peers, avoid)
    assert (found is not None) == exists
    if found is not None:
        assert sorted(found) == list(peers) and broken_edges(found, avoid) == 0


@given(st.integers(2, 7), st.data())
def test_whatever_is_found_is_a_ring_of_the_same_peers_without_broken_edges(size: int, data: st.DataObject) -> None:
    peers = "abcdefg"[:size]
    pairs = [a + b for a in peers for b in peers if a < b]
    avoid = _edges(*data.draw(st.lists(st.sampled_from(pairs), max_size=10)))
    found = order_avoiding(peers, avoid)
    assert found is None or (sorted(found) == list(peers) and broken_edges(found, avoid) == 0)
