"""Whose content counts, by the rules that `election.py` states: examples, and what holds for any table."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_pccl import (
    NoUpToDatePeerError,
    OperationTimeoutError,
    PCCLError,
    RevisionError,
    SharedStateMismatchError,
    SharedStateSyncStrategy,
)
from ray_pccl.state.election import Election, ahead_error, elect, judge
from ray_pccl.state.rows import NOWHERE, ROW_BYTES, Row

POPULAR, RECEIVE, SEND = SharedStateSyncStrategy
CONTENTS = [bytes([number]) * 16 for number in range(1, 4)]


def row(content: int = 0, revision: int = 1, known: int | None = 0, **more) -> Row:
    given = {"nonce": b"12345678", "form": NOWHERE, "since": 0} | more
    return Row(content=CONTENTS[content], revision=revision, known=known, **given)


def table(*rows: Row) -> dict[str, Row]:
    return {f"p{rank}": each for rank, each in enumerate(rows)}


def test_a_row_survives_its_journey() -> None:
    sent = row(2, revision=1 << 61, known=None, strategy=SEND, has_loose=True).at(b"s" * 16, missing=1 << 50, spoilt=7)
    assert Row.unpack(sent.pack()) == sent and len(sent.pack()) == ROW_BYTES
    assert Row.unpack(replace(sent, known=12, overdue=True).pack()) == replace(sent, known=12, overdue=True)


def test_most_votes_win() -> None:
    election = elect(table(row(1), row(0), row(0)))
    assert (election.sources, election.receivers, election.revision) == (("p1", "p2"), ("p0",), 1)


def test_a_tie_goes_to_the_longest_standing_and_then_to_the_lowest_rank() -> None:
    assert elect(table(row(1, since=5), row(0, since=2))).sources == ("p1",)
    assert elect(table(row(1), row(0))).sources == ("p0",)
    late = elect(table(row(0, since=9), row(1, since=9), row(0, since=9), row(1, since=3)))
    assert late.sources == ("p3", "p1")


def test_newcomers_do_not_vote_though_they_are_many_and_offer_what_is_due() -> None:
    election = elect(table(*[row(1, known=None)] * 3, row(0)))
    assert election.sources == ("p3",) and election.receivers == ("p0", "p1", "p2")


def test_who_missed_the_last_sync_is_a_newcomer() -> None:
    assert elect(
        table(row(1, revision=8, known=5), row(1, revision=8, known=5), row(0, revision=8, known=7))
    ).sources == ("p2",)


def test_a_first_sync_takes_the_highest_revision_that_is_offered() -> None:
    election = elect(table(row(0, 7, None), row(0, 7, None), row(1, 9, None)))
    assert election.sources == ("p2",) and election.revision == 9 and election.ahead == ()


def test_who_is_ahead_is_left_out() -> None:
    election = elect(table(row(0, 1), row(1, 2), row(1, 0)))
    assert election.ahead == ("p1",) and election.sources == ("p0",) and election.receivers == ("p2",)
    error = ahead_error("p1", table(row(0, 1), row(1, 2), row(1, 0)), election)
    assert error.expected == 1 and error.offered == {"p0": 1, "p1": 2, "p2": 0}


@pytest.mark.parametrize("offers", [(0, 0), (2, 2), (0, 2)])
def test_nobody_who_offers_what_is_due_is_an_error(offers) -> None:
    with pytest.raises(RevisionError, match="1 is due") as caught:
        elect(table(*(row(0, revision) for revision in offers), row(0, 1, known=None)))
    assert caught.value.expected == 1


def test_strategies_that_contradict_one_another() -> None:
    for rows in (
        [row(strategy=POPULAR), row(strategy=SEND)],
        [row(strategy=POPULAR), row(strategy=RECEIVE)],
        [row(0, strategy=SEND), row(1, strategy=SEND)],
        [row(0, strategy=SEND), row(0, 0, strategy=SEND)],
    ):
        with pytest.raises(SharedStateMismatchError, match="contradict") as caught:
            elect(table(*rows))
        assert "p1" in caught.value.peers
    with pytest.raises(NoUpToDatePeerError, match="RECEIVE_ONLY"):
        elect(table(row(strategy=RECEIVE), row(strategy=RECEIVE)))


def test_who_only_sends_wins_also_as_a_newcomer() -> None:
    election = elect(table(row(1, known=None, strategy=SEND), *[row(0, strategy=RECEIVE)] * 2))
    assert election.sources == ("p0",) and election.receivers == ("p1", "p2")


def test_what_may_differ_goes_to_newcomers_only() -> None:
    loose = {"has_loose": True}
    rows = [
        row(loose=CONTENTS[0], **loose),
        row(loose=CONTENTS[1], **loose),
        row(0, 1, None, loose=CONTENTS[2], **loose),
    ]
    election = elect(table(*rows))
    assert election.receivers == election.newcomers == ("p2",)
    same = replace(rows[2], loose=CONTENTS[0])
    assert elect(table(*rows[:2], same)).receivers == (), "it holds what it would be sent"


def _election() -> Election:
    return elect(table(row(0), row(0), row(1), row(1)))


def test_nobody_lacks_anything_is_the_commit() -> None:
    assert judge(table(*[row(0)] * 4), _election(), {})


def test_the_loss_of_all_sources_is_an_error_only_while_somebody_lacks_something() -> None:
    election = _election()
    lacking = {"p2": replace(row(1), missing=5), "p3": row(1)}
    with pytest.raises(NoUpToDatePeerError, match="p2") as caught:
        judge(lacking, election, {})
    assert caught.value.details["lost"] is True
    assert not judge({"p1": row(0), **lacking}, election, {})
    assert judge({"p2": row(1), "p3": row(1)}, election, {})


def test_a_stand_still_and_a_spoilt_piece_are_errors_on_all() -> None:
    election = _election()
    with pytest.raises(OperationTimeoutError, match="p2"):
        judge(table(row(0), row(0), replace(row(1), missing=5, overdue=True), row(1)), election, {})
    with pytest.raises(SharedStateMismatchError, match="'w'") as caught:
        judge(table(row(0), row(0), replace(row(1), missing=5, spoilt=3), row(1)), election, {3: "w"})
    assert caught.value.tensor == "w" and "p2" in caught.value.peers


ROWS = st.builds(
    row,
    st.integers(0, 2),
    st.integers(0, 4),
    st.none() | st.integers(0, 3),
    since=st.integers(0, 3),
    strategy=st.sampled_from([POPULAR] * 8 + [SEND, RECEIVE]),
    has_loose=st.just(True),
    loose=st.sampled_from(CONTENTS),
)


@given(st.lists(ROWS, min_size=1, max_size=7))
def test_any_table_has_one_answer_that_keeps_the_rules(rows: list[Row]) -> None:
    told = table(*rows)
    try:
        election = elect(told)
    except PCCLError as error:
        with pytest.raises(type(error)):
            elect(dict(told))
        return
    assert elect(dict(told)) == election
    last = max((each.known for each in rows if each.known is not None), default=None)
    assert election.revision == (last + 1 if last is not None else election.revision)
    winners = {told[peer].content for peer in election.sources}
    assert len(winners) == 1 and election.sources
    for peer, each in told.items():
        receives = peer in election.receivers
        assert not (receives and (peer in election.sources or peer in election.ahead or each.strategy is SEND))
        assert (peer in election.ahead) == (each.revision > election.revision)
        if peer not in election.ahead:
            assert receives or each.content in winners, "everyone holds the same in the end"
        if peer in election.sources:
            assert each.revision == election.revision and each.strategy is not RECEIVE
            assert each.strategy is SEND or last is None or each.known == last, "no newcomer wins"
    if all(each.strategy is POPULAR for each in rows):
        votes = Counter(
            each.content for each in rows if each.revision == election.revision and (last is None or each.known == last)
        )
        assert votes[winners.pop()] == max(votes.values())
