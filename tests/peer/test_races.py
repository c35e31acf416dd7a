"""What happens at the same time: ends, calls, callbacks, forks, and what is forgotten."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from master_actor import serve
from master_actor.thread import MasterThread
from ray_pccl import (
    Communicator,
    Endpoint,
    MasterStoppedError,
    MembershipChange,
    MembershipEvent,
    NotConnectedError,
    Settings,
    SettingsError,
)
from ray_pccl.control.handshake import ANSWER_BYTES, MasterSide
from ray_pccl.peer import communicator as module
from ray_pccl.testing.waiting import eventually

SETTINGS = Settings(sentinel=False, last_call_s=0.0, master_timeout_s=60, join_timeout_s=20)


def _call_until_it_fails(comm: Communicator, errors: list[Exception]) -> None:
    while len(errors) < 500:
        try:
            comm.num_waiting()
        except Exception as error:
            errors.append(error)


def test_calls_that_race_with_the_end_of_the_master_all_end() -> None:
    for _ in range(10):
        master = serve(settings=SETTINGS)
        comm = Communicator("g", master=master.start(), settings=SETTINGS)
        comm.connect()
        errors: list[Exception] = []

        threads = [threading.Thread(target=_call_until_it_fails, args=(comm, errors), daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        master.stop("over")
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive(), "a call still waits for a thread that has ended"
        assert {type(error) for error in errors} == {MasterStoppedError}
        comm.close()


def test_a_close_during_connect_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(settings=SETTINGS) as endpoint:
        comm = Communicator("g", master=endpoint, settings=SETTINGS)
        searching, go_on = threading.Event(), threading.Event()

        def find(self: Communicator, patience: float) -> tuple[Endpoint, None]:
            searching.set()
            assert go_on.wait(10)
            return endpoint, None

        monkeypatch.setattr(module.Communicator, "_find_master", find)
        caught: list[BaseException] = []

        def connect() -> None:
            try:
                comm.connect(10)
            except BaseException as error:
                caught.append(error)

        thread = threading.Thread(target=connect)
        thread.start()
        assert searching.wait(10)
        comm.close()
        go_on.set()
        thread.join(10)
        assert [type(error) for error in caught] == [NotConnectedError]
        with pytest.raises(NotConnectedError):
            _ = comm.epoch


def test_a_callback_may_make_the_early_call() -> None:
    with serve(settings=SETTINGS) as endpoint:
        comm = Communicator("g", master=endpoint, settings=SETTINGS)
        took: list[float] = []

        def on_event(event: MembershipEvent) -> None:
            if event.change is MembershipChange.EPOCH:
                began = time.monotonic()
                comm.update_topology()
                took.append(time.monotonic() - began)

        comm.on_membership(on_event)
        comm.connect()
        eventually(lambda: took, what="the callback has called")
        assert comm._early_call is False
        comm.close()


@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), -1.0, "5", True])
def test_a_timeout_that_is_none_is_refused_at_once(timeout: float) -> None:
    with serve(settings=SETTINGS) as endpoint, Communicator("g", master=endpoint, settings=SETTINGS) as comm:
        calls = (comm.are_peers_pending, lambda given: comm.store.get("k", given), lambda given: comm.connect(given))
        for call in calls:
            with pytest.raises(SettingsError, match="timeout"):
                call(timeout)  # type: ignore[operator]


def test_a_communicator_that_nobody_holds_any_more_leaves_and_leaves_no_thread() -> None:
    before = threading.active_count()
    with serve(settings=SETTINGS) as endpoint:
        watcher = Communicator("g", master=endpoint, settings=SETTINGS)
        watcher.connect()
        inside = threading.active_count()
        left: list[str] = []
        for _ in range(3):
            other = Communicator("h", master=endpoint, settings=SETTINGS)
            other.on_membership(lambda event: left.append(event.change.name))
            other.connect()
            del other
            gc.collect()
            eventually(lambda: threading.active_count() <= inside, what="no thread is left")
        watcher.close()
    eventually(lambda: threading.active_count() <= before, what="no thread is left")


def test_a_master_that_welcomes_and_then_hangs_up_is_not_dialled_in_a_tight_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    master = serve(settings=SETTINGS)
    endpoint = master.start()
    dials: list[float] = []

    def hang_up(connection: object, message: object) -> None:
        dials.append(time.monotonic())
        connection.drop("for a test")  # type: ignore[attr-defined]

    monkeypatch.setattr(master.server, "received", hang_up)
    comm = Communicator("g", master=endpoint, settings=SETTINGS)
    with pytest.raises(Exception, match="in time"):
        comm.connect(1.5)
    assert 3 <= len(dials) <= 60
    master.stop("over")


def test_a_child_that_was_forked_from_a_master_does_not_keep_its_peers_or_its_port() -> None:
    first = serve(settings=SETTINGS)
    endpoint = first.start()
    comm = Communicator("g", master=endpoint, settings=SETTINGS)
    comm.connect()
    child = os.fork()
    if child == 0:
        threading.Event().wait(20)
        os._exit(0)
    try:
        first.stop("over")
        with pytest.raises(MasterStoppedError):
            comm.num_waiting()
        again = MasterThread(port=endpoint.port, settings=SETTINGS)
        assert again.start().port == endpoint.port
        again.stop("over")
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        comm.close()


def test_what_goes_wrong_for_one_caller_does_not_reach_the_next(comm_alone: Communicator) -> None:
    connection = comm_alone._connection
    assert connection is not None
    ran = threading.Event()

    def goes_wrong() -> None:
        raise ZeroDivisionError

    with connection._lock:  # both are in one batch
        connection._submit(goes_wrong)
        connection._submit(ran.set)
    assert ran.wait(10)
    assert comm_alone.num_waiting() == 0


def test_a_callback_that_can_not_be_told_does_not_keep_a_call_from_its_result(
    comm_alone: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(event: MembershipEvent) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(comm_alone._connection, "_tell", fails)
    comm_alone.set_closed()  # which is news
    assert comm_alone.is_closed()


@pytest.mark.parametrize("step", ["before it began", "while it waits"])
def test_a_call_that_is_interrupted_may_be_made_again_at_once(
    step: str, comm_alone: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at = 1 if step == "before it began" else 2
    asked = 0
    right = Future.result

    def interrupted(self: Future[object], timeout: float | None = None) -> object:
        nonlocal asked
        asked += 1
        if asked == interrupt_at:
            raise KeyboardInterrupt
        return right(self, timeout)

    with monkeypatch.context() as patch:
        patch.setattr("ray_pccl.peer.connection.Future.result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            comm_alone.store.wait(["never"], timeout=20)
    assert comm_alone.num_waiting() == 0  # what was submitted before it has run by now
    connection = comm_alone._connection
    assert connection is not None
    eventually(lambda: not connection._calls and not connection.membership._requests, what="the call is given up")


def test_a_member_outlives_a_stranger_at_its_masters_address(tmp_path: Path) -> None:
    journal = str(tmp_path / "journal")
    first = serve(journal=journal, settings=SETTINGS)
    endpoint = first.start()
    comm = Communicator("g", master=endpoint, settings=SETTINGS)
    comm.connect()
    first.crash()
    refused: list[int] = []
    with socket.create_server((endpoint.host, endpoint.port)) as stranger:
        stranger.settimeout(20)
        while len(refused) < 5:  # each gets a challenge, and no proof of the key
            sock, _ = stranger.accept()
            with sock:
                sock.sendall(MasterSide(b"another key").challenge)
                refused.append(len(sock.recv(ANSWER_BYTES)))
    with serve(journal=journal, settings=SETTINGS):
        assert comm.num_waiting() == 0
        assert comm.epoch == 1
        comm.close()
    assert refused == [ANSWER_BYTES] * 5


@pytest.fixture
def comm_alone() -> Iterator[Communicator]:
    with serve(settings=SETTINGS) as endpoint, Communicator("g", master=endpoint, settings=SETTINGS) as comm:
        yield comm
