"""The state of torch's own rendezvous, at the master: fencing tokens, and what torch's handler makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousStateError,
)

from master_actor import serve
from master_actor.thread import MasterThread
from ray_pccl.control.endpoint import Endpoint
from ray_pccl.settings import Settings
from ray_pccl.torch import PCCLStore, handlers
from ray_pccl.torch.rendezvous_backend import PCCLRendezvousBackend

CALM = Settings(heartbeat_timeout_s=10, stall_timeout_s=30, sentinel=False, last_call_s=0.0)

Make = Callable[[], PCCLRendezvousBackend]


@pytest.fixture
def thread() -> Iterator[MasterThread]:
    thread = serve(settings=CALM)
    thread.start()
    yield thread
    thread.stop("the test is over")


@pytest.fixture
def make(thread: MasterThread) -> Iterator[Make]:
    stores: list[PCCLStore] = []

    def make_one() -> PCCLRendezvousBackend:
        stores.append(PCCLStore.connect(thread.server.endpoint, "g", settings=CALM))
        return PCCLRendezvousBackend(stores[-1], "run")

    yield make_one
    for store in stores:
        store.close()


def test_there_is_no_state_at_first(make: Make) -> None:
    assert make().get_state() is None


def test_a_state_and_its_token_are_read_by_all(make: Make) -> None:
    one, other = make(), make()
    state, token, was_set = one.set_state(b"x")
    assert (state, was_set) == (b"x", True)
    assert other.get_state() == (b"x", token) == one.get_state()


def test_with_the_present_token_a_state_is_replaced(make: Make) -> None:
    one, other = make(), make()
    _, token, _ = one.set_state(b"x")
    state, newer, was_set = other.set_state(b"y", token)
    assert (state, was_set) == (b"y", True) and newer != token
    assert one.get_state() == (b"y", newer)


def test_an_older_token_is_refused_and_the_present_state_is_told(make: Make) -> None:
    one, other = make(), make()
    _, token, _ = one.set_state(b"x")
    _, newer, _ = other.set_state(b"y", token)
    assert one.set_state(b"z", token) == (b"y", newer, False)


def test_without_a_token_only_the_first_state_is_set(make: Make) -> None:
    one, other = make(), make()
    _, token, _ = one.set_state(b"x")
    assert other.set_state(b"y") == (b"x", token, False)


def test_the_same_bytes_again_are_another_state(make: Make) -> None:
    one, other = make(), make()
    _, token, _ = one.set_state(b"x")
    _, newer, was_set = one.set_state(b"x", token)
    assert was_set and newer != token
    # Another's write of the same bytes is neither this one's, nor what this one has read.
    assert other.set_state(b"x", token) == (b"x", newer, False)
    assert other.set_state(b"x") == (b"x", newer, False)


@pytest.mark.parametrize("token", [object(), "text", 7])
def test_what_is_no_token_of_ours_is_refused(make: Make, token: object) -> None:
    one = make()
    assert one.set_state(b"x", token) is None
    _, present, _ = one.set_state(b"x")
    assert one.set_state(b"y", token) == (b"x", present, False)


def test_a_token_of_a_state_that_is_gone_sets_nothing(make: Make) -> None:
    one = make()
    _, token, _ = one.set_state(b"x")
    one._store.delete_key(one._key)
    assert one.set_state(b"y", token) is None and one.get_state() is None


def test_garbage_is_a_corrupt_state(make: Make) -> None:
    one = make()
    one._store.set(one._key, b"short")
    with pytest.raises(RendezvousStateError, match="short"):
        one.get_state()
    one._store.set(one._key, b"never")
    with pytest.raises(RendezvousStateError):
        one.get_state()


def test_a_store_that_can_not_be_reached_is_a_connection_error(make: Make) -> None:
    one = make()
    one._store.close()
    with pytest.raises(RendezvousConnectionError):
        one.get_state()


def test_a_run_has_an_id(make: Make) -> None:
    with pytest.raises(ValueError, match="non-empty"):
        PCCLRendezvousBackend(make()._store, "")


def test_of_many_writers_with_one_token_one_wins(make: Make) -> None:
    backends = [make() for _ in range(4)]
    _, token, _ = backends[0].set_state(b"x")
    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(lambda b: b.set_state(b"same", token), backends))
    assert sum(was_set for _, _, was_set in outcomes) == 1
    assert len({newer for _, newer, _ in outcomes}) == 1


def test_torchs_handler_meets_on_it(thread: MasterThread, monkeypatch) -> None:
    monkeypatch.setenv("RAY_PCCL_SENTINEL", "0")
    monkeypatch.setenv("RAY_PCCL_MASTER", str(thread.server.endpoint))
    nodes = [
        handlers.pccl_dynamic()(RendezvousParameters("pccl-dynamic", "", "run", 2, 2, local_addr="127.0.0.1"))
        for _ in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        infos = list(pool.map(lambda node: node.next_rendezvous(), nodes))
    assert {(info.rank, info.world_size) for info in infos} == {(0, 2), (1, 2)}
    assert nodes[0].get_backend() == "pccl-dynamic"
    infos[0].store.set("k", "1")
    assert infos[1].store.get("k") == b"1"
    for node in nodes:
        assert node.shutdown()
        node._store.close()


def test_no_master_for_torchs_handler(monkeypatch) -> None:
    monkeypatch.setattr("ray_pccl.torch.rendezvous_backend.CONNECT_TIMEOUT", timedelta(seconds=0.2))
    monkeypatch.setenv("RAY_PCCL_MASTER", str(Endpoint("127.0.0.1", 9, b"key")))
    with pytest.raises(RendezvousConnectionError):
        handlers.create_dynamic_handler(RendezvousParameters("pccl-dynamic", "", "run", 1, 1))
