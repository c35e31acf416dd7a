"""How long a value is kept: the owner of its ref decides, and the keeper hears of it. Without Ray."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ray_pccl.driver import claims, desk, internals
from ray_pccl.driver.claims import Claim, Duty, Owner
from ray_pccl.driver.desk import Contact
from ray_pccl.testing import eventually


class Ref(str):
    """Stands for an ObjectRef."""

    __slots__ = ()

    def task_id(self) -> str:
        return f"the task of {self}"


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
    monkeypatch.setattr(internals, "own_address", lambda: b"")
    monkeypatch.setattr(claims.ray, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(claims.ray, "is_initialized", lambda: True)
    return scope


class Freed:
    """What a keeper was told to free."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._lock = threading.Lock()

    def __call__(self, claim: Claim) -> None:
        with self._lock:
            self.numbers.append(claim.number)


ACTOR = "a" * 32


def _bound(owner: Owner, ref: str) -> Claim:
    claim = owner.claim()
    owner.bind(claim, Ref(ref), ACTOR)
    return claim


def _connected(owner: Owner, count: int = 1) -> bool:
    return len(owner._keepers.get(ACTOR, [])) == count


def test_a_value_is_freed_when_its_ref_is_gone_and_no_other(scope: Scope) -> None:
    owner, freed = Owner(), Freed()
    one, two = _bound(owner, "one"), _bound(owner, "two")
    duty = Duty(one.owner, ACTOR, freed)
    duty.keep(one.number)
    duty.keep(two.number)
    scope.leave("one")
    eventually(lambda: freed.numbers == [one.number])
    scope.leave("two")
    eventually(lambda: freed.numbers == [one.number, two.number])


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "not yet connected"])
@pytest.mark.parametrize("ref", ["dropped later", "gone already"])
def test_a_value_whose_ref_was_gone_before_it_was_made_is_not_kept(scope: Scope, ref: str, connected: bool) -> None:
    owner, freed = Owner(), Freed()
    other = _bound(owner, "other")
    duty = Duty(other.owner, ACTOR, freed) if connected else None
    claim = _bound(owner, ref)
    if ref != "gone already":
        scope.leave(ref)
    eventually(lambda: claim.number not in owner._wanted)
    duty = duty or Duty(other.owner, ACTOR, freed)
    eventually(lambda: claim.number in duty._unwanted)
    assert duty.keep(other.number)
    assert not duty.keep(claim.number)
    assert freed.numbers == [] and not duty._unwanted


def test_a_call_that_was_never_made_leaves_no_claim(scope: Scope) -> None:
    del scope
    owner = Owner()
    claim = owner.claim()
    assert owner._wanted == {claim.number}
    owner.end(claim.number, ACTOR)
    eventually(lambda: not owner._wanted)


def test_claims_that_ended_early_are_not_remembered_for_ever(scope: Scope, monkeypatch: pytest.MonkeyPatch) -> None:
    del scope
    monkeypatch.setattr(claims, "REMEMBERED", 10)
    owner, freed = Owner(), Freed()
    duty = Duty(owner.claim().owner, ACTOR, freed)
    for _ in range(100):
        owner.end(owner.claim().number, "an actor that keeps nothing")
        owner.end(owner.claim().number, ACTOR)
    eventually(lambda: 199 in duty._unwanted or 200 in duty._unwanted)
    assert len(duty._unwanted) == 10
    assert len(owner._past) == 10


def test_what_ended_while_the_connection_was_broken_is_freed_when_it_is_there_again(scope: Scope) -> None:
    owner, freed = Owner(), Freed()
    one, two = _bound(owner, "one"), _bound(owner, "two")
    duty = Duty(one.owner, ACTOR, freed)
    assert duty.keep(one.number) and duty.keep(two.number)
    eventually(lambda: _connected(owner))
    with duty._lock:  # it can't connect again before the ref is gone
        duty._sock.shutdown(socket.SHUT_RDWR)
        eventually(lambda: _connected(owner, 0) or _connected(owner))
        scope.leave("one")
        eventually(lambda: one.number not in owner._wanted)
    eventually(lambda: freed.numbers == [one.number])
    scope.leave("two")
    eventually(lambda: freed.numbers == [one.number, two.number])


def test_what_is_kept_for_an_owner_that_died_is_freed(scope: Scope) -> None:
    del scope
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        nobody = Contact("nobody", f"desk-nobody 127.0.0.1 {sock.getsockname()[1]}", b"k" * 32)
    owner, freed = Owner(), Freed()
    claim = owner.claim()
    duty = Duty(claim.owner, ACTOR, freed)
    duty.keep(claim.number)
    eventually(lambda: _connected(owner))
    duty._owner = nobody  # where the owner was, nobody answers any more
    duty._sock.shutdown(socket.SHUT_RDWR)
    eventually(lambda: freed.numbers == [claim.number] and duty.over)


def test_a_keeper_that_is_gone_is_forgotten(scope: Scope) -> None:
    owner = Owner()
    claim = _bound(owner, "one")
    meeting = claim.owner.dial(claims.SERVICE, ACTOR)
    eventually(lambda: _connected(owner))
    meeting.sock.close()
    eventually(lambda: not owner._keepers)
    scope.leave("one")
    eventually(lambda: not owner._wanted)


def test_a_value_has_a_name_once_its_actor_says_that_it_keeps_it_and_until_its_ref_is_gone(
    scope: Scope, monkeypatch: pytest.MonkeyPatch
) -> None:
    anchors = {"unready": b"", "kept": claims.KEPT, "plain": claims.NOT_KEPT}
    monkeypatch.setattr(internals, "second_if_ready", lambda ref: anchors[ref])
    owner = Owner()
    bound = {ref: _bound(owner, ref) for ref in anchors}

    names = {ref: owner.name_of(Ref(ref)) for ref in anchors}

    assert names == {"unready": "", "kept": str(bound["kept"]), "plain": ""}
    anchors["somebody else's"] = claims.KEPT
    assert owner.name_of(Ref("somebody else's")) == ""
    scope.leave("kept")
    assert owner.name_of(Ref("kept")) == ""


def test_what_was_claimed_in_a_ray_that_was_shut_down_is_freed(scope: Scope) -> None:
    owner, freed = Owner(), Freed()
    claim = _bound(owner, "one")
    duty = Duty(claim.owner, ACTOR, freed)
    duty.keep(claim.number)
    eventually(lambda: _connected(owner))

    owner._let_go()

    eventually(lambda: freed.numbers == [claim.number])


def test_a_forked_child_holds_no_connection_of_its_parent(scope: Scope) -> None:
    owner = Owner()
    claim = _bound(owner, "one")
    Duty(claim.owner, ACTOR, Freed())
    eventually(lambda: _connected(owner))

    child = os.fork()
    if not child:
        os._exit(any(sock.fileno() >= 0 for sock in list(desk._open)))

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len([sock for sock in list(desk._open) if sock.fileno() >= 0]) >= 3, "the parent keeps its own"
