"""A real master on a real socket: what strangers, garbage, restarts and rivals can and can't do to it."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from master_actor import connection, serve, server
from master_actor.core.actions import Send
from master_actor.thread import MasterThread
from ray_pccl.control import frames
from ray_pccl.control.endpoint import Endpoint
from ray_pccl.control.frames import MAX_FRAME_BYTES
from ray_pccl.control.handshake import ANSWER_BYTES, CHALLENGE_BYTES
from ray_pccl.control.messages import (
    Ask,
    Decide,
    Evicted,
    Failure,
    Join,
    Leave,
    News,
    ProcessState,
    Register,
    Registered,
    Reply,
    Seen,
    Stopped,
    StoreOp,
    StoreRequest,
    VoteFailed,
    VoteKind,
)
from ray_pccl.errors import AuthenticationError, MasterError, UsageError
from ray_pccl.settings import Settings
from ray_pccl.testing.waiting import eventually
from tests.master.raw_peer import RawPeer

CALM = Settings(heartbeat_timeout_s=30, stall_timeout_s=60, master_lease_s=60)
"""Nobody is dead by silence while a test runs."""
BRISK = Settings(
    heartbeat_interval_ms=50, heartbeat_timeout_s=0.3, stall_timeout_s=0.6, answer_timeout_s=0.3, master_lease_s=1
)
"""Silence is noticed while a test waits."""


@pytest.fixture
def master() -> Iterator[MasterThread]:
    thread = serve(settings=CALM)
    thread.start()
    yield thread
    thread.stop("the test is over")


@pytest.fixture
def endpoint(master: MasterThread) -> Endpoint:
    return master.server.endpoint


@pytest.fixture
def member(endpoint: Endpoint) -> Iterator[RawPeer]:
    """A peer that should notice nothing of what others do."""
    with RawPeer(endpoint) as peer:
        peer.join("member", group="of the member")
        peer.receive(Decide)
        yield peer


def _until(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    eventually(condition, timeout=timeout_s, what=what)


def _dropped(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()]


# ------------------------------------------------------------------------------------------------- bad connections


def _stranger(endpoint: Endpoint, data: bytes) -> RawPeer:
    peer = RawPeer(endpoint, prove=False)
    peer.sock.sendall(data)
    return peer


def _friend(endpoint: Endpoint, data: bytes) -> RawPeer:
    peer = RawPeer(endpoint)
    peer.sock.sendall(data)
    return peer


A_JOIN = Join("x", "g", "h", 1, None, None, 30.0, 0.0, False, None)
ANOTHER_JOIN = Join("y", "g", "h", 1, None, None, 30.0, 0.0, False, None)
BAD = {
    "garbage": lambda e: _stranger(e, os.urandom(4096)),
    "another protocol": lambda e: _stranger(
        e, b"GET / HTTP/1.1\r\nHost: somewhere\r\nUser-Agent: a browser, a long one\r\n\r\n"
    ),
    "zeroes": lambda e: _stranger(e, bytes(ANSWER_BYTES)),
    "a huge length": lambda e: _friend(e, struct.pack(">I", 0xFFFFFFFF)),
    "a length just over the limit": lambda e: _friend(e, struct.pack(">I", MAX_FRAME_BYTES + 1) + bytes(100)),
    "a frame of garbage": lambda e: _friend(e, struct.pack(">I", 100) + os.urandom(100)),
    "an empty frame": lambda e: _friend(e, bytes(4)),
    "a message of the master's": lambda e: _friend(e, frames.encode(Evicted("you"))),
    "a message before its name": lambda e: _friend(e, frames.encode(Leave())),
    "a sentinel's word before its opening": lambda e: _friend(e, frames.encode(Seen("member", ProcessState.EXITING))),
    "two names": lambda e: _friend(e, frames.encode(A_JOIN) + frames.encode(ANOTHER_JOIN)),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_a_bad_connection_is_dropped_logged_once_and_noticed_by_nobody(
    bad: Callable[[Endpoint], RawPeer], endpoint: Endpoint, member: RawPeer, caplog: pytest.LogCaptureFixture
) -> None:
    with bad(endpoint) as peer:
        assert peer.ends() is not None
    assert len(_dropped(caplog)) == 1
    assert member.is_served()
    assert member.ask(StoreOp.SET, "k", values=(b"v",)).failure is None


def test_a_wrong_key_is_refused_dropped_and_logged_once(
    endpoint: Endpoint, member: RawPeer, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises((ConnectionError, AuthenticationError)):
        RawPeer(endpoint, key=b"another key")
    assert len(_dropped(caplog)) == 1 and "key" in _dropped(caplog)[0]
    assert member.is_served()


@pytest.mark.parametrize("size", [0, 1, ANSWER_BYTES - 1])
def test_silence_during_the_handshake_is_dropped(
    size: int,
    endpoint: Endpoint,
    member: RawPeer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "HANDSHAKE_TIMEOUT_S", 0.2)
    with _stranger(endpoint, bytes(size)) as peer:
        assert peer.ends() == CHALLENGE_BYTES
    assert len(_dropped(caplog)) == 1
    assert member.is_served()


def test_a_stranger_learns_nothing_but_a_challenge(endpoint: Endpoint) -> None:
    with _stranger(endpoint, bytes(ANSWER_BYTES)) as peer:
        assert peer.ends() == CHALLENGE_BYTES


@pytest.mark.parametrize("joined", [False, True])
def test_half_a_frame_and_then_silence_is_dropped(joined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HANDSHAKE_TIMEOUT_S", 0.3)
    with serve(settings=BRISK) as endpoint, RawPeer(endpoint) as peer:
        if joined:
            peer.join("a")
            peer.receive(Decide)
        peer.sock.sendall(struct.pack(">I", 1000) + bytes(500))
        assert peer.ends(timeout_s=3.0) is not None


def test_half_a_frame_and_then_the_end_is_an_ordinary_end(
    endpoint: Endpoint, member: RawPeer, master: MasterThread
) -> None:
    with _friend(endpoint, frames.encode(A_JOIN)[:10]):
        pass
    _until(lambda: len(master.server._connections) == 1, "the connection is forgotten")
    assert member.is_served()


def test_a_frame_that_comes_byte_by_byte_is_a_frame(endpoint: Endpoint) -> None:
    with RawPeer(endpoint) as peer:
        for byte in frames.encode(A_JOIN):
            peer.sock.sendall(bytes([byte]))
        assert peer.receive(Decide).epoch == 1


def test_of_more_strangers_than_there_is_room_for_the_oldest_has_to_go(
    endpoint: Endpoint, member: RawPeer, master: MasterThread
) -> None:
    master.server._most_strangers = 3
    strangers = []
    for _ in range(4):
        strangers.append(RawPeer(endpoint, prove=False))
        strangers[-1]._exactly(CHALLENGE_BYTES)
    assert strangers[0].ends() == 0
    with RawPeer(endpoint) as friend:  # who can prove the key gets in, however many can't
        friend.join("b")
        assert friend.is_served()
    assert member.is_served()
    for stranger in strangers:
        stranger.sock.close()


def test_a_connection_that_was_made_before_the_one_in_use_is_not_listened_to(endpoint: Endpoint) -> None:
    with RawPeer(endpoint) as late, RawPeer(endpoint) as other:
        other.join("b", minimum=2)
        with RawPeer(endpoint) as current:
            current.send(Join("a", "g", "h", 2, None, None, 10.0, 0.0, False, None, dial=2))
            members = current.receive(Decide).members
            other.receive(Decide)
            late.send(Register("a", "g", "h", 1, members, False, (), (), False, None, dial=1))
            assert late.ends() is not None
            assert current.is_served()
            assert other.told_by_now() == []  # nobody was lost


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_two_thousand_connections_of_garbage_leave_nothing_behind(
    endpoint: Endpoint, member: RawPeer, master: MasterThread
) -> None:
    counted = _Counting()
    logger = logging.getLogger("ray_pccl.master")
    logger.addHandler(counted)
    logger.propagate = False
    try:
        noise = os.urandom(64 << 10)

        def bother(times: int) -> None:
            for place in range(times):
                with socket.create_connection((endpoint.host, endpoint.port)) as sock:
                    try:
                        sock.sendall(noise[place % 100 :])
                        while sock.recv(4096):
                            pass
                    except OSError:
                        pass

        bother(500)
        _until(lambda: len(master.server._connections) == 1, "the first connections are forgotten")
        before = _resident_bytes()
        bother(1500)
        _until(lambda: len(master.server._connections) == 1, "all connections are forgotten")
        assert _resident_bytes() - before < 4 << 20
    finally:
        logger.propagate = True
        logger.removeHandler(counted)
    assert counted.count == 2000
    assert len(master.server._strangers) == 0
    assert member.is_served()


class _Counting(logging.Handler):
    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += "dropped" in record.getMessage()


def test_a_peer_that_reads_nothing_is_dropped_before_its_answers_pile_up(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_UNSENT_BYTES", 4 << 20)
    with RawPeer(endpoint) as first, RawPeer(endpoint) as deaf:
        for peer_id, peer in (("first", first), ("deaf", deaf)):
            peer.join(peer_id, minimum=2)
        for peer in (first, deaf):
            peer.receive(Decide)
        first.ask(StoreOp.SET, "k", values=(bytes(1 << 20),))
        for number in range(100):
            try:
                deaf.send(StoreRequest(number, 0, StoreOp.GET, ("k",)))
            except OSError:
                break
        assert first.receive(Ask)  # the master gave the deaf one up
        assert deaf.ends() is not None
    assert [message for message in _dropped(caplog) if "unread" in message]


def test_an_answer_that_no_frame_can_carry_does_not_stop_the_master(endpoint: Endpoint, member: RawPeer) -> None:
    with RawPeer(endpoint) as peer:
        peer.join("a")
        peer.receive(Decide)
        keys = tuple(f"{place:05d}".ljust(1000) for place in range(6000))  # in the error they would be named twice
        peer.send(StoreRequest(0, 0, StoreOp.WAIT, keys, timeout_s=0.01))
        with contextlib.suppress(ConnectionError):  # whether it is answered or dropped, the others must be served
            peer.receive(Reply, timeout_s=3.0)
        reply = member.ask(StoreOp.WAIT, "never", timeout_s=0.05)  # needs a master that ticks
        assert reply.failure is not None and reply.failure.error == "StoreTimeoutError"


def test_what_no_frame_can_carry_drops_nobody_and_who_waits_for_it_is_told(
    endpoint: Endpoint, master: MasterThread
) -> None:
    large = "x" * MAX_FRAME_BYTES
    failed = VoteFailed(VoteKind.OPTIMIZE_TOPOLOGY, Failure("NoRingError", large))
    words = [Send("a", word) for word in (News(large, None, ""), failed, Reply(4, (large.encode(),)))]
    with RawPeer(endpoint) as peer:
        peer.join("a")
        peer.receive(Decide)
        master._loop.call_soon_threadsafe(master.server._send_all, words)
        told = peer.receive(VoteFailed)
        assert told.kind is VoteKind.OPTIMIZE_TOPOLOGY and "over the limit" in told.failure.text
        reply = peer.receive(Reply)
        assert reply.number == 4 and reply.failure is not None and reply.failure.error == "ProtocolError"
        assert peer.is_served()


def test_a_sum_that_no_record_can_carry_does_not_stop_the_master(endpoint: Endpoint, member: RawPeer) -> None:
    with RawPeer(endpoint) as peer:
        peer.join("a")
        peer.receive(Decide)
        peer.ask(StoreOp.SET, "k", values=(b"9" * 30,))
        reply = peer.ask(StoreOp.ADD, "k", amount=1)
        assert reply.failure is not None and reply.failure.error == "StoreError"
    assert member.ask(StoreOp.SET, "k", values=(b"v",)).failure is None


# ----------------------------------------------------------------------------------------------------- connections


def test_a_peer_that_comes_on_a_new_connection_is_not_taken_for_dead_when_the_old_one_closes(
    endpoint: Endpoint, master: MasterThread
) -> None:
    with RawPeer(endpoint) as other, RawPeer(endpoint) as old:
        other.join("b", minimum=2)
        old.join("a", minimum=2)
        members = old.receive(Decide).members
        other.receive(Decide)
        with RawPeer(endpoint) as new:
            new.send(Register("a", "g", "h", 1, members, False, (), (), False, None))
            new.receive(Registered)
            old.sock.close()
            _until(lambda: len(master.server._connections) == 2, "the old connection is forgotten")
            assert new.ask(StoreOp.NUM_KEYS).failure is None
            assert other.told_by_now() == [] == new.told_by_now()


def test_an_eviction_reaches_the_peer_and_the_others(endpoint: Endpoint, master: MasterThread) -> None:
    with RawPeer(endpoint) as a, RawPeer(endpoint) as b:
        for peer_id, peer in (("a", a), ("b", b)):
            peer.join(peer_id, minimum=2)
        for peer in (a, b):
            peer.receive(Decide)
        master.evict("b", "too slow")
        assert b.receive(Evicted).reason == "too slow"
        assert a.receive(Ask)


def test_a_master_that_is_stopped_tells_everyone(member: RawPeer, master: MasterThread) -> None:
    master.stop("for the night")
    assert member.receive(Stopped).reason == "for the night"
    assert member.ends() is not None


def test_a_master_can_be_started_once(master: MasterThread) -> None:
    with pytest.raises(UsageError):
        master.start()


def test_a_master_listens_on_ipv6_too() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("there is no IPv6 here")
    with serve("::1", settings=CALM) as endpoint, RawPeer(Endpoint.parse(str(endpoint))) as peer:
        peer.join("a")
        assert peer.is_served()


def test_a_port_that_is_taken_is_a_clear_error_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MasterError, match=str(port)):
            serve(port=port, settings=CALM).start()
    _until(lambda: set(threading.enumerate()) <= before, "no thread is left", timeout_s=3.0)


@pytest.mark.parametrize("port", [-1, 65536, 70000])
def test_a_port_that_does_not_exist_is_a_clear_error(port: int) -> None:
    with pytest.raises(MasterError, match=str(port)):
        serve(port=port, settings=CALM).start()


def test_a_master_that_has_ended_leaves_no_thread_and_no_file_open(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    files = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with serve(journal=str(tmp_path / "journal"), settings=CALM) as endpoint, RawPeer(endpoint) as peer:
            peer.join("a")
    _until(lambda: set(threading.enumerate()) <= threads, "no thread is left")
    _until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= files, "no file is left open")


# -------------------------------------------------------------------------------------------- restarts and rivals


def test_a_master_restarts_on_its_journal_with_the_same_port_key_groups_and_a_higher_boot(tmp_path: Path) -> None:
    journal = str(tmp_path / "journal")
    first = serve(journal=journal, settings=CALM)
    endpoint = first.start()
    with RawPeer(endpoint) as peer:
        peer.join("a")
        decide = peer.receive(Decide)
        peer.ask(StoreOp.SET, "k", values=(b"v",))
        first.crash()
        assert peer.ends() == 0  # nothing was said
    with serve(journal=journal, settings=CALM) as again, RawPeer(again) as peer:
        assert again == endpoint
        assert peer.welcome.boot == 2
        peer.send(Register("a", "g", "h", decide.epoch, decide.members, False, (), (), False, None))
        peer.receive(Registered)
        assert peer.ask(StoreOp.GET, "k").values == (b"v",)


def test_a_master_that_is_left_tells_nobody_if_its_journal_stays(tmp_path: Path) -> None:
    with serve(journal=str(tmp_path / "journal"), settings=CALM) as endpoint:
        peer = RawPeer(endpoint)
        peer.join("a")
        peer.receive(Decide)
    with peer:
        assert peer.ends() == 0


def test_a_master_that_is_stopped_for_good_forgets_its_journal(tmp_path: Path) -> None:
    journal = str(tmp_path / "journal")
    first = serve(journal=journal, settings=CALM)
    key = first.start().key
    first.stop("for good")
    with serve(journal=journal, settings=CALM) as endpoint, RawPeer(endpoint) as peer:
        assert endpoint.key != key
        assert peer.welcome.boot == 1


def test_a_key_that_is_given_is_the_masters() -> None:
    with serve(key=b"the key", settings=CALM) as endpoint:
        assert endpoint.key == b"the key"


def test_a_second_master_on_the_journal_supersedes_the_first_which_says_nothing_more(tmp_path: Path) -> None:
    journal = str(tmp_path / "journal")
    first = serve(journal=journal, settings=CALM)
    with RawPeer(first.start()) as peer:
        peer.join("a")
        peer.receive(Decide)
        with serve(journal=journal, settings=CALM) as endpoint:
            assert endpoint.port != first.server.endpoint.port
            peer.send(StoreRequest(0, 0, StoreOp.SET, ("k",), (b"lost",)))
            with pytest.raises((ConnectionError, TimeoutError)):
                peer.receive(Reply)
            assert first.superseded.wait(10)
            first.join()
            with RawPeer(endpoint) as other:
                other.send(Register("a", "g", "h", 1, (), False, (), (), False, None))
                other.receive(Registered)  # the second knows the group, and nothing of what the first did not write
                assert other.ask(StoreOp.CHECK, "k").flag is False


def test_an_idle_master_notices_that_it_was_superseded(tmp_path: Path) -> None:
    journal = str(tmp_path / "journal")
    first = serve(journal=journal, settings=CALM)
    first.start()
    with serve(journal=journal, settings=CALM):
        assert first.superseded.wait(10)
        first.join()


def test_the_journal_is_compacted_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SNAPSHOT_EVERY", 10)
    journal = str(tmp_path / "journal")
    first = serve(journal=journal, settings=CALM)
    with RawPeer(first.start()) as peer:
        peer.join("a")
        decide = peer.receive(Decide)
        for _ in range(45):
            total = peer.ask(StoreOp.ADD, "k", amount=1).amount
        first.crash()
    assert total == 45
    again = serve(journal=journal, settings=CALM)
    with RawPeer(again.start()) as peer:
        assert again.server._journal.entries_since_snapshot <= 11
        peer.send(Register("a", "g", "h", 1, decide.members, False, (), (), False, None))
        peer.receive(Registered)
        assert peer.ask(StoreOp.GET, "k").values == (b"45",)
    again.stop()
