"""What a peer finds out about its network: told, told again after a restart, and forgotten with those who are gone."""

from __future__ import annotations

from ray_pccl.control.messages import Edge, Measured, Observed, Probe, Registered, Surveying, VoteKind, Withdraw
from ray_pccl.errors import OperationTimeoutError
from ray_pccl.peer.effects import Fail, Inform, Measure, Send
from ray_pccl.peer.membership import SLACK_S
from ray_pccl.peer.network import EDGES_A_MESSAGE, OBSERVE_EVERY_S, Network
from ray_pccl.topology.progress import TopologyProgress
from tests.peer.test_membership import Peer, _decide

OPTIMIZE = VoteKind.OPTIMIZE_TOPOLOGY
PROBE = Probe((1, 1), "b", "b 10.0.0.1 5000")


def _sent(effects: list) -> list:
    return [effect.message for effect in effects if isinstance(effect, Send)]


def test_a_peer_in_the_call_measures_when_it_is_told_to() -> None:
    peer = Peer().member()
    peer.vote(OPTIMIZE)
    assert peer.receive(PROBE) == [Measure(PROBE)]


def test_one_that_has_left_the_call_says_at_once_that_it_does_not() -> None:
    peer = Peer().member()
    assert peer.receive(PROBE) == [Send(Measured((Edge("a", "b", None),), (1, 1)))]


def test_what_was_measured_is_told_and_told_again_with_its_age_after_a_restart() -> None:
    peer = Peer().member()
    edges = (Edge("a", "b", 100.0), Edge("b", "a", 50.0))
    assert peer.machine.probed(PROBE, edges, 10.0) == [Send(Measured(edges, (1, 1)))]
    peer.now = 17.0
    again = _sent(peer.receive(Registered({})))
    assert again == [Measured((Edge("a", "b", 100.0, 7.0), Edge("b", "a", 50.0, 7.0)))]


def test_what_could_not_be_measured_or_reached_is_not_told_again() -> None:
    peer = Peer().member()
    peer.machine.probed(PROBE, (Edge("a", "b", 0.0), Edge("b", "a", None)), 10.0)
    assert _sent(peer.receive(Registered({}))) == []


def test_who_is_gone_is_forgotten() -> None:
    peer = Peer().member("b", "c")
    peer.machine.probed(PROBE, (Edge("a", "b", 100.0),), 0.0)
    peer.machine.network.surveyed = True
    peer.machine.network.observed("b", 100.0, 0.0)
    peer.receive(_decide(2, "a", "c"))
    assert _sent(peer.receive(Registered({}))) == []
    assert peer.machine.network.to_tell(100.0) is None


def test_each_word_of_the_master_gives_it_time_for_the_next_step() -> None:
    peer = Peer().member()
    peer.vote(OPTIMIZE, timeout_s=5.0)
    peer.now = 4.0
    progress = Inform(OPTIMIZE, TopologyProgress("probing", 2, 6))
    assert peer.receive(Surveying("probing", 2, 6, 10.0)) == [progress]
    assert peer.at(14.0 + SLACK_S - 0.1) == []
    withdrawn, failed = peer.at(14.0 + SLACK_S)
    assert withdrawn == Send(Withdraw(OPTIMIZE))
    assert isinstance(failed, Fail) and isinstance(failed.error, OperationTimeoutError)


def test_a_master_that_comes_back_is_given_time_to_ask_again_and_no_more() -> None:
    peer = Peer().member()
    peer.vote(OPTIMIZE, timeout_s=5.0)
    peer.receive(Surveying("solving", 6, 6, 60.0))
    peer.now = 10.0
    (register,) = peer.welcome(2)
    soon = peer.machine.settings.register_grace_s + 2 * peer.machine.settings.answer_timeout_s
    assert register.votes[0].timeout_s == soon
    assert peer.at(10.0 + soon + SLACK_S - 0.1) == []
    assert len(peer.at(10.0 + soon + SLACK_S)) == 2


def test_progress_of_a_call_that_was_left_is_told_to_nobody() -> None:
    assert Peer().member().receive(Surveying("probing", 2, 6, 10.0)) == []


# ------------------------------------------------------------------------------------------------------ observations


def _surveyed(peer_id: str) -> Network:
    network = Network(peer_id)
    network.surveyed = True
    return network


def test_what_links_carry_is_told_only_to_masters_that_have_surveyed() -> None:
    peer = Peer().member()
    peer.machine.network.observed("b", 100.0, 1.0)
    assert peer.machine.network.to_tell(10.0) is None
    peer.receive(Surveying("probing", 0, 2, 10.0))
    assert peer.machine.network.to_tell(20.0) is None  # it was before
    peer.machine.network.observed("b", 50.0, 20.0)
    assert peer.machine.network.to_tell(20.0) == Observed((Edge("a", "b", 50.0, 0.0),))


def test_the_best_that_a_link_carried_is_told_at_most_every_few_seconds() -> None:
    network = _surveyed("a")
    for rate in (10.0, 30.0, 20.0):
        network.observed("b", rate, 100.0)
    assert network.to_tell(101.0) == Observed((Edge("a", "b", 30.0, 1.0),))
    network.observed("b", 5.0, 102.0)
    assert network.to_tell(101.0 + OBSERVE_EVERY_S - 0.1) is None
    assert network.to_tell(101.0 + OBSERVE_EVERY_S) == Observed((Edge("a", "b", 5.0, 4.0),))
    assert network.to_tell(200.0) is None


def test_what_a_peer_of_a_large_group_knows_is_told_in_parts() -> None:
    network = Network("a")
    edges = tuple(Edge("a", f"p{number}", 1.0) for number in range(2 * EDGES_A_MESSAGE + 1))
    network.probed((1, 1), edges, 0.0)
    assert [len(message.edges) for message in network.again(0.0)] == [EDGES_A_MESSAGE, EDGES_A_MESSAGE, 1]


def test_what_was_last_seen_of_a_link_is_told_again_with_what_was_probed() -> None:
    network = _surveyed("a")
    network.probed((1, 1), (Edge("a", "b", 100.0), Edge("a", "c", 100.0)), 0.0)
    network.observed("b", 20.0, 10.0)
    assert len(network.again(11.0)) == 1  # it will be told for the first time
    network.to_tell(11.0)
    probed, seen = network.again(15.0)
    assert probed == Measured((Edge("a", "b", 100.0, 15.0), Edge("a", "c", 100.0, 15.0)))
    assert seen == Observed((Edge("a", "b", 20.0, 5.0),))
    network.keep({"a", "c"})
    assert network.again(15.0) == [Measured((Edge("a", "c", 100.0, 15.0),))]
