import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

import ray_pccl
from master_actor.actor import MASTER_NAME
from ray_pccl import (
    Attribute,
    MasterNotFoundError,
    MasterStoppedError,
    MembershipChange,
    PeerEvictedError,
    RendezvousClosedError,
    Settings,
)
from ray_pccl.driver.master import DEFAULT_NAMESPACE
from ray_pccl.testing import Faults, eventually
from tests.ray.peers import PeerActor, call, call_all, end, get, start

pytestmark = pytest.mark.ray

SECOND_DRIVER = """
import sys, ray, ray_pccl
ray.init(address=sys.argv[1], log_to_driver=False)
master = ray_pccl.start_master()
comm = ray_pccl.Communicator("drivers", min_world_size=2)
comm.connect(30)
comm.store.set("pid", str(ray.get(master.pid.remote())))
comm.close()
"""


@pytest.fixture
def master(ray_local: Any) -> Iterator[Any]:
    yield ray_pccl.start_master()
    ray_pccl.stop_master()


def master_pid() -> int | None:
    """The master's process; None while Ray restarts it."""
    try:
        pid: int = get(ray.get_actor(MASTER_NAME, namespace=DEFAULT_NAMESPACE).pid.remote())
    except RayActorError:
        return None
    return pid


def deaths(peer: Any) -> dict[str, str]:
    return {e.peer_id: e.reason for e in get(peer.told.remote()) if e.change is MembershipChange.LOST}


def test_connecting_without_a_master_says_that_there_is_none(ray_local: Any) -> None:
    with pytest.raises(MasterNotFoundError, match=r"call ray_pccl\.start_master\(\) first"):
        ray_pccl.Communicator("lonely").connect(5)
    peer = PeerActor.remote(peer_group="lonely")
    with pytest.raises(MasterNotFoundError):
        call(peer, "connect", 5)
    ray_local.kill(peer)


def test_starting_the_master_twice_gives_the_same_one(master: Any) -> None:
    assert ray_pccl.start_master()._actor_id == master._actor_id
    assert get(ray_pccl.start_master().pid.remote()) == get(master.pid.remote())


def test_starting_the_master_while_ray_restarts_it_waits_for_it(master: Any, faults: Faults) -> None:
    old = get(master.pid.remote())
    faults.kill(old)

    assert get(ray_pccl.start_master().pid.remote()) != old


def test_a_driver_in_another_process_finds_the_master_and_its_groups(ray_local: Any, master: Any) -> None:
    address = ray_local.get_runtime_context().gcs_address
    other = subprocess.Popen([sys.executable, "-c", SECOND_DRIVER, address])
    comm = ray_pccl.Communicator("drivers", min_world_size=2)

    comm.connect(30)

    assert comm.world_size == 2
    assert comm.store.get("pid", 20) == str(get(master.pid.remote())).encode()
    comm.close()
    assert other.wait(20) == 0


def test_actors_form_a_group_and_use_all_that_a_communicator_offers(ray_local: Any, master: Any) -> None:
    peers = start(2, peer_group="train", min_world_size=2, max_world_size=3)
    assert sorted(call_all(peers, "rank")) == [0, 1]
    assert call_all(peers, "world_size") == [2, 2]
    [epoch] = set(call_all(peers, "epoch"))
    members = call(peers[0], "members")
    assert {members[rank] for rank in call_all(peers, "rank")} == set(call_all(peers, "peer_id"))
    assert call(peers[0], "get_attribute", Attribute.GLOBAL_WORLD_SIZE) == 2
    assert call(peers[0], "get_attribute", Attribute.NUM_DISTINCT_PEER_GROUPS) == 1

    # Nobody else calls it: the first call of an admitted peer is absorbed.
    call(peers[0], "update_topology")

    waiting = peers[1].call.remote("store.wait", ["k"], 20)
    call(peers[0], "store.set", "k", b"v")
    get(waiting)
    assert call(peers[1], "store.get", "k", 5) == b"v"
    assert call_all(peers, "are_peers_pending") == [False, False]

    late = PeerActor.remote(peer_group="train", min_world_size=2, max_world_size=3)
    joining = late.call.remote("connect", 60)
    eventually(lambda: call(peers[0], "num_waiting") == 1, 30)
    assert call_all(peers, "are_peers_pending") == [True, True]
    call_all(peers, "update_topology")  # peers[1] has met the others in a vote: its first one is not absorbed
    get(joining)
    assert call_all([*peers, late], "world_size") == [3, 3, 3]
    assert call_all([*peers, late], "epoch") == [epoch + 1] * 3
    told = eventually(lambda: len(events := get(peers[0].told.remote())) >= 3 and events)
    assert [e.change for e in told] == [MembershipChange.EPOCH, MembershipChange.WAITING, MembershipChange.EPOCH]
    assert told[1].peer_id == call(late, "peer_id")

    assert not call(late, "is_closed")
    call(late, "set_closed")
    assert call(peers[0], "is_closed")
    refused = PeerActor.remote(peer_group="train", min_world_size=2, max_world_size=3)
    with pytest.raises(RendezvousClosedError):
        call(refused, "connect", 10)
    end([refused, late, *peers])


def test_a_killed_actor_is_gone_from_the_next_epoch_and_the_others_are_told_why(master: Any, faults: Faults) -> None:
    peers = start(3, peer_group="mortal", min_world_size=3)
    [epoch] = set(call_all(peers, "epoch"))
    victim = call(peers[1], "peer_id")

    faults.kill(get(peers[1].pid.remote()))

    survivors = [peers[0], peers[2]]
    eventually(lambda: call_all(survivors, "epoch") == [epoch + 1] * 2, 5)
    assert call_all(survivors, "world_size") == [2, 2]
    assert all(victim not in members for members in call_all(survivors, "members"))
    noticed = (
        {victim: "its process is exiting"},
        {victim: "its connection to the master closed"},
    )  # whichever is first
    for survivor in survivors:
        eventually(lambda peer=survivor: deaths(peer) in noticed, 5)
    end(survivors)


def test_a_killed_master_comes_back_with_its_groups_and_admits_newcomers(master: Any, faults: Faults) -> None:
    peers = start(2, peer_group="lasting", min_world_size=2, max_world_size=3)
    epochs = call_all(peers, "epoch")
    call(peers[0], "store.set", "kept", b"yes")
    call_all(peers, "update_topology")  # absorbed
    old = get(master.pid.remote())
    killed = time.monotonic()

    faults.kill(old)

    newcomer = PeerActor.remote(peer_group="lasting", min_world_size=2, max_world_size=3)
    joining = newcomer.call.remote("connect", 60)
    eventually(lambda: call(peers[0], "num_waiting") == 1, 20)
    assert call_all(peers, "epoch") == epochs
    assert call_all(peers, "store.get", "kept", 5) == [b"yes", b"yes"]
    call_all(peers, "update_topology")
    get(joining)
    assert time.monotonic() - killed < 10
    assert get(master.pid.remote()) != old
    assert call_all([*peers, newcomer], "world_size") == [3, 3, 3]
    assert call(newcomer, "store.get", "kept", 5) == b"yes"
    end([*peers, newcomer])


def test_stopping_the_master_ends_pending_calls_and_refuses_later_ones(ray_local: Any, master: Any) -> None:
    peers = start(2, peer_group="stopped", min_world_size=2)
    call_all(peers, "update_topology")  # absorbed
    voting = peers[0].call.remote("update_topology")
    waiting = peers[1].call.remote("store.wait", ["never"], 50)
    outside = PeerActor.remote(peer_group="stopped", min_world_size=2)
    joining = outside.call.remote("connect", 50)
    eventually(lambda: call(peers[0], "num_waiting") == 1, 30)
    stopped = time.monotonic()

    ray_pccl.stop_master()

    for pending in (voting, waiting, joining):
        with pytest.raises(MasterStoppedError, match=r"stop_master\(\) was called"):
            get(pending)
    assert time.monotonic() - stopped < 10
    for name, *args in (("update_topology",), ("num_waiting",), ("store.set", "k", b"v"), ("are_peers_pending",)):
        with pytest.raises(MasterStoppedError):
            call(peers[0], name, *args)
    with pytest.raises(MasterNotFoundError):
        ray_pccl.Communicator("stopped").connect(5)
    end([*peers, outside])


def test_a_master_that_is_stopped_while_ray_restarts_it_is_gone_for_good(master: Any, faults: Faults) -> None:
    peers = start(2, peer_group="halted", min_world_size=2)
    call_all(peers, "update_topology")  # absorbed
    voting = peers[0].call.remote("update_topology")

    faults.kill(get(master.pid.remote()))
    ray_pccl.stop_master()

    with pytest.raises(MasterStoppedError):
        get(voting, 20)
    with pytest.raises(MasterStoppedError):
        call(peers[1], "num_waiting")
    ray_pccl.start_master()
    [fresh] = start(1, peer_group="halted")
    assert call(fresh, "epoch") == 1
    end([*peers, fresh])


def test_members_of_a_stopped_master_do_not_wait_for_it_when_another_is_started(master: Any, faults: Faults) -> None:
    faults.kill(get(master.pid.remote()))  # so that the next master counts its boots from below
    comm = ray_pccl.Communicator("orphaned", settings=Settings(master_timeout_s=8))
    with contextlib.closing(comm):
        comm.connect(30)
        faults.kill(eventually(master_pid, 20))  # nobody is left to tell the member

        ray_pccl.stop_master()
        ray_pccl.start_master()

        with pytest.raises((MasterStoppedError, PeerEvictedError)):
            comm.num_waiting()


def test_a_master_that_is_started_after_a_stop_knows_nothing_of_the_one_before(ray_local: Any, master: Any) -> None:
    [peer] = start(1, peer_group="twice")
    call(peer, "store.set", "k", b"old")
    ray_pccl.stop_master()

    ray_pccl.start_master()

    [fresh] = start(1, peer_group="twice")
    assert call(fresh, "epoch") == 1
    assert not call(fresh, "store.check", ["k"])
    end([peer, fresh])


def test_stopping_when_there_is_no_master_does_nothing(ray_local: Any) -> None:
    ray_pccl.stop_master()
    with pytest.raises(ray_pccl.MasterNotFoundError, match="start_master"):
        ray_pccl.Communicator("none").connect(timeout=10)
