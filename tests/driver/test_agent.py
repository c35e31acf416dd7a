"""What runs inside an actor, without one."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from ray_pccl.driver import agent, internals
from ray_pccl.driver.errors import ActorLostError

ME = "0123456789abcdef"
SHORTLY_S = 0.3


@pytest.fixture(autouse=True)
def another_process_of_the_actor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is an actor with threads that sits in no group."""
    monkeypatch.setattr(agent, "actor_id", lambda: ME)
    monkeypatch.setattr(agent, "OVERTAKING_S", SHORTLY_S)
    monkeypatch.setattr(internals, "runs_calls_in_order", lambda: False)
    yield
    agent._overtaken.clear()


def call(number: int) -> agent.Call:

    return agent.Call("g", "uid of g", caller=1, number=number, first=0, kind="allreduce")


def refused_after_s(number: int) -> float:
    began = time.monotonic()
    with pytest.raises(ActorLostError, match=f"{ME} is lost: it was restarted"):
        agent._seat_of(call(number))
    return time.monotonic() - began


def test_a_call_that_may_have_overtaken_the_one_to_join_waits_for_it() -> None:
    assert refused_after_s(0) >= SHORTLY_S


def test_calls_that_were_meant_for_an_earlier_process_do_not_hold_up_the_one_to_join() -> None:
    refused_after_s(0)

    assert sum(map(refused_after_s, range(1, 11))) < SHORTLY_S


def test_an_actor_with_one_thread_has_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "runs_calls_in_order", lambda: True)

    assert refused_after_s(0) < SHORTLY_S
