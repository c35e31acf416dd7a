import os
import signal
import time

import pytest

from ray_pccl import (
    Attribute,
    MembershipChange,
    NotConnectedError,
    OperationTimeoutError,
    Settings,
    StoreTimeoutError,
)
from ray_pccl.testing import Faults, PeerGroup, PeerProcess, PeerProcessEndedError, PeerStarter, eventually


class UnusualError(Exception):
    """Pickles, but can't be made anew from what was pickled."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


def raise_unusual(comm: object) -> None:
    raise UnusualError("this", "that")


def changes(peer: PeerProcess) -> list[MembershipChange]:
    return [stamped.event.change for stamped in peer.events()]


def test_a_group_of_three_is_three_processes_in_one_epoch(peer_group: PeerStarter) -> None:
    peers = peer_group(3)

    assert len({peer.pid for peer in peers} | {os.getpid()}) == 4
    assert sorted(peer.rank for peer in peers) == [0, 1, 2]
    assert {peer.world_size for peer in peers} == {3}
    assert {peer.epoch for peer in peers} == {peers[0].epoch}
    members = peers[0].members
    assert [members[peer.rank] for peer in peers] == [peer.peer_id for peer in peers]
    assert peers.call("get_attribute", Attribute.GLOBAL_WORLD_SIZE) == [3, 3, 3]


def test_the_arguments_of_the_communicator_are_passed_on(peer_group: PeerStarter) -> None:
    peers = peer_group(0, peer_group="named", min_world_size=2, max_world_size=2)
    [last] = peers.add(1, rank=1)
    [first] = peers.add(1, rank=0)
    last.joined.result(20)
    first.joined.result(20)

    assert (first.rank, last.rank) == (0, 1)
    assert first.call("peer_group") == "named"


def test_two_groups_on_one_master_are_apart(peer_group: PeerStarter, faults: Faults) -> None:
    one = peer_group(2, peer_group="one")
    other = peer_group(2, peer_group=2)
    epochs = other.call("epoch")
    faults.kill(one[0])

    one[1].wait_epoch(one[1].epoch + (one[1].world_size == 2))

    assert one[1].members == (one[1].peer_id,)
    assert other.call("world_size") == [2, 2]
    assert other.call("epoch") == epochs


def test_peers_that_are_added_wait_until_the_members_vote_them_in(peer_group: PeerStarter) -> None:
    peers = peer_group(2)
    epoch = peers[0].epoch
    peers.call("update_topology")  # the first one is absorbed
    [late] = peers.add()
    eventually(lambda: peers[0].call("num_waiting") == 1)
    assert not late.joined.done()

    for member in peers[:2]:
        member.call_async("update_topology")

    late.joined.result(10)
    peers.wait_epoch(epoch + 1)
    assert peers.call("world_size") == [3, 3, 3]


def test_an_error_is_raised_with_its_type_its_attributes_and_the_traceback_of_the_peer(peer_group: PeerStarter) -> None:
    peers = peer_group(2)
    peers.call("update_topology")

    with pytest.raises(OperationTimeoutError) as caught:
        peers[0].call("update_topology", 0.2)
    with pytest.raises(StoreTimeoutError):
        peers[1].call("store.wait", ["absent"], 0.1)

    assert peers[0].peer_id in caught.value.calls
    assert "update_topology" in caught.value.__notes__[0]
    assert str(peers[0]) in caught.value.__notes__[0]


def test_an_error_that_can_not_be_unpickled_is_told_as_text(peer_group: PeerStarter) -> None:
    [peer] = peer_group(1)

    with pytest.raises(RuntimeError, match="UnusualError: this and that"):
        peer.run(raise_unusual)


def test_a_peer_that_is_blocked_can_be_looked_at(peer_group: PeerStarter) -> None:
    peers = peer_group(2)
    peers.call("update_topology")
    blocked = peers[0].call_async("update_topology")

    assert peers[0].rank in (0, 1)
    with pytest.raises(TimeoutError, match=r"has not answered store\.wait\(\) within 0\.1 s"):
        peers[0].call("store.wait", ["absent"], 5, timeout=0.1)
    assert not blocked.done()

    peers[1].call("update_topology")
    blocked.result(10)


def test_local_functions_run_in_the_process_of_the_peer(peer_group: PeerStarter) -> None:
    peers = peer_group(2)
    offset = 100

    def where(comm: object, more: int) -> tuple[int, int]:
        assert comm.world_size == 2  # type: ignore[attr-defined]
        return os.getpid(), comm.rank + offset + more  # type: ignore[attr-defined]

    assert [peer.run(where, 1000) for peer in peers] == [(peer.pid, peer.rank + 1100) for peer in peers]


def test_a_killed_peer_is_still_known_by_name_and_answers_no_more(peer_group: PeerStarter, faults: Faults) -> None:
    peers = peer_group(2)
    peer_id = peers[0].peer_id
    pending = peers[0].call_async("store.wait", ["absent"], 60)
    faults.kill(peers[0])

    with pytest.raises(PeerProcessEndedError, match=f"{peer_id}.*code -9"):
        pending.result(10)
    with pytest.raises(PeerProcessEndedError):
        peers[0].call("rank")
    assert peers[0].peer_id == peer_id
    assert not peers[0].alive
    assert len(peers.call("rank")) == 1


def test_the_death_of_a_peer_is_seen_though_a_forked_child_lives_on(peer_group: PeerStarter, faults: Faults) -> None:
    def fork(comm: object) -> int:
        child = os.fork()
        if child == 0:
            signal.pause()
        return child

    [peer] = peer_group(1)
    child = peer.run(fork)
    pending = peer.call_async("store.wait", ["absent"], 60)
    faults.kill(peer)

    with pytest.raises(PeerProcessEndedError):
        pending.result(10)
    faults.kill(child)


def test_a_peer_that_exits_in_an_orderly_way_has_left(peer_group: PeerStarter) -> None:
    peers = peer_group(2)
    epoch = peers[1].epoch

    assert peers[0].exit() == 0

    peers[1].wait_epoch(epoch + 1)
    [left] = [s.event for s in peers[1].events() if s.event.change is MembershipChange.LEFT]
    assert left.peer_id == peers[0].peer_id


def test_events_are_stamped_with_the_clock_of_the_test(peer_group: PeerStarter, faults: Faults) -> None:
    before = time.monotonic()
    peers = peer_group(2)
    [first] = eventually(peers[0].events, 10, "the callback, which has a thread of its own, has run")
    formed = time.monotonic()
    assert before < first.at < formed and first.event.epoch == peers[0].epoch

    faults.kill(peers[1])
    peers[0].wait_epoch(peers[0].epoch + (peers[0].world_size == 2))

    assert changes(peers[0]) == [MembershipChange.EPOCH, MembershipChange.LOST, MembershipChange.EPOCH]
    assert all(formed < stamped.at < time.monotonic() for stamped in peers[0].events()[1:])


def test_waiting_for_an_epoch_that_does_not_come_fails(peer_group: PeerStarter) -> None:
    peers: PeerGroup = peer_group(1)

    with pytest.raises(AssertionError, match=r"is in epoch 1 after 0\.1 s"):
        peers.wait_epoch(99, 0.1)


def test_peers_can_be_started_without_connecting(peer_group: PeerStarter) -> None:
    peers = peer_group(2, connect=False)
    with pytest.raises(NotConnectedError):
        peers[0].rank  # noqa: B018

    peers.call("connect")

    assert sorted(peers.call("rank")) == [0, 1]


def test_a_group_can_be_given_settings_and_environment(peer_group: PeerStarter) -> None:
    settings = Settings(store_timeout_s=0.05, last_call_s=0.0)
    [peer] = peer_group(1, settings=settings, environment={"SHADE": "blue"})

    with pytest.raises(StoreTimeoutError):
        peer.call("store.get", "absent")
    assert peer.run(lambda comm: os.environ["SHADE"]) == "blue"
