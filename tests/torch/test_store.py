"""What is our store's own: C++ callers, lifetimes, the master's restarts, open groups. The rest is the contract's."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from master_actor import serve
from master_actor.thread import MasterThread
from ray_pccl import Communicator
from ray_pccl.control.endpoint import Endpoint
from ray_pccl.errors import PCCLError
from ray_pccl.settings import Settings
from ray_pccl.testing import MasterProcess, eventually
from ray_pccl.torch import PCCLStore
from ray_pccl.torch import store as module
from ray_pccl.torch.store import StoreRefusedError, StoreUnavailableError, StoreWaitTimeoutError

CALM = Settings(heartbeat_timeout_s=10, stall_timeout_s=30, sentinel=False, last_call_s=0.0)
SHORT = timedelta(milliseconds=50)
GLOO_MEMBER = Path(__file__).parent / "gloo_member.py"

Connect = Callable[..., PCCLStore]


@pytest.fixture
def thread() -> Iterator[MasterThread]:
    thread = serve(settings=CALM)
    thread.start()
    yield thread
    thread.stop("the test is over")


@pytest.fixture
def connect(thread: MasterThread) -> Iterator[Connect]:
    made: list[PCCLStore] = []

    def connect_one(master: Endpoint | str | None = None, group: str = "g", **given: int) -> PCCLStore:
        made.append(PCCLStore.connect(master or thread.server.endpoint, group, settings=CALM, **given))
        return made[-1]

    yield connect_one
    for store in made:
        store.close()


# --------------------------------------------------------------------------------------------- for C++ callers


def test_torchs_own_test_of_python_stores_passes(connect: Connect) -> None:
    dist._test_python_store(connect())


def test_c_plus_plus_finds_every_method_under_the_name_it_looks_for(connect: Connect) -> None:
    behind = dist.PrefixStore("a", dist.PrefixStore("b", connect()))
    behind.set("k", "1")
    behind.multi_set(["l"], ["2"])
    behind.append("k", "0")
    assert behind.multi_get(["k", "l"]) == [b"10", b"2"]
    assert behind.compare_set("k", "10", "3") == b"3" and behind.add("k", 4) == 7
    assert behind.check(["k"]) and behind.num_keys() == 2 and behind.delete_key("k")
    behind.wait(["l"])
    behind.set_timeout(SHORT)
    with pytest.raises(StoreWaitTimeoutError, match="timeout"):
        behind.wait(["k"])
    assert behind.has_extended_api() and behind.timeout == SHORT


def test_both_spellings_are_there(connect: Connect) -> None:
    store = connect()
    store.set("k", "1")
    assert store.getNumKeys() == store.num_keys() == 1
    assert store.deleteKey("k") is True and store.delete_key("k") is False


@pytest.mark.parametrize("call", [("queue_push", "k", "v"), ("queue_pop", "k"), ("queue_len", "k"), ("list_keys",)])
def test_what_torch_never_asks_of_a_python_store_is_not_implemented(connect: Connect, call: tuple[str, ...]) -> None:
    store = connect()
    for each in (store, dist.PrefixStore("p", store)):
        with pytest.raises(NotImplementedError):
            getattr(each, call[0])(*call[1:])


def test_a_store_and_its_clones_outlive_the_names_that_held_them_until_they_are_closed(connect: Connect) -> None:
    store = connect()
    before = set(module._held.values())
    behind = dist.PrefixStore("p", PCCLStore(store.communicator))
    clone = behind.clone()
    gc.collect()
    behind.set("k", "1")
    assert clone.get("k") == b"1" and store.get("p/k") == b"1"
    added = set(module._held.values()) - before
    assert len(added) == 2
    for each in added:
        each.close()
    assert set(module._held.values()) == before


def test_with_the_store_that_connected_its_clones_are_let_go(connect: Connect) -> None:
    before = set(module._held.values())
    store = connect()
    store.clone()
    store.close()
    assert set(module._held.values()) == before


def test_a_clone_has_a_timeout_of_its_own(connect: Connect) -> None:
    store = connect()
    clone = store.clone()
    clone.set_timeout(SHORT)
    assert store.timeout == module.DEFAULT_TIMEOUT and clone.timeout == SHORT
    clone.close()
    store.set("k", "1")  # a clone's end is nobody else's


@pytest.mark.slow
def test_gloo_forms_its_group_over_the_store(thread: MasterThread) -> None:
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    members = [
        subprocess.Popen(
            [sys.executable, str(GLOO_MEMBER), str(thread.server.endpoint), str(rank), "2"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outcomes = [(member.communicate(timeout=90), member.returncode) for member in members]
    assert [(out.strip(), code) for (out, _), code in outcomes] == [("6", 0), ("6", 0)], outcomes


# ------------------------------------------------------------------------------------------------------ errors


def test_errors_are_torchs_and_ours_and_pickle(connect: Connect) -> None:
    store = connect()
    store.set("k", "many")
    with pytest.raises(dist.DistStoreError, match="many") as refused:
        store.add("k", 1)
    with pytest.raises(dist.DistStoreError, match="timeout") as late:
        store.wait(["absent"], SHORT)
    assert isinstance(refused.value, StoreRefusedError) and late.value.keys == ("absent",)
    for error in (refused.value, late.value):
        again = pickle.loads(pickle.dumps(error))
        assert isinstance(again, RuntimeError) and isinstance(again, PCCLError) and str(again) == str(error)


def test_a_value_over_the_limit_is_refused(connect: Connect) -> None:
    with pytest.raises(StoreRefusedError, match="limit"):
        connect().set("k", bytes((4 << 20) + 1))


def test_keys_and_values_of_different_number_are_refused(connect: Connect) -> None:
    with pytest.raises(dist.DistStoreError):
        connect().multi_set(["a", "b"], ["1"])


def test_a_store_that_is_closed_says_so(connect: Connect) -> None:
    store = connect()
    store.close()
    with pytest.raises(StoreUnavailableError, match="not connected"):
        store.get("k")


def test_no_master_is_a_network_error_as_torchs_is() -> None:
    nobody = Endpoint("127.0.0.1", 9, b"key")
    with pytest.raises(dist.DistNetworkError, match="no master answered"):
        PCCLStore.connect(nobody, "g", timeout=timedelta(seconds=0.2), settings=CALM)


def test_a_store_of_ones_own_communicator_does_not_close_it(thread: MasterThread) -> None:
    with Communicator("g", master=thread.server.endpoint, settings=CALM) as communicator:
        store = PCCLStore(communicator)
        store.set("k", "1")
        store.close()
        assert communicator.store.get("k") == b"1"


# ------------------------------------------------------------------------------------------------- open groups


def test_who_comes_later_is_let_in_by_the_members(connect: Connect) -> None:
    stores = [connect()]
    for place in range(3):
        stores[-1].set(f"{place}", "x")
        stores.append(connect())
        assert stores[-1].multi_get([f"{earlier}" for earlier in range(place + 1)]) == [b"x"] * (place + 1)
    assert len(stores[0].communicator.members) == 4


def test_many_who_come_at_once_are_all_let_in(connect: Connect) -> None:
    stores: list[PCCLStore] = []
    threads = [threading.Thread(target=lambda: stores.append(connect())) for _ in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sorted(store.add("n", 1) for store in stores) == [1, 2, 3, 4, 5, 6]


def test_connecting_can_wait_for_a_number_of_others(connect: Connect) -> None:
    stores: list[PCCLStore] = []
    first = threading.Thread(target=lambda: stores.append(connect(world_size=2)))
    first.start()
    time.sleep(0.2)
    assert stores == []
    connect(world_size=2).set("k", "1")
    first.join()
    assert stores[0].get("k") == b"1"


def test_the_store_lasts_as_long_as_a_member(connect: Connect) -> None:
    first, second = connect(), connect()
    first.set("k", "1")
    first.close()
    assert second.get("k") == b"1"
    second.close()
    assert connect().check(["k"]) is False


def test_a_member_that_was_taken_for_dead_joins_again_with_its_next_call(
    connect: Connect, thread: MasterThread
) -> None:
    first, second = connect(), connect()
    clone = second.clone()
    first.set("k", "1")
    thread.evict(second.communicator.peer_id, "the test wants it")
    eventually(lambda: len(first.communicator.members) == 1, what="the eviction")
    assert clone.get("k") == b"1" and second.get("k") == b"1"
    eventually(lambda: len(first.communicator.members) == 2, what="the others are told")


# -------------------------------------------------------------------------------------------- the master's end


def test_requests_count_once_through_the_masters_death_and_return(
    connect: Connect, master_process: MasterProcess
) -> None:
    store, other = (connect(master_process.endpoint) for _ in range(2))
    sums: list[int] = []
    adding = threading.Thread(target=lambda: [sums.append(store.add("n", 1)) for _ in range(200)])
    values: list[bytes] = []
    waiting = threading.Thread(target=lambda: values.append(other.get("end")))
    waiting.start()
    adding.start()
    eventually(lambda: len(sums) >= 20, what="some sums")
    for _ in range(2):
        known = len(sums)
        master_process.kill()
        master_process.start()
        eventually(lambda known=known: len(sums) > min(known, 199), what="the master is back")
    adding.join(30)
    assert sums == list(range(1, 201))
    newcomer = connect(master_process.endpoint)  # the members let in who comes after the restart
    newcomer.set("end", "1")
    waiting.join(10)
    assert values == [b"1"] and newcomer.get("n") == b"200"
