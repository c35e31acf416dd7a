"""Nodes that meet: handlers in threads of the test, and a real master in another. torchrun itself has its own file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.utils.store import barrier

from master_actor import serve
from master_actor.thread import MasterThread
from ray_pccl.control.endpoint import Endpoint
from ray_pccl.errors import SettingsError
from ray_pccl.settings import Settings
from ray_pccl.testing import eventually
from ray_pccl.torch import handlers
from ray_pccl.torch.rendezvous import PCCLRendezvousHandler
from ray_pccl.torch.round_store import RoundBrokenError

CALM = {"heartbeat_timeout_s": 10, "stall_timeout_s": 30, "sentinel": False, "last_call_s": 0.0}
PATIENCE_S = 20.0

Make = Callable[..., PCCLRendezvousHandler]


@pytest.fixture(autouse=True)
def no_master_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handlers write theirs there, for their workers; it is taken back after each test."""
    monkeypatch.setenv("RAY_PCCL_MASTER", "")


@pytest.fixture
def thread() -> Iterator[MasterThread]:
    thread = serve(settings=Settings(**CALM))
    thread.start()
    yield thread
    thread.stop("the test is over")


@pytest.fixture
def make(thread: MasterThread) -> Iterator[Make]:
    made: list[PCCLRendezvousHandler] = []

    def make_one(min_nodes: int = 1, max_nodes: int = 4, run_id: str = "run", **given: Any) -> PCCLRendezvousHandler:
        timeout = given.pop("join_timeout_s", PATIENCE_S)
        made.append(
            PCCLRendezvousHandler(
                "pccl",
                thread.server.endpoint,
                run_id,
                min_nodes,
                max_nodes,
                join_timeout_s=timeout,
                settings=Settings(**{**CALM, **given}),
            )
        )
        return made[-1]

    yield make_one
    for handler in made:
        handler._communicator.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def meet(pool: ThreadPoolExecutor, *nodes: PCCLRendezvousHandler) -> list[RendezvousInfo]:
    return [future.result(PATIENCE_S) for future in [pool.submit(node.next_rendezvous) for node in nodes]]


def until_waiting(number: int, *nodes: PCCLRendezvousHandler) -> None:
    eventually(
        lambda: [node.num_nodes_waiting() for node in nodes] == [number] * len(nodes),
        what=lambda: f"{[node.num_nodes_waiting() for node in nodes]}",
    )


def test_nodes_meet_and_share_a_store_and_the_place_where_their_workers_meet(make: Make, pool) -> None:
    first, second = make(2, 2), make(2, 2)
    infos = meet(pool, first, second)
    assert sorted(info.rank for info in infos) == [0, 1] and {info.world_size for info in infos} == {2}
    infos[0].store.set("k", "1")
    assert infos[1].store.get("k") == b"1"
    places = [info.bootstrap_store_info for info in infos]
    assert places[0] == places[1]
    worker = dist.TCPStore(places[0].master_addr, places[0].master_port, is_master=False, timeout=timedelta(seconds=5))
    worker.set("of the workers", "1")
    assert first.use_agent_store is True and first.get_run_id() == "run" and first.get_backend() == "pccl"
    assert first.num_nodes_waiting() == second.num_nodes_waiting() == 0 and not first.is_closed()


def test_without_a_shared_store_rank_0s_worker_gets_a_free_port(make: Make, pool, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    first, second = make(2, 2), make(2, 2)
    places = [info.bootstrap_store_info for info in meet(pool, first, second)]
    assert first.use_agent_store is False and places[0] == places[1]
    dist.TCPStore(places[0].master_addr, places[0].master_port, is_master=True, wait_for_workers=False)  # it is free


def test_a_late_node_is_told_of_and_let_in_when_all_meet_again(make: Make, pool) -> None:
    first, second, late = make(2, 3), make(2, 3), make(2, 3)
    before = meet(pool, first, second)
    waiting = pool.submit(late.next_rendezvous)
    until_waiting(1, first, second)
    assert not waiting.done()
    infos = [*meet(pool, first, second), waiting.result(PATIENCE_S)]
    assert [info.world_size for info in infos] == [3, 3, 3] and sorted(info.rank for info in infos) == [0, 1, 2]
    assert [info.rank for info in infos[:2]] == [info.rank for info in before]  # who was there keeps its place
    assert infos[2].rank == 2
    until_waiting(0, first, second, late)


def test_who_waits_while_the_run_is_full_is_not_told_of_until_there_is_room(make: Make, pool) -> None:
    first, second, surplus = make(2, 2), make(2, 2), make(2, 2)
    meet(pool, first, second)
    waiting = pool.submit(surplus.next_rendezvous)
    eventually(lambda: first._waiting == 1, what="the surplus node waits")
    assert first.num_nodes_waiting() == 0
    second._communicator.close()
    until_waiting(1, first)
    infos = [*meet(pool, first), waiting.result(PATIENCE_S)]
    assert [info.world_size for info in infos] == [2, 2]


def test_a_lost_node_alone_makes_the_others_meet_again(make: Make, pool, thread: MasterThread) -> None:
    nodes = [make(1, 3, last_call_s=1.0) for _ in range(3)]
    infos = meet(pool, *nodes)
    assert [info.world_size for info in infos] == [3, 3, 3]
    zero = next(node for node, info in zip(nodes, infos, strict=True) if info.rank == 0)
    others = [node for node in nodes if node is not zero]
    zero._communicator.close()
    until_waiting(1, *others)
    again = meet(pool, *others)
    assert sorted(info.rank for info in again) == [0, 1]
    # The workers' store was rank 0's: they have a new one, and all know it.
    assert again[0].bootstrap_store_info == again[1].bootstrap_store_info != infos[0].bootstrap_store_info
    until_waiting(0, *others)


def test_a_run_below_its_minimum_waits_for_a_new_node(make: Make, pool) -> None:
    first, second = make(2, 3), make(2, 3)
    meet(pool, first, second)
    second._communicator.close()
    until_waiting(1, first)
    meeting = pool.submit(first.next_rendezvous)
    time.sleep(0.2)
    assert not meeting.done()
    [info] = meet(pool, make(2, 3))
    assert meeting.result(PATIENCE_S).world_size == info.world_size == 2


def test_a_node_whose_worker_failed_calls_the_others(make: Make, pool) -> None:
    first, second = make(2, 2), make(2, 2)
    before = meet(pool, first, second)
    meeting: Future[RendezvousInfo] = pool.submit(first.next_rendezvous)
    until_waiting(1, second)
    assert not meeting.done()
    [info] = meet(pool, second)
    assert {meeting.result(PATIENCE_S).rank, info.rank} == {0, 1}
    assert info.bootstrap_store_info != before[0].bootstrap_store_info  # a server of its own for each round
    until_waiting(0, first, second)


def test_a_node_that_was_taken_for_dead_comes_back(make: Make, pool, thread: MasterThread) -> None:
    first, second = make(1, 2, last_call_s=5.0), make(1, 2, last_call_s=5.0)
    meet(pool, first, second)
    thread.evict(second._communicator.peer_id, "the test wants it")
    until_waiting(1, first, second)
    infos = meet(pool, first, second)
    assert sorted((info.rank, info.world_size) for info in infos) == [(0, 2), (1, 2)]


def test_a_last_call_ends_when_the_run_is_full_and_else_with_its_time(make: Make, pool) -> None:
    first, second = make(1, 2, last_call_s=1.0), make(1, 2, last_call_s=1.0)
    meet(pool, first, second)
    started = time.monotonic()
    meet(pool, first, second)  # full: nobody is waited for
    assert time.monotonic() - started < 1.0
    second._communicator.close()
    until_waiting(1, first)
    started = time.monotonic()
    assert meet(pool, first)[0].world_size == 1
    assert time.monotonic() - started >= 1.0


def test_rounds_leave_nothing_behind_in_the_store(make: Make, pool) -> None:
    first, second = make(2, 2), make(2, 2)
    for _ in range(3):
        for info in meet(pool, first, second):
            info.store.set(f"role/{info.rank}", "x")
    counts = set()
    for _ in range(3):
        meet(pool, first, second)
        eventually(lambda: not any("again" in key for key in _keys(first)), what="the call is forgotten")
        counts.add(first._communicator.store.num_keys())
    assert len(counts) == 1


def _keys(node: PCCLRendezvousHandler) -> list[str]:
    return [key for key in ("again/1.1", "again/1.2") if node._communicator.store.check([key])]


# ------------------------------------------------------------------------------------------ ends, and errors


def test_a_closed_run_lets_nobody_in_and_disturbs_nobody(make: Make, pool) -> None:
    first, second, late = make(2, 3), make(2, 3), make(2, 3)
    meet(pool, first, second)
    waiting = pool.submit(late.next_rendezvous)
    until_waiting(1, first, second)
    assert first.shutdown() is True
    with pytest.raises(RendezvousClosedError, match="--rdzv-id"):
        waiting.result(PATIENCE_S)
    eventually(lambda: len(second._communicator.members) == 1, what="the first has left")
    assert second.is_closed() and second.num_nodes_waiting() == 0
    for node in (second, make(2, 3)):
        with pytest.raises(RendezvousClosedError):
            node.next_rendezvous()
    make(1, 1, run_id="another").next_rendezvous()


def test_an_exit_barrier_ends_when_a_node_is_lost_and_not_when_all_have_passed(make: Make, pool) -> None:
    first, second = make(2, 2), make(2, 2)
    infos = meet(pool, first, second)
    passing = pool.submit(barrier, infos[0].store, 2, "passed", 60)
    barrier(infos[1].store, 2, "passed", 60)
    second.shutdown()
    passing.result(PATIENCE_S)
    eventually(lambda: first._why_over(first._round), what="the second has left")
    infos[0].store.wait(["passed/last_member"])  # what is there is there, whoever has left
    started = time.monotonic()
    with pytest.raises(RoundBrokenError, match="lost"):
        barrier(infos[0].store, 2, "other", 60)
    assert time.monotonic() - started < 10


def test_too_few_nodes_in_time(make: Make) -> None:
    with pytest.raises(RendezvousTimeoutError, match="needs 2"):
        make(2, 2, join_timeout_s=0.3).next_rendezvous()


def test_a_node_that_does_not_come_to_the_next_round_is_named(make: Make, pool) -> None:
    first, second = make(2, 2, join_timeout_s=3.0), make(2, 2)
    meet(pool, first, second)
    with pytest.raises(RendezvousTimeoutError, match=second._communicator.peer_id):
        first.next_rendezvous()


def test_nodes_that_want_other_numbers_of_nodes_are_refused(make: Make) -> None:
    make(1, 2).next_rendezvous()
    with pytest.raises(RendezvousError, match="max_world_size"):
        make(1, 3).next_rendezvous()


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_no_master(host: str) -> None:
    nobody = Endpoint(host, 9, b"key")
    handler = PCCLRendezvousHandler("pccl", nobody, "run", 1, 1, join_timeout_s=0.2, settings=Settings(**CALM))
    with pytest.raises(RendezvousConnectionError):
        handler.next_rendezvous()
    assert handler.num_nodes_waiting() == 0 and handler.is_closed() is False


def test_a_master_that_is_gone_neither_blocks_the_agents_nor_keeps_the_run_from_ending(thread: MasterThread) -> None:
    handler = PCCLRendezvousHandler(
        "pccl", thread.server.endpoint, "run", 1, 1, close_timeout_s=0.3, settings=Settings(**CALM)
    )
    handler.next_rendezvous()
    thread.crash()
    started = time.monotonic()
    assert handler.num_nodes_waiting() == 0
    assert time.monotonic() - started < 0.2
    assert handler.shutdown() is False
    assert time.monotonic() - started < 8


# --------------------------------------------------------------------------------------- as torchrun makes them


def _parameters(endpoint: str, **given: str) -> RendezvousParameters:
    return RendezvousParameters("pccl", endpoint, "run", 1, 2, **given)


def test_torchrun_makes_the_handler_from_its_arguments(thread: MasterThread) -> None:
    endpoint = thread.server.endpoint
    create = handlers.pccl()
    assert create is handlers.pccl()  # torch registers a name twice only with the same function
    parameters = _parameters(
        f"{endpoint.host}:{endpoint.port}", key=endpoint.key.hex(), join_timeout="2.5", last_call_timeout="0.25"
    )
    handler = create(parameters)
    assert handler._join_timeout_s == 2.5 and handler._communicator._settings.last_call_s == 0.25
    handler._communicator.close()
    # The workers find the same master.
    assert handlers._endpoint(_parameters("")) == endpoint


@pytest.mark.parametrize("given", [{"join_timeout": "soon"}, {"last_call_timeout": "-1"}])
def test_nonsense_in_the_configuration_is_an_error(thread: MasterThread, given: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match="rdzv-conf"):
        handlers.create_handler(_parameters(str(thread.server.endpoint), **given))


def test_no_endpoint_at_all_says_what_to_give() -> None:
    with pytest.raises(SettingsError, match="--rdzv-endpoint"):
        handlers.create_handler(_parameters(""))
