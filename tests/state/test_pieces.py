"""States in pieces, and the sharing out of pieces among sources that are slow, fail or die."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from ray_pccl.state.pieces import LEAST_SLOW_S, Pool, bundled, cut, size_of

SIZES = st.lists(st.integers(0, 50), max_size=20)


@given(SIZES, st.integers(1, 20), st.randoms())
def test_pieces_cover_every_byte_once(sizes: list[int], piece_bytes: int, chance: random.Random) -> None:
    loose = [chance.random() < 0.3 for _ in sizes]
    pieces = cut(sizes, loose, piece_bytes)
    for tensor, size in enumerate(sizes):
        mine = [piece for piece in pieces if piece.tensor == tensor]
        assert [piece.start for piece in mine] == list(range(0, size, piece_bytes))
        assert sum(piece.length for piece in mine) == size
        assert all(0 < piece.length <= piece_bytes and piece.loose == loose[tensor] for piece in mine)


@given(SIZES, st.integers(1, 60))
def test_bundles_hold_every_piece_once_and_are_no_larger_than_they_may_be(sizes: list[int], limit: int) -> None:
    pieces = cut(sizes, [number % 3 == 0 for number in range(len(sizes))], 10)
    bundles = bundled(range(len(pieces)), pieces, limit)
    assert [index for bundle in bundles for index in bundle] == list(range(len(pieces)))
    for bundle in bundles:
        assert len(bundle) == 1 or size_of(bundle, pieces) <= limit
        assert len({pieces[index].loose for index in bundle}) == 1


def _pool(count: int, sources: list[str]) -> tuple[Pool, list[tuple[int, ...]]]:
    pieces = cut([10] * count, [False] * count, 10)
    bundles = bundled(range(count), pieces, 10)
    return Pool(bundles, sources, pieces), bundles


def test_each_source_has_a_share_of_its_own() -> None:
    pool, bundles = _pool(6, ["a", "b", "c"])
    assert [pool.take(source, 0.0) for source in "abc"] == [bundles[0], bundles[2], bundles[4]]


def test_who_has_done_its_share_helps_the_others_from_their_end() -> None:
    pool, bundles = _pool(6, ["a", "b"])
    taken = [pool.take("a", 0.0) for _ in range(6)]
    assert taken == [*bundles[:3], bundles[5], bundles[4], bundles[3]]
    assert pool.take("b", 0.0) is None, "everything is under way, and nothing is late"


def test_what_is_overdue_is_asked_for_again_and_counts_once() -> None:
    pool, (first,) = _pool(1, ["a", "b"])
    assert pool.take("a", 0.0) == first
    assert pool.take("b", LEAST_SLOW_S) is None
    assert pool.take("b", LEAST_SLOW_S + 0.01) == first
    assert pool.arrived(first, "b", 1.0) and not pool.arrived(first, "a", 2.0)
    assert not pool.missing


def test_a_lost_sources_share_and_what_it_owed_go_to_the_others() -> None:
    pool, bundles = _pool(4, ["a", "b"])
    owed = pool.take("a", 0.0)
    pool.drop("a")
    taken = {pool.take("b", 0.0) for _ in range(4)}
    assert owed in taken and taken == set(bundles) and pool.take("a", 0.0) is None


def test_a_source_is_asked_only_for_what_it_holds() -> None:
    pieces = cut([10] * 6, [False] * 6, 10)
    bundles = bundled(range(6), pieces, 10)
    pool = Pool(bundles, ["a", "b"], pieces, lambda source, bundle: source == "a" or bundle[0] % 2 == 0)
    taken = [pool.take("b", 0.0) for _ in range(4)]
    assert taken[3] is None and {bundle[0] for bundle in taken[:3]} == {0, 2, 4}
    pool.drop("a")
    assert pool.take("b", 100.0) is None and len(pool.missing) == 6, "nobody is left who holds the others"


@given(st.integers(0, 30), st.integers(1, 5), st.randoms())
def test_everything_arrives_once_whatever_sources_do(count: int, number: int, chance: random.Random) -> None:
    sources = [f"s{each}" for each in range(number)]
    pool, bundles = _pool(count, sources)
    asked: list[tuple[str, tuple[int, ...]]] = []
    arrived: list[tuple[int, ...]] = []
    now = 0.0
    for _ in range(200 + 40 * count):
        now += chance.random()
        source = chance.choice(pool.sources)
        bundle = pool.take(source, now)
        if bundle is not None:
            asked.append((source, bundle))
        if not asked:
            continue
        who, what = asked.pop(chance.randrange(len(asked)))
        deed = chance.random()
        if deed < 0.6 and who in pool.sources:
            if pool.arrived(what, who, now):
                arrived.append(what)
        elif deed < 0.65 and len(pool.sources) > 1 and who in pool.sources:
            pool.drop(who)
        else:
            pool.failed(what, who)
        if not pool.missing:
            break
    assert sorted(arrived) == bundles and not pool.missing
