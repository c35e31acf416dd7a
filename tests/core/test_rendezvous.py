from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from master_actor.core.rendezvous import WaitingRoom, by_requested_rank
from tests.core.driven import joining


def _order(*ranks: int | None) -> list[int | None]:
    """The requested ranks in the order of the epoch."""
    joins = [joining(f"p{place}", rank=rank) for place, rank in enumerate(ranks)]
    return [join.rank for join in by_requested_rank(joins)]


def _room(*peers: str) -> WaitingRoom:
    room = WaitingRoom("g")
    for now, peer_id in enumerate(peers):
        room.admit(joining(peer_id), now)
    return room


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ([], []),
        ([None, None], [None, None]),
        ([2, 1, 0], [0, 1, 2]),
        ([None, 0], [0, None]),
        ([None, 1, None], [None, 1, None]),
        ([2, None, None], [None, None, 2]),
        ([7, None, None], [None, None, 7]),
        ([9, 7, 0], [0, 7, 9]),
        ([1, 1, None], [None, 1, 1]),
    ],
)
def test_requested_ranks_are_honoured_and_the_others_fill_the_gaps(asked: list, given: list) -> None:
    assert _order(*asked) == given


def test_those_without_a_wish_stay_in_the_order_they_came() -> None:
    joins = [joining("a"), joining("b", rank=1), joining("c"), joining("d")]
    assert [join.peer_id for join in by_requested_rank(joins)] == ["a", "b", "c", "d"]


@given(st.lists(st.none() | st.integers(0, 9), max_size=8))
def test_nobody_is_lost_and_the_first_who_asked_for_a_rank_has_it(ranks: list[int | None]) -> None:
    joins = [joining(f"p{place}", rank=rank) for place, rank in enumerate(ranks)]
    order = by_requested_rank(joins)
    assert sorted(join.peer_id for join in order) == sorted(join.peer_id for join in joins)
    for rank in {rank for rank in ranks if rank is not None and rank < len(ranks)}:
        assert order[rank].peer_id == f"p{ranks.index(rank)}"


def test_the_room_lets_peers_out_in_the_order_they_came() -> None:
    room = _room("a", "b", "c")
    assert [join.peer_id for join in room.take(2)] == ["a", "b"]
    assert [join.peer_id for join in room.take(None)] == ["c"]
    assert len(room) == 0


def test_nobody_is_let_out_where_there_is_no_room() -> None:
    room = _room("a")
    assert room.take(0) == [] and "a" in room


def test_a_peer_that_comes_again_keeps_its_place() -> None:
    room = _room("a", "b")
    room.admit(joining("a", timeout_s=3.0), 5.0)
    assert [join.peer_id for join in room.take(None)] == ["a", "b"]


def test_the_first_is_who_has_waited_longest() -> None:
    room = _room("a", "b")
    room.remove("a")
    assert room.first.join.peer_id == "b"


def test_each_waiter_has_a_deadline_of_its_own() -> None:
    room = WaitingRoom("g")
    room.admit(joining("a", timeout_s=10.0), 0.0)
    room.admit(joining("b", timeout_s=2.0), 1.0)
    assert [join.peer_id for join in room.expired(2.9)] == []
    assert [join.peer_id for join in room.expired(3.0)] == ["b"]
    assert [join.peer_id for join in room.expired(10.0)] == ["a", "b"]


@pytest.mark.parametrize("other", [{"min_world_size": 3}, {"max_world_size": 4}])
def test_another_minimum_or_maximum_is_refused_with_both(other: dict[str, int]) -> None:
    room = _room("a")
    failure = room.refusal(joining("b", **other), None, forming=True)
    assert failure is not None and failure.error == "GroupMismatchError"
    assert all(str(size) in failure.text for size in (2, None, *other.values())) and "peer b" in failure.text


def test_the_live_groups_limits_count_more_than_those_of_who_waits() -> None:
    failure = _room("a").refusal(joining("b"), (3, 8), forming=False)
    assert failure is not None and failure.error == "GroupMismatchError"
    assert _room("a").refusal(joining("b", min_world_size=3, max_world_size=8), (3, 8), forming=False) is None


def test_a_rank_can_be_asked_for_once() -> None:
    room = WaitingRoom("g")
    room.admit(joining("a", rank=1), 0.0)
    failure = room.refusal(joining("b", rank=1), None, forming=True)
    assert failure is not None
    assert (failure.error, failure.details) == ("RankTakenError", {"rank": 1, "holder": "a"})
    assert room.refusal(joining("b", rank=0), None, forming=True) is None
    assert room.refusal(joining("a", rank=1), None, forming=True) is None  # the same peer again


def test_ranks_mean_nothing_to_a_group_that_has_formed() -> None:
    room = WaitingRoom("g")
    room.admit(joining("a", rank=1), 0.0)
    assert room.refusal(joining("b", rank=1), (2, None), forming=False) is None


def test_a_timeout_says_who_waited_for_what_and_what_to_check() -> None:
    room = _room("a", "b")
    alone = room.timeout(joining("a", min_world_size=5), 0)
    assert alone.error == "RendezvousTimeoutError"
    assert all(part in alone.text for part in ("peer a", "10 s", "'g'", "5 peers", "2 waiting"))
    late = room.timeout(joining("a"), 3)
    assert "3 members" in late.text and "update_topology()" in late.text
