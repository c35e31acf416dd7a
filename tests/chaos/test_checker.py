"""The checker finds what is wrong in doctored records, and nothing in sound ones."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.chaos.checker import History, check, parse
from tests.chaos.workload import SLOTS, Call, contribution, decode, expected, plan


def _record(**changed: Any) -> dict[str, Any]:
    sound = {
        "op": [7, 0],
        "kind": "all_reduce",
        "contributors": ["a", "b", "c"],
        "world_size": 3,
        "digest": 1,
        "decoded": [0, 1, 2],
        "garbled": "",
        "intact": True,
    }
    return sound | changed


def _error(error: str, **changed: Any) -> dict[str, Any]:
    return {"op": [7, 0], "kind": "all_reduce", "error": error, "text": "why", "intact": True} | changed


def _histories(*records: dict[str, Any] | None) -> list[History]:
    """Peers a, b, c in slots 0, 1, 2; one without a record died before it could write one."""
    names = "abc"
    return [
        History(f"peer {name}", name, slot, [] if record is None else [record])
        for slot, (name, record) in enumerate(zip(names, records, strict=True))
    ]


def test_sound_records_are_fine_and_the_dead_may_have_written_nothing() -> None:
    assert check(_histories(_record(), _record(), None)) == []


def test_an_error_on_all_is_fine() -> None:
    assert check(_histories(_error("PeerLostError"), _error("PeerLostError"), None)) == []


def test_an_evicted_peer_may_get_an_error_where_the_others_returned() -> None:
    two = _record(contributors=["a", "b"], world_size=2, decoded=[0, 1])
    histories = _histories(two, two, _error("PeerEvictedError"))
    histories[2].ended = "PeerEvictedError"
    assert check(histories, may_be_evicted=["peer c"]) == []
    assert "peer c ended with PeerEvictedError" in check(histories)[0]


def test_a_failure_of_the_library_is_fine_on_all_and_only_where_it_was_cut() -> None:
    error = _error("DelegatedBackendError")
    histories = _histories(error, error, error)
    assert "peer a got DelegatedBackendError" in check(histories)[0]
    histories[1].cut_library = True
    assert check(histories) == []
    histories[2].records = [_record()]
    assert "peer c returned, peer a, peer b got DelegatedBackendError" in check(histories)[0]
    assert parse("peer a", [json.dumps({"cut_library": True})]).cut_library


def test_a_peer_whose_link_was_cut_may_be_evicted() -> None:
    histories = _histories(None, None, None)
    histories[0].cut.append("c")
    histories[2].ended = "PeerEvictedError"
    assert check(histories) == []


@pytest.mark.parametrize(
    ("records", "finding"),
    [
        ((_record(), _record(digest=2), None), "do not agree on the digest"),
        (
            (_record(), None, _record(contributors=["a", "c"], world_size=2, decoded=[0, 2])),
            "agree on the contributors",
        ),
        ((_record(decoded=[0, 1]), None, None), "the result holds [0, 1]"),
        ((_record(decoded=[0, 1, 1, 2]), None, None), "counted twice"),
        ((_record(garbled="3 of 9 elements"), None, None), "makes no sense"),
        ((_record(), _error("PeerLostError"), None), "returned, peer b got PeerLostError"),
        ((None, None, _error("PeerLostError", intact=False)), "the input was changed"),
        ((_record(intact=False), None, None), "the input was changed"),
        ((_error("OperationTimeoutError"), None, None), "got OperationTimeoutError"),
        ((_error("CollectiveMismatchError"), None, None), "got CollectiveMismatchError"),
        ((_record(world_size=2), None, None), "world size 2"),
        ((None, None, _record(contributors=["a", "b"], world_size=2, decoded=[0, 1])), "is no contributor"),
        ((_record(kind="broadcast"), None, None), "a broadcast brought"),
        ((_record(contributors=None, world_size=None, decoded=[1, 2]), None, None), "its own contribution"),
    ],
)
def test_what_can_not_be_is_found(records: tuple[dict[str, Any] | None, ...], finding: str) -> None:
    assert any(finding in problem for problem in check(_histories(*records))), check(_histories(*records))


def test_a_line_that_a_kill_tore_is_left_out_but_only_at_the_end() -> None:
    lines = [json.dumps({"peer": "a", "slot": 3}), json.dumps(_record()), '{"op": [8, 0], "ki']
    history = parse("peer a", lines)
    assert (history.peer_id, history.slot, len(history.records)) == ("a", 3, 1)
    with pytest.raises(ValueError, match="Unterminated"):
        parse("peer a", [lines[2], *lines])


# ----------------------------------------------------------------------------------------------- the workload's values


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("slots", [(3,), (0, 5, 11), (1, 1, 2)])
def test_a_sum_tells_who_is_in_it_and_how_often(slots: tuple[int, ...], quantised: bool) -> None:
    call = Call(5, 2, "all_reduce", 200_000, quantised=quantised)
    found = decode(call, expected(call, slots))
    assert (found.slots, found.garbled) == (slots, "")


def test_a_piece_from_another_operation_or_of_other_contributors_is_seen() -> None:
    call = Call(5, 0, "all_reduce", 40_000)
    for stranger in (expected(Call(6, 0, "all_reduce", 40_000), (0, 1)), expected(call, (0, 1, 2)), np.zeros(10_000)):
        result = expected(call, (0, 1))
        result[5000:5100] = stranger[5000:5100]
        assert decode(call, result).garbled


def test_every_contribution_is_exact_and_differs_from_those_of_other_slots() -> None:
    for dtype in ("float32", "float64", "int32", "int64"):
        call = Call(1, 0, "all_reduce", 4096, dtype)
        firsts = {float(contribution(call, slot)[0]) for slot in range(SLOTS)}
        assert len(firsts) == SLOTS
        assert max(firsts) < 2**24


def test_all_peers_plan_the_same_steps_from_the_seed() -> None:
    assert [plan(3, step) for step in range(50)] == [plan(3, step) for step in range(50)]
    kinds = {call.kind for step in range(300) for call in plan(3, step).calls}
    assert kinds == {"all_reduce", "reduce", "broadcast", "barrier"}
