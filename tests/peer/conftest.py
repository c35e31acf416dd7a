"""Real communicators in threads of the test, against a real master in another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from master_actor import serve
from master_actor.thread import MasterThread
from ray_pccl import Communicator, Endpoint
from ray_pccl.settings import Settings
from ray_pccl.testing.waiting import eventually

CALM = {"heartbeat_timeout_s": 10, "stall_timeout_s": 30, "sentinel": False, "last_call_s": 0.0}
"""Nobody is taken for dead by silence while a test runs, and nobody waits for one more."""
PATIENCE_S = 15.0

Make = Callable[..., Communicator]


def until(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Waits for the condition, which must come."""
    eventually(condition, timeout=timeout_s, what=what)


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Runs the calls at the same time; their results, or the first error."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(PATIENCE_S) for future in [pool.submit(call) for call in calls]]


@pytest.fixture
def master() -> Iterator[MasterThread]:
    thread = serve(settings=Settings(**CALM))
    thread.start()
    yield thread
    thread.stop("the test is over")


@pytest.fixture
def endpoint(master: MasterThread) -> Endpoint:
    return master.server.endpoint


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes communicators that are closed when the test is over."""
    made: list[Communicator] = []

    def make_one(group: str | int = "g", *, master: Endpoint | str | None = None, **given: Any) -> Communicator:
        where = master if master is not None else request.getfixturevalue("endpoint")
        names = {"min_world_size", "max_world_size", "rank"}
        settings = Settings(**{**CALM, **{name: value for name, value in given.items() if name not in names}})
        limits = {name: value for name, value in given.items() if name in names}
        made.append(Communicator(group, master=where, settings=settings, **limits))
        return made[-1]

    yield make_one
    for communicator in made:
        communicator.close()


@pytest.fixture
def group(make: Make) -> Callable[..., list[Communicator]]:
    """Makes a group of so many connected peers, in the order of their ranks."""

    def make_group(size: int, name: str | int = "g", **given: Any) -> list[Communicator]:
        peers = [make(name, **{"min_world_size": size, **given}) for _ in range(size)]
        together(*(peer.connect for peer in peers))
        return sorted(peers, key=lambda peer: peer.rank)

    return make_group
