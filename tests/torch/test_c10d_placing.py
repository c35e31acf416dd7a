"""Where a process group lives, and what an ended program leaves of it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ray_pccl.control.endpoint import Endpoint
from ray_pccl.errors import MasterUnreachableError, PCCLError, SettingsError, UsageError
from ray_pccl.testing import eventually
from ray_pccl.torch import Options, own_master, placing
from tests.torch.test_c10d_faults import listens
from tests.torch.zygote import Zygote

HERE = Endpoint.parse("127.0.0.1:1234#aabb")
THERE = Endpoint.parse("127.0.0.1:4321#ccdd")
MINUTE = timedelta(minutes=1)


@pytest.fixture
def known() -> Iterator[Endpoint]:
    """A master that answers, as far as one can tell from here."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield Endpoint("127.0.0.1", server.getsockname()[1], bytes.fromhex("eeff"))


def test_rank_zero_decides_and_the_others_take_its_word(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setenv("RAY_PCCL_MASTER", str(HERE))
    first = placing.find_place(Options(), store, 0, 2, MINUTE, None)
    monkeypatch.setenv("RAY_PCCL_MASTER", str(THERE))
    assert placing.find_place(Options(), store, 1, 2, MINUTE, None) == first
    assert first.master == HERE


def test_a_master_that_is_given_comes_before_the_environments_and_that_before_a_known_one(
    monkeypatch: pytest.MonkeyPatch, known: Endpoint
) -> None:
    monkeypatch.setenv("RAY_PCCL_MASTER", str(HERE))
    assert placing.find_place(Options(master=str(THERE)), dist.HashStore(), 0, 1, MINUTE, None).master == THERE
    assert placing.find_place(Options(), dist.HashStore(), 0, 1, MINUTE, known).master == HERE
    monkeypatch.delenv("RAY_PCCL_MASTER")
    assert placing.find_place(Options(), dist.HashStore(), 0, 1, MINUTE, known).master == known


def test_a_known_master_that_does_not_answer_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_PCCL_MASTER", raising=False)
    monkeypatch.setattr(placing, "start_master_process", lambda host: HERE)
    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = Endpoint("127.0.0.1", server.getsockname()[1], bytes.fromhex("eeff"))
    assert placing.find_place(Options(), dist.HashStore(), 0, 1, MINUTE, gone).master == HERE


def test_a_master_of_our_own_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_master, "START_S", 0.05)
    monkeypatch.setattr(own_master.sys, "executable", "/bin/yes")  # it starts, and never gives an address
    monkeypatch.setattr(own_master.select, "select", lambda *_: ([], [], []))
    with pytest.raises(MasterUnreachableError, match="did not start"):
        own_master.start_master_process("127.0.0.1")


def live_again(rank: int, path: str) -> list[float]:
    store = dist.FileStore(path, 2)
    found = []
    for life in range(3):
        time.sleep(0.0 if rank else 0.3)  # so that the other looks for the place before there is one
        dist.init_process_group("pccl", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
        tensor = torch.full((1,), float(life))
        dist.all_reduce(tensor)
        found.append(tensor.item())
        dist.destroy_process_group()
    return found


def test_a_store_serves_one_group_after_another(zygote: Zygote) -> None:
    assert zygote.run(live_again, 2, group=False) == [[0.0, 2.0, 4.0]] * 2


def disagree(rank: int, path: str, odd: int) -> tuple[float, str]:
    began = time.monotonic()
    options = Options(elastic=rank == odd)
    with pytest.raises(UsageError) as caught:
        store = dist.FileStore(path, 3)
        dist.init_process_group("pccl", store=store, rank=rank, world_size=3, timeout=MINUTE, pg_options=options)
    return time.monotonic() - began, str(caught.value)


@pytest.mark.parametrize("odd", [0, 2])
def test_options_that_differ_are_an_error_on_all_at_once(zygote: Zygote, odd: int) -> None:
    for seconds, text in zygote.run(disagree, 3, odd, group=False):
        assert seconds < 20.0 and "elastic=True" in text and "elastic=False" in text


def have_no_master(rank: int, path: str) -> tuple[float, str]:
    began = time.monotonic()
    options = Options(master="nowhere:1")  # without its key
    with pytest.raises(PCCLError) as caught:
        store = dist.FileStore(path, 2)
        dist.init_process_group("pccl", store=store, rank=rank, world_size=2, timeout=MINUTE, pg_options=options)
    return time.monotonic() - began, str(caught.value)


def test_a_rank_zero_without_a_master_tells_the_others(zygote: Zygote) -> None:
    environment = {"RAY_PCCL_MASTER": None, "RAY_PCCL_KEY": None}
    for seconds, text in zygote.run(have_no_master, 2, group=False, environment=environment):
        assert seconds < 20.0 and "key" in text


def test_names_are_new_each_time_unless_newcomers_have_to_know_them(known: Endpoint) -> None:
    places = [placing.find_place(Options(group="mine"), dist.HashStore(), 0, 1, MINUTE, known) for _ in range(2)]
    assert places[0].group != places[1].group and all(place.group.startswith("mine/") for place in places)
    options = Options(group="mine", elastic=True)
    assert placing.find_place(options, dist.HashStore(), 0, 1, MINUTE, known).group == "mine"


def test_a_master_without_its_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_PCCL_KEY", raising=False)
    with pytest.raises(SettingsError, match="key"):
        placing.find_place(Options(master="somewhere:1"), dist.HashStore(), 0, 1, MINUTE, None)


def test_a_master_of_our_own_listens_where_ranks_on_other_hosts_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_master, "address_towards", lambda host, port: f"on the way to {host}")
    assert own_master._own_address("10.1.1.1") == "on the way to 10.1.1.1"
    monkeypatch.setattr(own_master, "address_towards", lambda host, port: "127.0.0.1" if host == "me" else "10.2.2.2")
    assert own_master._own_address("me") == "127.0.0.1"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert own_master._own_address("me") == "10.2.2.2"


def take_other_options(rank: int, path: str) -> str:
    with pytest.raises(TypeError) as caught:
        dist.init_process_group("pccl", store=dist.FileStore(path, 1), rank=0, world_size=1, pg_options=object())
    return str(caught.value)


def test_options_of_another_backend_are_refused(zygote: Zygote) -> None:
    assert "ray_pccl.torch.Options" in zygote.run(take_other_options, 1, group=False)[0]


PROGRAM = """
import sys, torch, torch.distributed as dist, ray_pccl.torch
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("pccl", store=dist.FileStore(path, 2), rank=rank, world_size=2)
dist.all_reduce(torch.ones(1))
if rank == 0:
    print(dist.group.WORLD.membership.master, flush=True)
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(3)]  # which rank 1 never enters
    works[0].get_future().then(lambda future: future.value())
    message = dist.irecv(torch.ones(1), 1)
    dist.group.WORLD.get_group_store().set("issued", "yes")
else:
    dist.group.WORLD.get_group_store().wait(["issued"])  # who leaves ends the group for the other
"""


@pytest.mark.slow
def test_an_interpreter_that_ends_with_calls_in_flight_ends_at_once_and_so_does_its_master(tmp_path: Path) -> None:
    began = time.monotonic()
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={key: value for key, value in os.environ.items() if key != "RAY_PCCL_MASTER"},
            text=True,
        )
        for rank in range(2)
    ]
    try:
        (told, said), (_, other) = [program.communicate(timeout=60) for program in programs]
    finally:
        for program in programs:
            program.kill()
    assert [program.returncode for program in programs] == [0, 0], (said, other)
    assert "Fatal Python error" not in said and "terminate called" not in said
    assert time.monotonic() - began < 45
    eventually(lambda: not listens(Endpoint.parse(told.strip())), 10.0, "the master ends")
