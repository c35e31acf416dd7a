import os
import time

import pytest

from ray_pccl import MembershipChange, PeerEvictedError, Settings
from ray_pccl.testing import Faults, MasterProcess, PeerProcess, PeerStarter, eventually


def reasons(peer: PeerProcess) -> dict[str | None, str]:
    return {s.event.peer_id: s.event.reason for s in peer.events() if s.event.change is MembershipChange.LOST}


def changes(peer: PeerProcess) -> list[MembershipChange]:
    return [stamped.event.change for stamped in peer.events()]


def join_again(evicted: PeerProcess, member: PeerProcess) -> None:
    joined = evicted.call_async("connect")
    eventually(lambda: member.call("num_waiting") == 1)
    member.call("update_topology")  # the first one is absorbed
    member.call("update_topology")
    joined.result(10)


def test_a_killed_peer_is_replaced_by_an_epoch_without_it(peer_group: PeerStarter, faults: Faults) -> None:
    peers = peer_group(3)
    epoch = peers[0].epoch

    faults.kill(peers[1])

    peers.wait_epoch(epoch + 1)
    assert peers[0].members == peers[2].members
    assert set(peers[0].members) == {peers[0].peer_id, peers[2].peer_id}
    assert "exiting" in reasons(peers[0])[peers[1].peer_id]


def test_a_peer_can_be_named_by_its_pid(peer_group: PeerStarter, faults: Faults) -> None:
    peers = peer_group(3)
    epoch = peers[0].epoch

    faults.kill(peers[1].pid)
    peers[0].wait_epoch(epoch + 1)
    faults.cut(peers[2].pid)
    peers[0].wait_epoch(epoch + 2)

    assert peers[0].members == (peers[0].peer_id,)


def test_a_stopped_peer_is_evicted_and_finds_out_when_it_is_resumed(peer_group: PeerStarter, faults: Faults) -> None:
    peers = peer_group(2)
    epoch = peers[0].epoch
    frozen = time.monotonic()

    faults.stop(peers[1])
    peers[0].wait_epoch(epoch + 1)
    assert "stopped (SIGSTOP)" in reasons(peers[0])[peers[1].peer_id]
    assert time.monotonic() - frozen >= Settings().heartbeat_timeout_s

    faults.resume(peers[1])
    eventually(lambda: MembershipChange.EVICTED in changes(peers[1]))
    with pytest.raises(PeerEvictedError):
        peers[1].call("update_topology")


def test_a_peer_whose_connection_is_cut_is_taken_for_dead_and_can_join_again(
    peer_group: PeerStarter, faults: Faults
) -> None:
    peers = peer_group(2)
    epoch, old = peers[0].epoch, peers[1].peer_id

    faults.cut(peers[1])

    peers[0].wait_epoch(epoch + 1)
    assert "connection" in reasons(peers[0])[old]
    eventually(lambda: MembershipChange.EVICTED in changes(peers[1]))
    assert MembershipChange.MASTER_LOST in changes(peers[1])
    join_again(peers[1], peers[0])
    assert peers[1].peer_id != old
    assert peers.call("world_size") == [2, 2]


def test_a_killed_master_comes_back_with_its_groups(
    peer_group: PeerStarter, faults: Faults, master_process: MasterProcess
) -> None:
    peers = peer_group(2)
    epoch, pid = peers[0].epoch, master_process.pid
    peers[0].call("store.set", "kept", b"yes")

    faults.kill_master()

    assert master_process.pid != pid
    assert peers[1].call("store.get", "kept", 5) == b"yes"
    assert peers.call("epoch") == [epoch, epoch]


def test_the_master_can_stay_away_for_a_while(
    peer_group: PeerStarter, faults: Faults, master_process: MasterProcess
) -> None:
    peers = peer_group(2)

    faults.kill_master(restart=False)
    assert not master_process.alive
    eventually(lambda: MembershipChange.MASTER_LOST in changes(peers[0]))
    waiting = peers[0].call_async("store.set", "k", b"v")
    assert MembershipChange.MASTER_BACK not in changes(peers[0])

    faults.start_master()
    waiting.result(10)
    assert peers[1].call("store.get", "k", 5) == b"v"


def test_delayed_messages_take_that_much_longer_each_way(peer_group: PeerStarter, faults: Faults) -> None:
    [peer] = peer_group(1, relay=True)

    def seconds_of_a_question() -> float:
        started = time.monotonic()
        peer.call("is_closed")
        return time.monotonic() - started

    assert seconds_of_a_question() < 0.2
    faults.delay(0.15, peer)
    assert seconds_of_a_question() >= 0.3
    faults.delay(0)
    assert seconds_of_a_question() < 0.2


def test_a_delay_for_all_holds_for_peers_that_come_later_too(peer_group: PeerStarter, faults: Faults) -> None:
    faults.delay(0.1)
    [peer] = peer_group(1, relay=True)

    started = time.monotonic()
    peer.call("is_closed")

    assert time.monotonic() - started >= 0.2


@pytest.mark.parametrize("reset", [False, True])
def test_a_partitioned_peer_is_evicted_and_finds_out_when_it_is_healed(
    peer_group: PeerStarter, faults: Faults, reset: bool
) -> None:
    peers = peer_group(2, relay=True)
    epoch = peers[0].epoch

    faults.partition(peers[1])
    peers[0].wait_epoch(epoch + 1)
    assert peers[1].epoch == epoch
    assert MembershipChange.MASTER_LOST not in changes(peers[1])

    faults.heal(peers[1], reset=reset)
    eventually(lambda: MembershipChange.EVICTED in changes(peers[1]))
    old = peers[1].peer_id
    with pytest.raises(PeerEvictedError):
        peers[1].call("update_topology")

    join_again(peers[1], peers[0])
    assert peers[1].peer_id != old
    assert peers.call("world_size") == [2, 2]


def test_a_short_partition_costs_nothing(peer_group: PeerStarter, faults: Faults) -> None:
    peers = peer_group(2, relay=True)
    epoch = peers[0].epoch

    faults.partition(peers[1])
    question = peers[1].call_async("num_waiting")
    with pytest.raises(TimeoutError):
        question.result(Settings().heartbeat_timeout_s / 4)
    faults.heal(peers[1])

    assert question.result(5) == 0
    assert peers.call("epoch") == [epoch, epoch]


def test_faults_of_the_wire_need_a_relay(peer_group: PeerStarter, faults: Faults) -> None:
    [peer] = peer_group(1)

    for fault in (faults.partition, faults.heal, lambda peer: faults.delay(1, peer)):
        with pytest.raises(ValueError, match=r"start it with peer_group\(n, relay=True\)"):
            fault(peer)


def test_relayed_peers_refuse_a_sentinel(peer_group: PeerStarter) -> None:
    with pytest.raises(ValueError, match="sentinel=False"):
        peer_group(1, relay=True, settings=Settings())


def test_who_is_no_peer_of_a_fixture_is_left_alone(faults: Faults) -> None:
    with pytest.raises(PermissionError):
        faults.stop(os.getpid())
    with pytest.raises(LookupError):
        faults.cut(os.getpid())
