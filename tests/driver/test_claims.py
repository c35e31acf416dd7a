"""How long a value is kept: the owner of its ref decides, and the keeper hears of it. Without Ray."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ray_pccl.driver import claims, internals
from ray_pccl.driver.claims import Claim, Duty, Owner
from ray_pccl.driver.desk import Contact
from ray_pccl.testing import eventually


class Scope:
    """Stands for Ray: an object goes out of scope when the test says so."""

    def __init__(self) -> None:
        self._calls: dict[Any, Callable[[bytes], None]] = {}

    def watch(self, ref: Any, call: Callable[[bytes], None]) -> bool:
        self._calls[ref] = call
        return ref != "gone already"

    def leave(self, ref: Any) -> None:
        self._calls.pop(ref)(b"")


@pytest.fixture
def scope(monkeypatch: pytest.MonkeyPatch) -> Scope:
    scope = Scope()
    monkeypatch.setattr(internals, "on_out_of_scope", scope.watch)
    return scope


class Freed:
    """What a keeper was told to free."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._lock = threading.Lock()

    def __call__(self, claim: Claim) -> None:
        with self._lock:
            self.numbers.append(claim.number)


def _bound(owner: Owner, ref: str) -> Claim:
    claim = owner.claim()
    owner.bind(claim, ref)
    return claim


def test_a_value_is_freed_when_its_ref_is_gone_and_no_other(scope: Scope) -> None:
    owner, freed = Owner(), Freed()
    one, two = _bound(owner, "one"), _bound(owner, "two")
    duty = Duty(one.owner, freed)
    duty.keep(one.number)
    duty.keep(two.number)
    scope.leave("one")
    eventually(lambda: freed.numbers == [one.number])
    scope.leave("two")
    eventually(lambda: freed.numbers == [one.number, two.number])


@pytest.mark.parametrize("ref", ["dropped later", "gone already"])
def test_a_value_whose_ref_was_gone_before_it_was_made_is_freed_at_once(scope: Scope, ref: str) -> None:
    owner, freed = Owner(), Freed()
    claim = _bound(owner, ref)
    if ref != "gone already":
        scope.leave(ref)
    other = _bound(owner, "other")
    duty = Duty(claim.owner, freed)
    duty.keep(other.number)
    duty.keep(claim.number)
    eventually(lambda: freed.numbers == [claim.number])


def test_a_call_that_was_never_made_leaves_no_claim(scope: Scope) -> None:
    del scope
    owner = Owner()
    claim = owner.claim()
    assert owner._wanted == {claim.number}
    owner.end(claim)
    eventually(lambda: not owner._wanted)


def test_a_keeper_whose_connection_broke_tells_the_owner_again(scope: Scope) -> None:
    owner, freed = Owner(), Freed()
    claim = _bound(owner, "one")
    duty = Duty(claim.owner, freed)
    duty.keep(claim.number)
    eventually(lambda: claim.number in owner._kept)
    first = owner._kept[claim.number]
    duty._sock.shutdown(socket.SHUT_RDWR)
    eventually(lambda: owner._kept.get(claim.number) not in (None, first))
    assert freed.numbers == []
    scope.leave("one")
    eventually(lambda: freed.numbers == [claim.number])


def test_what_is_kept_for_an_owner_that_died_is_freed(scope: Scope) -> None:
    del scope
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        nobody = Contact("nobody", f"desk-nobody 127.0.0.1 {sock.getsockname()[1]}", b"k" * 32)
    owner, freed = Owner(), Freed()
    claim = owner.claim()
    duty = Duty(claim.owner, freed)
    duty.keep(claim.number)
    eventually(lambda: claim.number in owner._kept)
    duty._owner = nobody  # where the owner was, nobody answers any more
    duty._sock.shutdown(socket.SHUT_RDWR)
    eventually(lambda: freed.numbers == [claim.number] and duty.over)


def test_a_keeper_that_is_gone_is_forgotten(scope: Scope) -> None:
    owner = Owner()
    claim = _bound(owner, "one")
    meeting = claim.owner.dial(claims.SERVICE)
    meeting.sock.setblocking(True)
    meeting.sock.sendall(claim.number.to_bytes(8, "little"))
    eventually(lambda: claim.number in owner._kept)
    meeting.sock.close()
    eventually(lambda: not owner._kept)
    scope.leave("one")
    eventually(lambda: not owner._wanted)
