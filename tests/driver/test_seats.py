"""The places of an actor in groups, without an actor."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from ray_pccl.driver import internals, seats
from ray_pccl.driver.errors import ActorLostError
from ray_pccl.driver.seats import GroupSpec, Seat, Seats
from ray_pccl.settings import Settings
from ray_pccl.testing import eventually

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


SPEC = GroupSpec("group", "uid", None, 1, None, 1, Settings())
SOON_S = 10.0
LOST = "takes part again when it has joined anew"


@pytest.fixture
def joining(monkeypatch: pytest.MonkeyPatch) -> list[Future[None]]:
    """Seats join when a test says so: these are the futures of it, in order."""
    begun: list[Future[None]] = []
    monkeypatch.setattr(Seat, "_connect", lambda _seat, _communicator, joined: begun.append(joined))
    return begun


def has_begun(joining: list[Future[None]]) -> Future[None]:
    eventually(lambda: bool(joining), SOON_S)
    return joining[-1]


def test_a_call_that_does_not_know_its_peer_waits_for_the_first_joining(joining: list[Future[None]]) -> None:
    places = Seats()
    seat = places.take(SPEC, None, invited=True)
    seat.join()

    with ThreadPoolExecutor(1) as threads:
        member = threads.submit(places.meant("group", "uid", peer="").member, "")
        has_begun(joining).set_result(None)
        assert member.result(SOON_S) is seat.communicator


def test_a_call_for_an_earlier_peer_does_not_wait_until_this_one_is_let_in(joining: list[Future[None]]) -> None:
    places = Seats()
    seat = places.take(SPEC, None, invited=True)
    seat.join()
    stale = seat.lane(1, "")
    waits = threading.Event()

    def call() -> Any:
        waits.set()
        return seat.member("")

    with ThreadPoolExecutor(1) as threads:
        member = threads.submit(call)
        assert waits.wait(SOON_S)
        peer = seat.join(anew=True)
        with pytest.raises(ActorLostError, match=LOST):
            member.result(SOON_S)
    with pytest.raises(ActorLostError, match=LOST):
        places.meant("group", "uid", peer="")
    assert places.meant("group", "uid", peer) is seat
    assert seat.lane(1, peer) is not stale
    has_begun(joining).set_result(None)


def test_who_does_not_know_the_peer_of_a_member_means_the_present_one(joining: list[Future[None]]) -> None:
    places = Seats()
    seat = places.take(SPEC, None, invited=True)
    seat.join(anew=True)
    has_begun(joining).set_result(None)

    assert places.meant("group", "uid", peer="").member("") is seat.communicator


def test_an_actor_that_was_put_out_takes_no_calls_for_its_earlier_peer(joining: list[Future[None]]) -> None:
    places = Seats()
    seat = places.take(SPEC, None, invited=True)
    first = seat.join()
    has_begun(joining).set_result(None)

    again = seat.join(anew=True)

    assert again != first
    for peer in ("", first):
        with pytest.raises(ActorLostError, match=LOST):
            places.meant("group", "uid", peer)
