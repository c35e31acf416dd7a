"""Where a process group lives, and what an ended program leaves of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from ray_pccl.control.endpoint import Endpoint
from ray_pccl.errors import SettingsError
from ray_pccl.testing import eventually
from ray_pccl.torch import Options, own_master, placing
from tests.torch.test_c10d_faults import listens
from tests.torch.zygote import Zygote

HERE = Endpoint.parse("127.0.0.1:1234#aabb")
THERE = Endpoint.parse("127.0.0.1:4321#ccdd")
MINUTE = timedelta(minutes=1)


def test_rank_zero_decides_and_the_others_take_its_word(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setenv("RAY_PCCL_MASTER", str(HERE))
    first = placing.find_place(Options(), store, 0, MINUTE, None)
    monkeypatch.setenv("RAY_PCCL_MASTER", str(THERE))
    assert placing.find_place(Options(), store, 1, MINUTE, None) == first
    assert first.master == HERE


def test_a_master_that_is_given_comes_before_the_environments_and_that_before_a_known_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_PCCL_MASTER", str(HERE))
    assert placing.find_place(Options(master=str(THERE)), dist.HashStore(), 0, MINUTE, None).master == THERE
    assert placing.find_place(Options(), dist.HashStore(), 0, MINUTE, THERE).master == HERE
    monkeypatch.delenv("RAY_PCCL_MASTER")
    assert placing.find_place(Options(), dist.HashStore(), 0, MINUTE, THERE).master == THERE


def test_names_are_new_each_time_unless_newcomers_have_to_know_them() -> None:
    places = [placing.find_place(Options(group="mine"), dist.HashStore(), 0, MINUTE, HERE) for _ in range(2)]
    assert places[0].group != places[1].group and all(place.group.startswith("mine/") for place in places)
    options = Options(group="mine", elastic=True)
    assert placing.find_place(options, dist.HashStore(), 0, MINUTE, HERE).group == "mine"


def test_a_master_without_its_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_PCCL_KEY", raising=False)
    with pytest.raises(SettingsError, match="key"):
        placing.find_place(Options(master="somewhere:1"), dist.HashStore(), 0, MINUTE, None)


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
