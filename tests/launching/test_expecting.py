"""Which nodes are to be there, and who is missing."""

from __future__ import annotations

import yaml

from ray_pccl.launching.expecting import Expected, Node, Seen, expected, missing, progress
from ray_pccl.launching.looking import MARK, line_of, seen_in
from tests.launching.conftest import EXAMPLES, LOCAL

HEAD = Node("10.0.0.1", is_head=True)
WANTED = Expected("10.0.0.1", ("10.0.0.2", "10.0.0.3"), 2)


def _worker(address: str) -> Node:
    return Node(address, is_head=False)


def test_machines_of_ones_own_are_expected_by_their_addresses() -> None:
    assert expected(yaml.safe_load(LOCAL)) == WANTED
    assert expected(yaml.safe_load(LOCAL.replace("min_workers: 2\n", ""))) == WANTED
    assert expected(yaml.safe_load(LOCAL.replace("min_workers: 2", "min_workers: 1"))).least == 1


def test_machines_of_a_cloud_are_expected_by_their_number() -> None:
    assert expected(yaml.safe_load((EXAMPLES / "aws.yaml").read_text())) == Expected("", (), 2)


def test_who_is_missing_is_named() -> None:
    assert missing(WANTED, Seen()) == ["the head 10.0.0.1", "the worker 10.0.0.2", "the worker 10.0.0.3", "the master"]
    assert missing(WANTED, Seen((HEAD, _worker("10.0.0.3")), "m:1")) == ["the worker 10.0.0.2"]
    assert missing(WANTED, Seen((HEAD, _worker("10.0.0.3"), _worker("10.0.0.2")))) == ["the master"]
    assert missing(WANTED, Seen((HEAD, _worker("10.0.0.3"), _worker("10.0.0.2")), "m:1")) == []


def test_of_a_cloud_the_number_of_the_missing_is_told() -> None:
    assert missing(Expected("", (), 3), Seen((HEAD, _worker("1.2.3.4")), "m:1")) == ["2 of 3 workers"]
    assert missing(Expected("", (), 0), Seen((HEAD,), "m:1")) == []


def test_where_fewer_are_wanted_than_listed_all_that_may_be_meant_are_named() -> None:
    wanted = Expected("10.0.0.1", ("a", "b", "c"), 2)
    assert missing(wanted, Seen((HEAD, _worker("b")), "m:1")) == ["1 of the workers a, c"]


def test_a_name_stands_for_the_address_that_the_head_finds_under_it() -> None:
    wanted = Expected("head", ("left", "right"), 2)
    addresses = {"left": "10.0.0.2", "right": "10.0.0.3"}
    assert missing(wanted, Seen((HEAD, _worker("10.0.0.2")), "m:1", addresses=addresses)) == ["the worker right"]


def test_progress_counts_nodes_and_tells_of_the_master() -> None:
    assert progress(WANTED, Seen()) == "nodes up 0/3, master no"
    assert progress(WANTED, Seen((HEAD, _worker("10.0.0.3")), "m:1")) == "nodes up 2/3, master yes"


def test_what_was_seen_survives_the_way_through_a_terminal() -> None:
    seen = Seen((HEAD, Node("10.0.0.3", is_head=False, cpus=2, gpus=1)), "m:1", "why", {"left": "10.0.0.2"}, "0.1.0")
    assert seen_in(f"\x1b[0m some noise {line_of(seen)}\r\n") == seen
    assert seen_in("Shared connection to 10.0.0.1 closed.") is None
    assert seen_in(f"{MARK}{{cut off") is None
