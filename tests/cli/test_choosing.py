"""Which peer or group is meant by what was typed."""

from __future__ import annotations

import pytest

from ray_pccl.cli.errors import NotFoundError
from ray_pccl.cli.evict import choose
from ray_pccl.cli.status import only
from ray_pccl.reports import from_json, to_json
from tests.cli import made_up

REPORT = made_up.report(made_up.group(), made_up.group("eval", members=1, waiting=("waiter-1", "waiter-12")))
SECOND = made_up.peer_id(1)


@pytest.mark.parametrize("typed", [SECOND, "4001-00000001", "…4001-00000001", "00000001dead"])
def test_a_peer_is_meant_by_its_id_or_any_part_that_no_other_has(typed: str) -> None:
    assert choose(REPORT, typed) == ("train", SECOND)


def test_an_id_that_is_the_beginning_of_another_can_be_meant() -> None:
    assert choose(REPORT, "waiter-1") == ("eval", "waiter-1")
    assert choose(REPORT, "waiter-12") == ("eval", "waiter-12")


def test_a_beginning_goes_before_a_part_elsewhere() -> None:
    report = made_up.report(made_up.group(members=0, waiting=("b-a", "a-b")))
    assert choose(report, "a") == ("train", "a-b")


def test_what_is_ambiguous_lists_who_is_meant() -> None:
    with pytest.raises(
        NotFoundError, match=r"'waiter' is part of 2 ids: waiter-1 \(eval\), waiter-12 \(eval\)"
    ) as raised:
        choose(REPORT, "waiter")
    assert raised.value.candidates == ("waiter-1", "waiter-12")


@pytest.mark.parametrize("typed", ["nobody", "", "…"])
def test_what_is_unknown_lists_who_is_there(typed: str) -> None:
    with pytest.raises(NotFoundError, match=r"no peer .*there are .*waiter-12") as raised:
        choose(REPORT, typed)
    assert len(raised.value.candidates) == 7


def test_a_long_list_is_cut_and_an_empty_one_said_to_be() -> None:
    with pytest.raises(NotFoundError, match="and 992 more"):
        choose(made_up.report(made_up.group(members=1000)), "nobody")
    with pytest.raises(NotFoundError, match="none at all"):
        choose(made_up.report(), "nobody")


def test_one_group_alone_is_a_report_still() -> None:
    report = only(REPORT, "train")
    assert [group.name for group in report.groups] == ["train"]
    assert {happening.group for happening in only(REPORT, "eval").happenings} == {""}
    assert from_json(to_json(report)) == report
    assert only(REPORT, None) is REPORT


def test_an_unknown_group_lists_those_there_are() -> None:
    with pytest.raises(NotFoundError, match="no group 'nope'; there are train, eval"):
        only(REPORT, "nope")
