"""What people see: checked as text, at 80 columns, without colours."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType

from ray_pccl.cli import report_view
from ray_pccl.cli.report_view import short_hosts, short_peer, whole
from tests.cli import made_up


def text_of(thing: RenderableType, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False, markup=False).print(thing)
    return out.getvalue()


def line_with(text: str, *words: str) -> list[str]:
    """The one line that has all of these words, in columns."""
    [line] = [line for line in text.splitlines() if all(word in line for word in words)]
    return line.split()


def test_a_group_is_legible_at_80_columns_without_colours() -> None:
    text = text_of(whole(made_up.report(made_up.busy_group()), width=80, events=5))

    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    assert "…" not in text  # nothing was cut
    assert text.splitlines()[0] == "master 10.0.0.1:48148, up 3 h 12 min, start 2, pid 77, version 0.1.0"
    assert "http://127.0.0.1:48149/" in text
    assert "train  epoch 14, asking, closed; 4 members on 2 hosts (at least 2, at most 8)" in text
    assert "1.90 GB/s, 310 operations/s" in text
    assert "slowest edge 118 MB/s, measured 3 min 5 s ago" in text
    assert "2 recoveries, 1 eviction, 1 abort, 2 retries, 3 failures" in " ".join(text.split())
    assert "1 waiting: 4007-00000007" in text
    assert "in flight  all_reduce SUM of 1048576 FLOAT  tag 7, 3 of 4 members, 1.2 s" in text


def test_members_stand_in_ring_order_with_the_bandwidth_to_the_next() -> None:
    text = text_of(whole(made_up.report(made_up.busy_group()), width=80))

    assert line_with(text, "rank", "to next")[-1] == "silent"
    rows = [line_with(text, f"{4000 + number}-{number:08x}") for number in range(4)]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert rows[0][2:4] == ["node-a", "memory"]  # the next is on the same host
    assert rows[1][2:5] == ["node-a", "1.25", "GB/s"]
    assert rows[3][2:4] == ["node-b", "?"]  # on another host, and not measured
    assert rows[3][4:7] == ["123M", "1", "PB"]
    assert rows[2][-2:] == ["2.5", "s"]


def test_a_wide_terminal_gets_each_members_troubles() -> None:
    narrow, wide = (text_of(whole(made_up.report(made_up.busy_group()), width=width), width) for width in (80, 140))

    assert "aborts" in line_with(wide, "rank", "to next") and "aborts" not in line_with(narrow, "rank", "to next")
    assert line_with(wide, "4000-00000000")[-7:] == ["1", "2", "3", "5", "MiB", "0.1", "s"]


def test_a_thousand_members_are_summed_up_unless_all_are_asked_for() -> None:
    report = made_up.report(made_up.group(members=1000))

    few, every = (text_of(whole(report, width=80, members=shown)) for shown in (report_view.MEMBERS_SHOWN, None))

    assert "1,000 members on 2 hosts" in few
    assert "and 968 more; --all shows them" in few
    assert len(few.splitlines()) < 45
    assert line_with(every, "4999-000003e7")[0] == "999" and "more" not in every


def test_no_groups_and_empty_groups_are_told_as_such() -> None:
    assert "No groups" in text_of(whole(made_up.report(), width=80))
    empty = text_of(whole(made_up.report(made_up.group(members=0, phase="empty")), width=80))
    assert "train  epoch 14, empty; no members" in empty and "rank" not in empty


def test_the_timeline_has_milliseconds_and_reasons() -> None:
    text = text_of(whole(made_up.report(), width=80, events=2))

    assert "booted" not in text  # only the last two were asked for
    lost, recovered = line_with(text, "lost"), line_with(text, "recovered")
    assert lost[1:4] == ["train", "lost", "4009-00000009;"]
    assert "its process died" in text
    assert recovered[3:5] == ["6.5", "ms"]


def test_a_master_that_is_away_is_said_to_be() -> None:
    text = text_of(whole(made_up.report(made_up.group()), width=80, away_s=7.0))

    assert text.splitlines()[0] == "master 10.0.0.1:48148, away for 7 s: below is its last word"
    assert "4 members" in text


@pytest.mark.parametrize(
    ("peer_id", "short"),
    [
        ("ip-10-0-0-7-0123abcd-4242-9f8e7d6c5b4a3210", "4242-9f8e7d6c"),
        ("trainer-9f8e7d6c5b4a3210", "trainer-9f8e7d6c"),
        ("actor-0011223344556677889900112233445501000000-9f8e7d6c5b4a3210", "…501000000-9f8e7d6c"),
        ("anything at all", "anything at all"),
        ("x" * 40, "…" + "x" * 21),
    ],
)
def test_an_id_is_shortened_to_a_part_that_tells_it_apart(peer_id: str, short: str) -> None:
    assert short_peer(peer_id) == short
    assert short.removeprefix("…") in peer_id  # so that `evict` takes it


def test_hosts_keep_their_hash_only_where_their_names_are_the_same() -> None:
    assert short_hosts(["a-0123abcd", "b-0123abcd", "b-4567cdef", "b-4567cdef", "c"]) == {
        "a-0123abcd": "a",
        "b-0123abcd": "b-0123abcd",
        "b-4567cdef": "b-4567cdef",
        "c": "c",
    }
