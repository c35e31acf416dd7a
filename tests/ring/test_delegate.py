"""The order in which another library is asked, and what becomes of its groups: with a double in its place."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from ray_pccl.errors import ProtocolError
from ray_pccl.peer.ledger import Ledger
from ray_pccl.ring.delegate import MARGIN_S, Delegate, Keys
from ray_pccl.ring.delegated import DelegatedAttempt
from ray_pccl.ring.header import Header, Kind, backend_of, delegated, describe
from ray_pccl.ring.task import Array, Attempt, Epoch, Recipe, RefusedError, Task
from ray_pccl.testing import eventually

EPOCH = Epoch(3, 1, ("a", "b", "c"), 3)
RECIPE = Recipe(Header(Kind.BARRIER))


@dataclass
class Job:
    """What was asked for."""

    name: str

    def deliver(self, out: Array) -> None:
        out[:] = 1


@dataclass
class Group:
    """One that does a job when it may."""

    may_build: threading.Event = field(default_factory=threading.Event)
    may_run: threading.Event = field(default_factory=threading.Event)
    aborted: threading.Event = field(default_factory=threading.Event)
    done: list[str] = field(default_factory=list)
    fails: bool = False

    def build(self) -> None:
        self._wait(self.may_build)

    def run(self, job: Any) -> None:
        self._wait(self.may_run)
        if self.fails:
            raise RuntimeError("it broke")
        self.done.append(job.name)

    def _wait(self, event: threading.Event) -> None:
        while not event.wait(0.005):
            if self.aborted.is_set():
                raise ConnectionAbortedError("aborted")

    def abort(self) -> None:
        self.aborted.set()


class Library:
    """A backend whose groups wait to be let go on."""

    name, number = "double", 1

    def __init__(self, *, lets_go: bool = True) -> None:
        self.groups: list[Group] = []
        self._lets_go = lets_go

    def takes(self, header: Header) -> bool:
        return header.kind is not Kind.BARRIER

    def job(self, recipe: Recipe, epoch: Epoch, send: Array | None) -> Job:
        return Job("ghost" if send is None else "job")

    def group(self, epoch: Epoch, host: str, keys: Keys, timeout_s: float) -> Group:
        group = Group()
        if self._lets_go:
            group.may_build.set()
            group.may_run.set()
        self.groups.append(group)
        return group


class Answers:
    """What came of the jobs, by name."""

    def __init__(self) -> None:
        self.of: dict[str, Exception | None] = {}

    def __call__(self, name: str) -> Any:
        return lambda error: self.of.__setitem__(name, error)


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture
def delegate(library: Library) -> Iterator[Delegate]:
    delegate = Delegate(library, "127.0.0.1", lambda function: function(), lambda *_: None)
    delegate.move(EPOCH)
    yield delegate
    delegate.stop(EPOCH.number)
    eventually(lambda: not _threads(), 5, "no thread is left")


def _threads() -> list[str]:
    names = ("ray_pccl-double", "ray_pccl-abort")
    return [thread.name for thread in threading.enumerate() if thread.name in names]


def test_operations_are_done_in_the_order_of_their_grants(delegate: Delegate, library: Library) -> None:
    answers = Answers()
    for name in "abcdef":
        delegate.granted(0, Job(name), answers(name))
    eventually(lambda: len(answers.of) == 6, 5, "all are done")
    assert library.groups[0].done == list("abcdef") and set(answers.of.values()) == {None}


def test_what_was_granted_and_has_failed_here_is_done_nevertheless(delegate: Delegate, library: Library) -> None:
    answers = Answers()
    delegate.ended((7, 0), RECIPE)
    delegate.granted_ghost((7, 0), 0)
    delegate.granted(0, Job("next"), answers("next"))
    eventually(lambda: "next" in answers.of, 5, "the next one is done")
    assert library.groups[0].done == ["ghost", "next"]


def test_a_grant_that_nobody_can_follow_breaks_the_group_instead_of_the_order(
    delegate: Delegate, library: Library
) -> None:
    answers = Answers()
    delegate.granted(0, Job("first"), answers("first"))
    delegate.granted_ghost((9, 4), 0)
    delegate.granted(0, Job("after"), answers("after"))
    assert isinstance(answers.of["after"], ConnectionAbortedError), "it is refused, and no other waits for it"
    delegate.granted(1, Job("anew"), answers("anew"))
    eventually(lambda: {"anew", "first"} <= answers.of.keys(), 5, "another group does the next one")
    assert library.groups[0].aborted.is_set() and library.groups[1].done == ["anew"]


def test_a_failure_is_told_for_all_that_follow_until_the_group_is_replaced(
    delegate: Delegate, library: Library
) -> None:
    answers = Answers()
    delegate.granted(0, Job("fine"), answers("fine"))
    eventually(lambda: "fine" in answers.of, 5, "it is done")
    library.groups[0].fails = True
    for name in ("one", "two"):
        delegate.granted(0, Job(name), answers(name))
    eventually(lambda: len(answers.of) == 3, 5, "all have ended")
    assert [str(answers.of[name]) for name in ("one", "two")] == ["it broke"] * 2
    assert library.groups[0].aborted.is_set(), "so that the others learn of it"
    delegate.broken(0)
    delegate.granted(1, Job("anew"), answers("anew"))
    eventually(lambda: "anew" in answers.of, 5, "another group does the next one")


def test_the_end_of_an_epoch_aborts_what_runs_and_its_result_does_not_count() -> None:
    library, answers = Library(lets_go=False), Answers()
    delegate = Delegate(library, "127.0.0.1", lambda function: function(), lambda *_: None)
    delegate.move(EPOCH)
    delegate.granted(0, Job("stuck"), answers("stuck"))
    delegate.granted(0, Job("waits"), answers("waits"))
    delegate.stop(EPOCH.number)
    eventually(lambda: not _threads(), 5, "no thread is left, though nobody let it go on")
    assert [type(answers.of[name]) for name in ("stuck", "waits")] == [ConnectionAbortedError] * 2
    delegate.granted(0, Job("late"), answers("late"))
    assert "late" not in answers.of and len(library.groups) == 1, "nothing begins in an epoch that is over"


def test_a_failure_of_the_library_counts_when_no_death_explains_it(delegate: Delegate) -> None:
    whole, ended = [False], []
    attempt = Attempt(Task(RECIPE, None, None), (0, 0), EPOCH, Ledger(), float("inf"))
    linked = DelegatedAttempt(
        attempt, Job("job"), delegate, lambda: whole[0], lambda function: function(), lambda _link: None, ended.append
    )
    linked.granted(0)
    linked._done(RuntimeError("it broke"))
    failed_at = linked._failed_at
    whole[0] = True
    linked.tick(failed_at + 0.9 * delegate.grace_s)
    assert not ended, "the news of a death may be on its way"
    whole[0] = False
    linked.tick(failed_at + 100 * delegate.grace_s)
    assert not ended, "a link is missing: the master decides"
    whole[0] = True
    linked.tick(failed_at + 1.1 * delegate.grace_s)
    assert ended == [linked] and isinstance(linked.error, RefusedError)
    failure = linked.error.failure
    assert failure.error == "DelegatedBackendError" and "double failed on peer b" in failure.text
    assert delegate._broken == 0, "the next operation gets another group"


def test_an_operation_that_the_library_never_ends_fails_some_time_after_it_began() -> None:
    library = Library(lets_go=False)
    delegate = Delegate(library, "127.0.0.1", lambda function: function(), lambda *_: None)
    delegate.timeout_s = 60.0
    delegate.move(EPOCH)
    ended: list[Any] = []
    attempts = []
    for number in range(2):
        attempt = Attempt(Task(RECIPE, None, None), (0, number), EPOCH, Ledger(), float("inf"))
        job = Job(f"job {number}")
        attempts.append(
            DelegatedAttempt(
                attempt, job, delegate, lambda: True, lambda function: function(), lambda _link: None, ended.append
            )
        )
        attempts[-1].granted(0)
    stuck, waiting = attempts
    now = time.monotonic()
    stuck.tick(now + 1000)
    assert stuck._failure is None, "the group is still being built: the operation has not begun"
    library.groups[0].may_build.set()
    eventually(lambda: delegate._session.running_since(stuck._job) is not None, 5, "it has begun")
    began = delegate._session.running_since(stuck._job)
    for moment in (began + 60.0, began + 61.0 + MARGIN_S):
        waiting.tick(moment)
        assert waiting._failure is None, "its turn has not come"
        stuck.tick(moment)
        assert (stuck._failure is None) == (moment == began + 60.0) and not ended
    stuck.tick(moment + delegate.grace_s)
    assert ended == [stuck] and isinstance(stuck.error, RefusedError)
    assert "has not ended an operation within 65 s" in stuck.error.failure.text
    assert library.groups[0].aborted.wait(5), "the next operation gets another group"
    waiting.tick(moment)
    waiting.tick(moment + delegate.grace_s)
    assert ended == [stuck, waiting], "what waited for the one that is stuck has failed with it"
    delegate.stop(EPOCH.number)
    eventually(lambda: not _threads(), 5, "no thread is left")


def test_an_epoch_ends_and_an_operation_fails_where_no_thread_is_to_be_had(
    delegate: Delegate, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = Answers()
    delegate.granted(0, Job("fine"), answers("fine"))
    eventually(lambda: "fine" in answers.of, 5, "it is done")

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    delegate.stop(EPOCH.number)
    leader = Epoch(EPOCH.number + 1, 0, EPOCH.members, EPOCH.size)
    delegate.move(leader)
    attempt = Attempt(Task(RECIPE, None, None), (0, 0), leader, Ledger(), float("inf"))
    ended: list[Any] = []
    linked = DelegatedAttempt(
        attempt, Job("job"), delegate, lambda: True, lambda function: function(), lambda _link: None, ended.append
    )
    for rank in (1, 2):
        linked._entered.add(rank)
    linked._advance()
    assert ended == [linked] and str(linked.error) == "can't start new thread"


def test_keys_reach_who_waits_for_them_and_the_end_of_the_epoch_ends_the_wait() -> None:
    told: list[tuple[str, bytes]] = []
    keys = Keys(lambda key, value: told.append((key, value)))
    keys.publish("mine", b"1")
    assert told == [("mine", b"1")] and keys.wait("mine", 0) == b"1" and keys.has("mine")
    threading.Timer(0.02, keys.arrived, ("theirs", b"2")).start()
    assert keys.wait("theirs", 5) == b"2"
    with pytest.raises(TimeoutError, match="theirs too"):
        keys.wait("theirs too", 0.01)
    threading.Timer(0.02, keys.end).start()
    with pytest.raises(ConnectionAbortedError):
        keys.wait("never", 5)
    with pytest.raises(ConnectionAbortedError):
        keys.wait("mine", 5)


def test_keys_may_come_before_the_group_is_built(delegate: Delegate) -> None:
    import msgspec

    delegate.key(0, msgspec.msgpack.encode(("0/2", b"there")))
    assert delegate._keys_of(0).wait("0/2", 0) == b"there"
    with pytest.raises(ProtocolError):
        delegate.key(0, b"\xc1")


def test_a_header_tells_its_backend_and_is_else_the_same() -> None:
    plain = Header(Kind.ALL_REDUCE, 5).pack()
    other = delegated(plain, 1)
    assert plain != other and len(plain) == len(other)
    assert (backend_of(plain), backend_of(other), backend_of(delegated(plain, 77))) == ("ring", "gloo", "number 77")
    assert describe(plain) == describe(other)
