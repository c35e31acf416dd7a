"""The places of an actor in groups, without an actor."""

from __future__ import annotations

import time
from functools import partial

import pytest

from ray_pccl.driver import internals, seats
from ray_pccl.driver.errors import ActorLostError
from ray_pccl.driver.seats import Seats

ME = "0123456789abcdef"
SHORTLY_S = 0.3


@pytest.fixture(autouse=True)
def actor_with_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is one, which sits in no group."""
    monkeypatch.setattr(seats, "actor_id", lambda: ME)
    monkeypatch.setattr(seats, "OVERTAKING_S", SHORTLY_S)
    monkeypatch.setattr(internals, "runs_calls_in_order", lambda: False)


def refused_after_s(places: Seats, uid: str = "uid") -> float:
    began = time.monotonic()
    with pytest.raises(ActorLostError, match=f"{ME} is lost: it was restarted"):
        places.meant("group", uid, peer="")
    return time.monotonic() - began


def test_a_call_that_may_have_overtaken_the_one_to_join_waits_for_it() -> None:
    assert refused_after_s(Seats()) >= SHORTLY_S


def test_calls_that_were_meant_for_an_earlier_process_do_not_hold_up_the_one_to_join() -> None:
    places = Seats()
    refused_after_s(places)

    assert sum(map(partial(refused_after_s, places), ["uid"] * 10)) < SHORTLY_S


def test_each_group_has_a_call_to_join_of_its_own() -> None:
    places = Seats()
    refused_after_s(places)

    assert refused_after_s(places, "another uid") >= SHORTLY_S


def test_an_actor_with_one_thread_has_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "runs_calls_in_order", lambda: True)

    assert refused_after_s(Seats()) < SHORTLY_S
