"""`optimize_topology()` at the master: survey, solve, re-link, and who may die between these lines."""

from __future__ import annotations

import math

import pytest

from master_actor.core.actions import Solve, Solved
from master_actor.core.bandwidth import Bandwidth
from master_actor.core.optimizing import EDGES_TOLD, MOST_RATE, PROBE_PATIENCE_S, SOLVER_PATIENCE_S
from master_actor.core.phases import Phase
from master_actor.core.records import EpochBegan, VoteCounted
from master_actor.core.topology import MOST_HOSTS, describe
from ray_pccl.control import frames
from ray_pccl.control.messages import (
    Edge,
    LinkBroken,
    Measured,
    Observed,
    OpenVote,
    Query,
    Question,
    Register,
    VoteCount,
    VoteKind,
    Withdraw,
)
from ray_pccl.errors import ProtocolError
from ray_pccl.peer.network import Network
from ray_pccl.peer.topology import read
from ray_pccl.types import Member
from tests.core.driven import TOPOLOGY
from tests.core.surveyed import (
    OPTIMIZE,
    Surveyed,
    asks_in,
    decides_in,
    failures_in,
    pairs_in,
    probes_in,
    records_in,
    served_in,
    solve_in,
    told_in,
)

UPDATE = VoteKind.UPDATE_TOPOLOGY.value


def test_all_edges_are_measured_then_the_ring_is_solved_and_relinked_in_the_new_order() -> None:
    group = Surveyed("a", "b", "c", "d")
    actions = group.all_vote()
    assert pairs_in(actions) in ({"ad", "bc"}, {"ab", "cd"}, {"ac", "bd"})
    assert [(told.stage, told.probed, told.to_probe) for told in told_in(actions)] == [("probing", 0, 12)] * 4
    actions = group.measure_all(actions, {"ab": 1.0})
    question = solve_in(actions)
    assert question.bandwidth[0] == (math.inf, 1.0, 100.0, 100.0) and question.hosts == (0, 1, 2, 3)
    assert {told.stage for told in told_in(actions)} == {"probing", "solving"}
    assert asks_in(group.solve(question, "acbd")) == ["a", "b", "c", "d"]
    actions = group.answer_all()
    (record,) = records_in(actions)
    assert isinstance(record, EpochBegan) and record.epoch == 2 and record.admitted_in == 1
    assert [member.peer_id for member in record.members] == ["a", "c", "b", "d"]
    assert record.votes["optimize_topology"] == VoteCount(1, True) and record.votes[UPDATE] == VoteCount(1, True)
    assert list(decides_in(actions)) == ["a", "c", "b", "d"]
    assert not group.master.group().ballot.open[OPTIMIZE] and not group.master.group().optimizer.is_busy


def test_nobody_is_admitted() -> None:
    group = Surveyed("a", "b", "c")
    group.master.join("n", min_world_size=3, host="on-n")
    group.optimized("acb")
    assert group.order == ["a", "c", "b"] and "n" in group.master.group().room


def test_no_peer_is_in_two_probes_at_a_time_and_the_next_round_waits_for_all_of_this_one() -> None:
    group = Surveyed("a", "b", "c", "d")
    probes = probes_in(group.all_vote())
    (one, first), (two, second) = probes.items()
    assert len({one, first.other, two, second.other}) == 4
    assert group.report(one, first) == []
    assert len(probes_in(group.report(two, second))) == 2


def test_peers_of_one_host_are_never_measured_and_the_answer_is_there_at_once() -> None:
    group = Surveyed("a", "b", hosts={"b": "on-a"})
    actions = group.all_vote()
    assert records_in(actions) == [VoteCounted("g", OPTIMIZE, VoteCount(1, False))]
    assert sorted(served_in(actions)) == ["a", "b"] and group.epoch == 1


def test_hosts_are_told_to_the_solver() -> None:
    group = Surveyed("a", "b", "c", hosts={"c": "on-a"})
    question = solve_in(group.measure_all(group.all_vote()))
    assert question.hosts == (0, 1, 0) and question.bandwidth[0][2] == math.inf


def test_a_second_call_measures_nothing_and_an_order_that_is_as_good_makes_no_epoch() -> None:
    group = Surveyed("a", "b", "c")
    group.optimized("acb")
    actions = group.all_vote(1)
    assert not probes_in(actions)
    actions = group.solve(solve_in(actions), "acb", bottleneck=101.0)
    assert records_in(actions) == [VoteCounted("g", OPTIMIZE, VoteCount(2, False))] and group.epoch == 2
    assert sorted(served_in(actions)) == ["a", "b", "c"]


def test_only_what_is_not_known_is_measured() -> None:
    group = Surveyed("a", "b", "c")
    group.optimized("acb")
    group.master.say("a", Observed((Edge("a", "b", 10.0),)))  # it has fallen
    actions = group.all_vote(1)
    ((dialler, probe),) = probes_in(actions).items()
    assert (dialler, probe.other, probe.sends, probe.receives) == ("b", "a", False, True)


def test_an_edge_that_has_fallen_is_measured_again_though_its_dialler_was_away_in_between() -> None:
    group = Surveyed("a", "b", "c")
    network = Network("c")
    network.probed((1, 1), (Edge("c", "a", 100.0), Edge("a", "c", 100.0)), now=0.0)
    group.optimized("acb")
    group.master.at(10.0)
    group.master.say("a", Observed((Edge("a", "c", 20.0),)))
    group.master.at(20.0)
    for message in network.again(20.0):  # as after each reconnect
        group.master.say("c", message)
    assert pairs_in(group.all_vote(1)) == {"ac"}


def test_the_ring_does_not_wander_if_its_edges_carry_a_little_less_than_was_probed() -> None:
    group = Surveyed("a", "b", "c")
    group.optimized("acb")
    group.master.at(10.0)
    for edge in ("ac", "cb", "ba"):
        group.master.say(edge[0], Observed((Edge(edge[0], edge[1], 80.0),)))
    question = solve_in(group.all_vote(1))
    assert {rate for row in question.bandwidth for rate in row} == {100.0, math.inf}
    assert served_in(group.solve(question, "abc", bottleneck=100.0)) and group.order == ["a", "c", "b"]
    assert group.master.group().optimizer.bandwidth.rate("on-a", "on-c") == 80.0  # which is what users see


def test_newcomers_edges_are_all_that_is_measured_after_an_admission() -> None:
    group = Surveyed("a", "b")
    group.measure_all(group.all_vote())
    group.master.handle(Solved("g", 1, (0, 1), 100.0, 200.0, True))
    group.master.join("n", min_world_size=2, host="on-n")
    group.all_vote(1, TOPOLOGY)
    group.answer_all()
    actions = group.all_vote(1)
    assert pairs_in(actions) < {"an", "bn"}


# ------------------------------------------------------------------------------------------------------------- deaths


def test_a_death_in_mid_probe_shrinks_the_survey_and_the_call_goes_on() -> None:
    group = Surveyed("a", "b", "c", "d", minimum=2)
    probes = probes_in(group.all_vote())
    (one, first), (two, _) = probes.items()
    group.report(one, first)
    actions = group.master.dies(two, f"on-{two}")
    assert len(asks_in(actions)) == 3
    assert len(probes_in(actions)) == 1 and two not in str(pairs_in(actions))  # measuring goes on meanwhile
    group.answer_all()
    assert group.epoch == 2 and two not in group.order
    actions = group.measure_all(actions)
    question = solve_in(actions)
    assert len(question.hosts) == 3
    survivors = "".join(group.master.group().living)
    group.solve(question, survivors[0] + survivors[:0:-1])
    group.answer_all()
    assert group.epoch == 3 and group.order == [survivors[0], *survivors[:0:-1]]


def test_the_survey_may_end_before_the_round_of_the_death_and_waits_for_it() -> None:
    group = Surveyed("a", "b", "c", minimum=2)
    actions = group.all_vote()
    ((dialler, probe),) = probes_in(actions).items()
    third = ({"a", "b", "c"} - {dialler, probe.other}).pop()
    group.master.dies(third, f"on-{third}")
    actions = group.report(dialler, probe)
    assert not any(isinstance(action, Solve) for action in actions)
    assert len(solve_in(group.answer_all()).hosts) == 2


def test_a_member_that_dies_while_the_order_is_solved_has_it_solved_again() -> None:
    group = Surveyed("a", "b", "c", "d", minimum=2)
    question = solve_in(group.measure_all(group.all_vote()))
    group.master.dies("b", "on-b")
    again = solve_in(group.answer_all())
    assert len(again.hosts) == 3 and not probes_in(group.master.actions[-5:])
    assert group.master.handle(Solved("g", question.number, (0, 2, 1, 3), 1.0, 4.0, True)) == []
    group.solve(again, "adc")
    group.answer_all()
    assert group.order == ["a", "d", "c"] and group.epoch == 3


def test_a_death_in_the_relink_round_keeps_the_order_and_what_is_left_is_solved_again() -> None:
    group = Surveyed("a", "b", "c", "d", minimum=2)
    question = solve_in(group.measure_all(group.all_vote()))
    group.solve(question, "acbd")
    group.master.dies("d", "on-d")
    actions = group.answer_all()
    assert group.order == ["a", "b", "c"] and group.master.group().durable.votes.get("optimize_topology") is None
    group.solve(solve_in(actions), "acb")
    group.answer_all()
    assert group.order == ["a", "c", "b"] and group.epoch == 3


def test_the_last_but_one_may_die() -> None:
    group = Surveyed("a", "b", minimum=1)
    group.all_vote()
    group.master.dies("b", "on-b")
    actions = group.answer_all()
    assert list(served_in(actions)) == ["a"] and group.epoch == 2


def test_a_broken_link_while_measuring_makes_its_round_and_the_call_goes_on() -> None:
    group = Surveyed("a", "b", "c")
    actions = group.all_vote()
    assert asks_in(group.master.say("a", LinkBroken(1, "b"))) == ["a", "b", "c"]
    group.answer_all()
    question = solve_in(group.measure_all(actions))
    group.solve(question, "acb")
    group.answer_all()
    assert group.order == ["a", "c", "b"] and group.epoch == 3


def test_an_edge_that_broke_twice_is_no_edge_for_the_solver() -> None:
    group = Surveyed("a", "b", "c", "d")
    for epoch in (1, 2):
        group.master.say("a", LinkBroken(epoch, "c"))
        group.answer_all()
    question = solve_in(group.measure_all(group.all_vote()))
    place = {peer: number for number, peer in enumerate(group.order)}
    assert question.bandwidth[place["a"]][place["c"]] == question.bandwidth[place["c"]][place["a"]] == 0.0
    assert question.bandwidth[place["a"]][place["b"]] == 100.0


def test_that_there_is_no_ring_is_not_said_of_members_of_which_one_has_died() -> None:
    group = Surveyed("a", "b", "c", minimum=2)
    question = solve_in(group.measure_all(group.all_vote(), {"ab": 0.0, "ba": 0.0}))
    group.master.dies("b", "on-b")
    assert not failures_in(group.master.handle(Solved("g", question.number, edges=((0, 1), (1, 0)))))
    actions = group.answer_all()
    assert not failures_in(actions) and len(solve_in(actions).hosts) == 2


def test_an_answer_before_the_death_is_thrown_away_too() -> None:
    group = Surveyed("a", "b", "c", minimum=2)
    question = solve_in(group.measure_all(group.all_vote(), {"ab": 0.0, "ba": 0.0}))
    group.master.say("a", LinkBroken(1, "c"))  # a round is under way
    group.master.handle(Solved("g", question.number, edges=((0, 1), (1, 0))))
    group.master.dies("b", "on-b")
    actions = group.answer_all()
    assert not failures_in(actions) and len(solve_in(actions).hosts) == 2


# ------------------------------------------------------------------------------------------------ what does not come


def test_a_probe_that_is_never_reported_leaves_its_edges_unknown_and_the_call_goes_on() -> None:
    group = Surveyed("a", "b")
    group.all_vote(timeout_s=2.0)
    late = 0.6 + PROBE_PATIENCE_S
    assert group.master.at(late - 0.1) == []  # the call's own timeout was the time for all to come
    question = solve_in(group.master.at(late))
    assert math.isnan(question.bandwidth[0][1]) and math.isnan(question.bandwidth[1][0])


def test_a_member_that_never_calls_is_named() -> None:
    group = Surveyed("a", "b", "c")
    for peer in ("a", "b"):
        assert group.master.vote(peer, OPTIMIZE, 0, 5.0) == []
    failures = failures_in(group.master.at(5.0))
    assert sorted(failures) == ["a", "b"]
    assert failures["a"].failure.error == "OperationTimeoutError"
    assert failures["a"].failure.details["calls"]["c"] == "no call known to the master"


def test_who_leaves_the_call_ends_the_survey_and_what_was_found_is_kept() -> None:
    group = Surveyed("a", "b", "c")
    actions = group.all_vote(timeout_s=5.0)
    ((dialler, probe),) = probes_in(actions).items()
    group.master.say("a", Withdraw(OPTIMIZE))
    assert not probes_in(group.report(dialler, probe))
    assert sorted(failures_in(group.master.at(5.0))) == ["b", "c"]
    actions = group.all_vote(0)
    assert not group.master.group().ballot.overdue(5.0)
    assert pairs_in(actions) and pairs_in(actions) != {"".join(sorted((dialler, probe.other)))}
    assert {told.to_probe for told in told_in(actions)} == {4}


def test_a_survey_begins_when_the_probes_of_one_that_was_given_up_must_have_ended() -> None:
    group = Surveyed("a", "b", "c")
    group.all_vote()
    group.master.say("a", Withdraw(OPTIMIZE))
    assert not probes_in(group.master.vote("a", OPTIMIZE, 0))
    assert not probes_in(group.master.at(1.5))
    assert probes_in(group.master.at(1.6))


def test_newcomers_that_come_in_mid_survey_have_their_edges_measured() -> None:
    group = Surveyed("a", "b", minimum=2)
    group.all_vote()
    group.master.join("n", min_world_size=2, host="on-n")
    for peer in ("a", "b"):  # in other threads of theirs
        group.master.vote(peer, TOPOLOGY, 1)
    group.answer_all()
    group.master.at(2.0)
    actions = group.master.vote("n", OPTIMIZE, 0)
    assert {told.to_probe for told in told_in(actions)} == {6}


def test_a_solver_that_never_answers_fails_the_call_on_all() -> None:
    group = Surveyed("a", "b", "c")
    group.measure_all(group.all_vote())
    assert not failures_in(group.master.at(SOLVER_PATIENCE_S))
    failures = failures_in(group.master.at(SOLVER_PATIENCE_S + 1.0))
    assert sorted(failures) == ["a", "b", "c"] and "did not end in time" in failures["a"].failure.text
    assert group.epoch == 1 and group.master.group().phase is Phase.STEADY


def test_a_solver_that_fails_fails_the_call_on_all() -> None:
    group = Surveyed("a", "b", "c")
    question = solve_in(group.measure_all(group.all_vote()))
    failures = failures_in(group.master.handle(Solved("g", question.number, error="MemoryError: no")))
    assert sorted(failures) == ["a", "b", "c"] and "MemoryError" in failures["a"].failure.text


def test_no_ring_without_edges_that_cannot_connect_is_an_error_with_their_names_and_the_next_call_tries_them() -> None:
    group = Surveyed("a", "b", "c")
    question = solve_in(group.measure_all(group.all_vote(), {"ab": 0.0, "ac": 0.0}))
    assert question.bandwidth[0] == (math.inf, 0.0, 0.0)
    failures = failures_in(group.master.handle(Solved("g", question.number, edges=((0, 1), (0, 2)))))
    assert sorted(failures) == ["a", "b", "c"]
    failure = failures["b"].failure
    assert failure.error == "NoRingError" and failure.details == {"edges": (("a", "b"), ("a", "c"))}
    assert "a -> b" in failure.text and group.epoch == 1
    assert {told.to_probe for told in told_in(group.all_vote(0))} == {2}


def test_of_many_edges_that_are_in_the_way_some_are_named_and_the_word_fits_into_a_frame() -> None:
    group = Surveyed("a", "b", "c")
    question = solve_in(group.measure_all(group.all_vote()))
    edges = ((0, 1), (0, 2)) * 125_000  # what a group of a thousand lacks that falls apart into halves
    failed = failures_in(group.master.handle(Solved("g", question.number, edges=edges)))["a"]
    assert len(failed.failure.details["edges"]) == EDGES_TOLD
    assert "a -> b, a -> c, a -> b, a -> c, a -> b, a -> c and 249994 more. Let" in failed.failure.text
    assert len(frames.encode(failed)) < 1 << 20


def test_figures_that_make_no_sense_or_are_about_others_are_ignored() -> None:
    group = Surveyed("a", "b", "c")
    edges = (
        Edge("b", "c", 5.0),
        Edge("a", "x", 5.0),
        Edge("a", "b", -1.0),
        Edge("a", "b", math.inf),
        Edge("a", "b", math.nan),
        Edge("a", "b", 5.0, -1.0),
    )
    assert group.master.say("a", Measured(edges)) == []
    assert {told.to_probe for told in told_in(group.all_vote())} == {6}


def test_who_waits_for_probes_of_an_earlier_call_to_end_is_told_for_how_long() -> None:
    group = Surveyed("a", "b", "c")
    group.all_vote(timeout_s=1.0)
    for peer in "abc":
        group.master.say(peer, Withdraw(OPTIMIZE))
    actions = group.all_vote(timeout_s=1.0)
    assert not probes_in(actions)
    assert [(word.stage, word.probed, word.to_probe) for word in told_in(actions)] == [("probing", 0, 6)] * 3
    waits = group.master.group().optimizer._quiet_at - group.master.now
    assert told_in(actions)[0].within_s > waits + PROBE_PATIENCE_S
    assert probes_in(group.master.at(group.master.now + waits))


# -------------------------------------------------------------------------------------------------- the master's death


def _returning(group: Surveyed, peer: str, votes: tuple[OpenVote, ...]) -> Register:
    members = group.master.group().durable.members
    host = group.hosts[peer]
    return Register(peer, "g", host, group.epoch, members, False, votes, (), True, None)


def test_after_a_restart_the_call_goes_on_and_what_peers_tell_again_is_not_measured_again() -> None:
    group = Surveyed("a", "b", "c")
    actions = group.all_vote()
    ((dialler, probe),) = probes_in(actions).items()
    group.report(dialler, probe)
    returning = {peer: _returning(group, peer, (OpenVote(OPTIMIZE, 0, 50.0),)) for peer in "abc"}
    group.master = group.master.restarted()
    known = (Edge(dialler, probe.other, 100.0, 3.0), Edge(probe.other, dialler, 100.0, 3.0))
    for peer in "abc":
        assert not probes_in(group.master.say(peer, returning[peer]))
    told_at = group.master.now
    assert group.master.say(dialler, Measured(known)) == []
    assert group.master.at(told_at + 1.5) == []  # probes of the master before may still run
    actions = group.master.at(told_at + 1.7)
    assert pairs_in(actions) and pairs_in(actions) != {"".join(sorted((dialler, probe.other)))}
    question = solve_in(group.measure_all(actions))
    assert not any(math.isnan(rate) for row in question.bandwidth for rate in row)
    at = group.master.group().optimizer.bandwidth.measured_at(f"on-{dialler}", f"on-{probe.other}")
    assert at == told_at - 3.0


def test_a_member_that_reconnects_is_told_again_how_long_to_wait() -> None:
    group = Surveyed("a", "b", "c")
    word = told_in(group.measure_all(group.all_vote()))[-1]
    assert word.stage == "solving"
    actions = group.master.say("b", _returning(group, "b", (OpenVote(OPTIMIZE, 0, 0.0),)))
    assert told_in(actions) == [word]
    assert not failures_in(group.master.at(1.0))


def test_a_report_that_was_lost_with_its_connection_is_not_waited_for_once_it_is_told_again() -> None:
    group = Surveyed("a", "b")
    ((dialler, probe),) = probes_in(group.all_vote()).items()
    actions = group.master.say(dialler, _returning(group, dialler, (OpenVote(OPTIMIZE, 0, 100.0),)))
    assert not [action for action in actions if isinstance(action, Solve)]
    one, other = Edge(dialler, probe.other, 100.0, 0.1), Edge(probe.other, dialler, 100.0, 0.1)
    assert group.master.say(dialler, Measured((one,))) == []
    assert solve_in(group.master.say(dialler, Measured((other,))))


def test_a_vote_that_was_served_by_the_epoch_is_not_held_again() -> None:
    group = Surveyed("a", "b", "c")
    group.optimized("acb")
    late = group.master.vote("b", OPTIMIZE, 0)
    assert served_in(late)["b"].count == VoteCount(1, True)


# ------------------------------------------------------------------------------------------------- the background


def test_a_better_order_that_was_found_later_comes_with_the_next_update() -> None:
    group = Surveyed("a", "b", "c", "d")
    actions = group.optimized("acbd", bottleneck=200.0, optimal=False)
    question = solve_in(actions)
    assert question.budget_s > 1.0
    assert group.solve(question, "adcb", bottleneck=300.0) == []
    assert group.order == ["a", "c", "b", "d"]
    assert len(asks_in(group.all_vote(1, TOPOLOGY))) == 4
    actions = group.answer_all()
    assert group.order == ["a", "d", "c", "b"] and group.epoch == 3
    (record,) = records_in(actions)
    assert record.votes[UPDATE] == VoteCount(2, True) and record.admitted_in == 1  # type: ignore[attr-defined]
    assert served_in(group.all_vote(2, TOPOLOGY)) and group.epoch == 3


def test_newcomers_go_behind_the_better_order() -> None:
    group = Surveyed("a", "b", "c")
    group.solve(solve_in(group.optimized("acb", bottleneck=200.0, optimal=False)), "abc", bottleneck=300.0)
    group.master.join("n", min_world_size=3, host="on-n")
    group.all_vote(1, TOPOLOGY)
    group.answer_all()
    assert group.order == ["a", "b", "c", "n"]


def test_what_the_background_found_is_dropped_if_it_is_no_better_or_members_are_lost() -> None:
    group = Surveyed("a", "b", "c", "d", minimum=2)
    question = solve_in(group.optimized("acbd", bottleneck=200.0, optimal=False))
    group.solve(question, "adcb", bottleneck=201.0)
    assert served_in(group.all_vote(1, TOPOLOGY))
    group.master.group().optimizer.better = ("a", "d", "c", "b")
    group.master.dies("d", "on-d")
    group.answer_all()
    assert served_in(group.all_vote(2, TOPOLOGY)) and group.order == ["a", "c", "b"]


@pytest.mark.parametrize("falls", ["before it was found", "after it was found"])
def test_what_the_background_found_is_dropped_if_an_edge_has_fallen_since(falls: str) -> None:
    group = Surveyed("a", "b", "c", "d")
    question = solve_in(group.optimized("acbd", bottleneck=200.0, optimal=False))
    group.master.at(10.0)
    if falls == "after it was found":
        group.solve(question, "adcb", bottleneck=300.0)
    group.master.say("a", Observed((Edge("a", "d", 1.0),)))
    group.solve(question, "adcb", bottleneck=300.0)
    assert served_in(group.all_vote(1, TOPOLOGY)) and group.order == ["a", "c", "b", "d"]


# --------------------------------------------------------------------------------------------------------- topology()


def test_the_topology_tells_order_matrix_hosts_bottleneck_and_age() -> None:
    group = Surveyed("a", "b", "c", hosts={"c": "on-b"})
    group.master.say("a", Measured((Edge("a", "b", 100.0, 0.0), Edge("b", "a", 50.0, 0.0))))
    group.master.at(7.0)
    (action,) = group.master.say("a", Query(3, Question.TOPOLOGY))
    topology = read(action.message.values)  # type: ignore[union-attr]
    assert topology.order == ("a", "b", "c") and topology.hosts == {"a": "on-a", "b": "on-b", "c": "on-b"}
    assert topology.matrix["a", "c"] == 100.0 and topology.matrix["c", "a"] == 50.0
    assert topology.matrix["b", "c"] == math.inf
    assert (topology.bottleneck, topology.age_s) == (50.0, 7.0)


def test_an_absurd_rate_is_cut_to_what_the_topology_can_tell() -> None:
    group = Surveyed("a", "b")
    group.master.say("a", Measured((Edge("a", "b", 1e300), Edge("b", "a", 1e300))))
    (action,) = group.master.say("a", Query(3, Question.TOPOLOGY))
    assert read(action.message.values).bottleneck == pytest.approx(MOST_RATE)  # type: ignore[union-attr]


def test_a_topology_of_which_nothing_is_known_says_so() -> None:
    group = Surveyed("a", "b")
    topology = read(describe(list(group.master.group().durable.members), group.master.group().optimizer.bandwidth, 0.0))
    assert (topology.matrix, topology.bottleneck, topology.age_s) == ({}, None, None)


def test_of_more_hosts_than_fit_into_a_frame_all_but_the_matrix_is_told() -> None:
    members = [Member(f"p{number}", f"h{number}") for number in range(MOST_HOSTS + 1)]
    topology = read(describe(members, Bandwidth(), 0.0))
    assert len(topology.order) == len(topology.hosts) == len(members) and topology.matrix == {}


def test_what_is_no_topology_is_a_protocol_error() -> None:
    report, _ = describe([Member("a", "x"), Member("b", "y")], Bandwidth(), 0.0)
    for values in ((), (report,), (b"", b""), (report, bytes(4)), (report, bytes(15))):
        with pytest.raises(ProtocolError):
            read(values)
