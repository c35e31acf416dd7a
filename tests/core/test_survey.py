"""Which pairs are measured when: rounds in which no host is busy twice, and what a survey does without its peers."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Sequence

import pytest

from master_actor.core.bandwidth import Bandwidth
from master_actor.core.survey import LOOK_AHEAD, Survey, tournament
from ray_pccl.types import Member


def _members(*hosts: str) -> list[Member]:
    return [Member(f"p{number}", host) for number, host in enumerate(hosts)]


def _survey(hosts: Sequence[str], lacks: Callable[[str, str], bool]) -> Survey:
    return Survey((1, 1), {a: [b for b in hosts if b != a and lacks(a, b)] for a in hosts}, lacks)


def _rounds(survey: Survey, members: list[Member]) -> list[list[set[str]]]:
    """The pairs of peers of each round; every probe is reported."""
    rounds = []
    while not survey.is_over:
        orders = survey.next_round(members, 10.0)
        if orders:
            rounds.append([{dialler, probe.other} for dialler, probe in orders])
        for dialler, probe in orders:
            survey.reported(dialler, probe.other)
    return rounds


@pytest.mark.parametrize(("hosts", "rounds"), [(2, 1), (3, 3), (4, 3), (5, 5), (16, 15), (17, 17)])
def test_all_pairs_take_the_fewest_rounds_and_no_host_is_busy_twice_in_one(hosts: int, rounds: int) -> None:
    names = [f"h{number}" for number in range(hosts)]
    made = _rounds(_survey(names, lambda _a, _b: True), _members(*names))
    assert len(made) == rounds
    for pairs in made:
        assert len(set.union(*pairs)) == 2 * len(pairs)
    assert len({frozenset(pair) for pairs in made for pair in pairs}) == hosts * (hosts - 1) // 2


def test_a_tournament_has_every_pair_once() -> None:
    everything = {a: [b for b in "abcde" if b != a] for a in "abcde"}
    assert sorted(tournament(everything)) == [((a, b), 2) for a in "abcde" for b in "abcde" if a < b]
    assert tournament({"a": []}) == tournament({}) == []
    assert sorted(tournament({"a": [], "b": ["a", "c"], "c": ["b"], "d": []})) == [(("a", "b"), 1), (("b", "c"), 2)]


def test_hosts_of_which_all_is_known_leave_no_gaps_in_the_rounds() -> None:
    names = [f"h{number}" for number in range(19)]
    made = _rounds(_survey(names, lambda a, b: not {a, b} & {"h0", "h7", "h8"}), _members(*names))
    assert len(made) == 15


@pytest.mark.parametrize("known", [0.1, 0.5, 0.9])
def test_whatever_is_known_each_pair_that_is_lacking_is_measured_once_in_not_many_rounds(known: float) -> None:
    choose = random.Random(known)
    names = [f"h{number}" for number in range(60)]
    lacking = {(a, b) for a in names for b in names if a < b and choose.random() > known}
    made = _rounds(_survey(names, lambda a, b: (a, b) in lacking), _members(*names))
    pairs = [frozenset(pair) for pairs in made for pair in pairs]
    assert len(pairs) == len(set(pairs)) == len(lacking)
    busiest = max(sum(name in pair for pair in lacking) for name in names)
    assert busiest <= len(made) <= 2 * busiest


def test_a_round_does_not_go_through_all_pairs_for_one_that_fits() -> None:
    """With a thousand hosts there are half a million, and everyone waits for the master's loop."""
    choose, asked = random.Random(1), 0
    names = [f"h{number}" for number in range(100)]
    lacking = {(a, b) for a in names for b in names if a < b and choose.random() > 0.5}

    def lacks(a: str, b: str) -> bool:
        nonlocal asked
        asked += 1
        return (a, b) in lacking

    survey = _survey(names, lacks)
    while not survey.is_over:
        asked = 0
        orders = survey.next_round(_members(*names), 10.0)
        assert asked <= 2 * (LOOK_AHEAD * len(names) + 2 * len(orders))
        for dialler, probe in orders:
            survey.reported(dialler, probe.other)


def test_only_what_is_lacking_is_measured_and_only_in_the_direction_that_is() -> None:
    survey = _survey(["x", "y", "z"], lambda a, b: (a, b) == ("z", "x"))
    ((dialler, probe),) = survey.next_round(_members("x", "y", "z"), 10.0)
    assert (dialler, probe.other, probe.sends, probe.receives) == ("p2", "p0", True, False)
    assert (survey.probed, survey.to_probe) == (0, 1)
    survey.reported("p2", "p0")
    assert survey.is_over and survey.probed == 1


def test_two_hosts_with_many_peers_need_one_probe() -> None:
    survey = _survey(["x", "y"], lambda _a, _b: True)
    assert len(survey.next_round(_members("x", "x", "y", "y", "y"), 10.0)) == 1


def test_the_pair_of_a_lost_peer_is_measured_by_another_of_its_host_and_else_dropped() -> None:
    members = _members("x", "y", "y")
    survey = _survey(["x", "y"], lambda _a, _b: True)
    survey.next_round(members, 10.0)
    survey.lost("p1")
    ((dialler, probe),) = survey.next_round([members[0], members[2]], 10.0)
    assert {dialler, probe.other} == {"p0", "p2"}
    survey.lost("p2")
    assert survey.next_round(members[:1], 10.0) == []
    assert survey.is_over


def test_a_pair_that_is_late_is_not_tried_again() -> None:
    survey = _survey(["x", "y"], lambda _a, _b: True)
    survey.next_round(_members("x", "y"), 10.0)
    survey.give_up_late(9.9)
    assert not survey.is_over and survey.deadlines == [10.0]
    survey.give_up_late(10.0)
    assert survey.is_over and survey.probed == 2


# --------------------------------------------------------------------------------------------------------- bandwidth


def test_an_older_word_on_an_edge_is_ignored() -> None:
    bandwidth = Bandwidth()
    bandwidth.probed("x", "y", 100.0, at=5.0)
    bandwidth.probed("x", "y", 7.0, at=4.0)
    assert bandwidth.rate("x", "y") == 100.0 and bandwidth.measured_at("x", "y") == 5.0
    assert bandwidth.rate("y", "x") is None and bandwidth.lacks("y", "x")


def test_within_a_host_there_is_no_limit_and_nothing_to_know() -> None:
    bandwidth = Bandwidth()
    bandwidth.probed("x", "x", 1.0, at=0.0)
    assert bandwidth.rate("x", "x") == float("inf") and not bandwidth.lacks("x", "x")


def test_an_edge_that_could_not_connect_is_known_to_be_useless_and_tried_again() -> None:
    bandwidth = Bandwidth()
    bandwidth.probed("x", "y", 0.0, at=0.0)
    assert bandwidth.rate("x", "y") == 0.0 and bandwidth.lacks("x", "y")


def test_an_observation_replaces_the_figure_and_below_half_it_is_unknown() -> None:
    bandwidth = Bandwidth()
    bandwidth.probed("x", "y", 100.0, at=0.0)
    assert not bandwidth.observed("x", "y", 60.0, at=1.0)
    assert bandwidth.rate("x", "y") == 60.0 and bandwidth.measured_at("x", "y") == 1.0
    assert bandwidth.observed("x", "y", 49.0, at=2.0)  # half of what was measured, not of what was seen last
    assert bandwidth.rate("x", "y") is None and bandwidth.lacks("x", "y")


def test_an_observation_makes_no_unknown_edge_known() -> None:
    bandwidth = Bandwidth()
    assert not bandwidth.observed("x", "y", 100.0, at=0.0)
    assert bandwidth.lacks("x", "y")


def test_a_probe_from_before_an_edge_fell_does_not_raise_it_when_it_is_told_again() -> None:
    bandwidth = Bandwidth()
    bandwidth.probed("x", "y", 100.0, at=0.0)
    assert bandwidth.observed("x", "y", 20.0, at=10.0)
    bandwidth.probed("x", "y", 100.0, at=0.0)
    assert bandwidth.lacks("x", "y")
    bandwidth.probed("x", "y", 90.0, at=11.0)
    assert bandwidth.rate("x", "y") == 90.0
    assert not bandwidth.observed("x", "y", 20.0, at=10.0)  # told again as well, and older than the probe


def test_what_was_seen_of_an_unknown_edge_is_compared_with_an_older_probe_that_is_told_later() -> None:
    """After a restart of the master one peer tells what it has probed, and another what it has seen of that edge."""
    bandwidth = Bandwidth()
    bandwidth.observed("x", "y", 20.0, at=10.0)
    bandwidth.probed("x", "y", 100.0, at=0.0)
    assert bandwidth.lacks("x", "y")
    bandwidth.observed("x", "z", 60.0, at=10.0)
    bandwidth.probed("x", "z", 100.0, at=0.0)
    assert bandwidth.rate("x", "z") == 60.0 and bandwidth.measured_at("x", "z") == 10.0
    assert bandwidth.observed("x", "z", 49.0, at=11.0)


def test_a_host_that_is_forgotten_has_no_past() -> None:
    bandwidth = Bandwidth()
    bandwidth.observed("x", "y", 20.0, at=10.0)
    bandwidth.forget("y")
    bandwidth.probed("x", "y", 100.0, at=0.0)
    assert bandwidth.rate("x", "y") == 100.0


def test_what_is_better_than_measured_raises_what_is_expected() -> None:
    bandwidth = Bandwidth()
    bandwidth.probed("x", "y", 100.0, at=0.0)
    bandwidth.observed("x", "y", 300.0, at=1.0)
    assert bandwidth.observed("x", "y", 120.0, at=2.0)


def test_hosts_that_are_gone_are_forgotten() -> None:
    bandwidth = Bandwidth()
    for edge in (("x", "y"), ("y", "z"), ("z", "x")):
        bandwidth.probed(*edge, 100.0, at=0.0)
    bandwidth.forget("z")
    assert bandwidth.rate("x", "y") == 100.0
    assert bandwidth.rate("y", "z") is None and bandwidth.rate("z", "x") is None


def test_who_could_not_be_reached_because_it_was_dying_says_nothing_about_its_host() -> None:
    bandwidth = Bandwidth()
    bandwidth.probed("x", "y", 0.0, at=0.0)
    bandwidth.probed("y", "z", 0.0, at=0.0)
    bandwidth.probed("z", "x", 100.0, at=0.0)
    bandwidth.forget_unreachable("x")
    assert bandwidth.rate("x", "y") is None
    assert (bandwidth.rate("y", "z"), bandwidth.rate("z", "x")) == (0.0, 100.0)


def test_what_is_lacking_is_named_by_source_in_the_order_of_the_hosts() -> None:
    bandwidth = Bandwidth()
    hosts = ["z", "x", "y"]
    assert bandwidth.lacking(hosts) == {"z": ["x", "y"], "x": ["z", "y"], "y": ["z", "x"]}
    bandwidth.probed("x", "y", 100.0, at=0.0)
    bandwidth.probed("x", "z", 0.0, at=0.0)
    bandwidth.probed("y", "w", 0.0, at=0.0)  # of a host that is not asked about
    bandwidth.probed("y", "x", 0.0, at=0.0)
    bandwidth.probed("y", "x", 5.0, at=1.0)
    assert bandwidth.lacking(hosts) == {"z": ["x", "y"], "x": ["z"], "y": ["z"]}
    everything = {(a, b) for a, targets in bandwidth.lacking(hosts).items() for b in targets}
    assert everything == {(a, b) for a in hosts for b in hosts if bandwidth.lacks(a, b)}


def test_packed_rates_are_those_of_now() -> None:
    bandwidth = Bandwidth()
    hosts = ["x", "y"]

    def told() -> list[float | None]:
        return [None if math.isnan(rate) else rate for rate in array("f", bandwidth.packed(hosts))]

    assert told() == [math.inf, None, None, math.inf]
    bandwidth.probed("x", "y", 100.0, at=0.0)
    assert told() == [math.inf, 100.0, None, math.inf]
    bandwidth.observed("x", "y", 80.0, at=1.0)
    assert told() == [math.inf, 80.0, None, math.inf]
    assert math.isnan(bandwidth.references("y", hosts)[0]) and bandwidth.references("x", hosts) == [math.inf, 100.0]
    bandwidth.observed("x", "y", 8.0, at=2.0)
    bandwidth.probed("y", "x", 0.0, at=2.0)
    assert told() == [math.inf, None, 0.0, math.inf]
    bandwidth.forget_unreachable("x")
    assert told() == [math.inf, None, None, math.inf]
    bandwidth.probed("y", "x", 3.0, at=2.0)
    hosts.reverse()
    assert told() == [math.inf, 3.0, None, math.inf]
    bandwidth.forget("x")
    assert told() == [math.inf, None, None, math.inf]
