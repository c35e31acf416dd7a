"""Probes over loopback: figures, and an end whatever the other side does."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from ray_pccl.errors import ProtocolError
from ray_pccl.topology import probing
from ray_pccl.topology.probing import Direction, Plan, UnreachableError, common_rate

THERE, BACK = Direction.THERE, Direction.BACK
Serve = Callable[[socket.socket], object]


def _never() -> bool:
    return False


@contextlib.contextmanager
def _listening(serve: Serve) -> Iterator[Callable[[], socket.socket]]:
    """Someone who serves each connection in a thread of its own; what is given dials it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads: list[threading.Thread] = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = listener.accept()
                    threads.append(threading.Thread(target=quietly, args=(sock,)))
                    threads[-1].start()

        def quietly(sock: socket.socket) -> None:
            with contextlib.suppress(OSError, ProtocolError):
                serve(sock)

        accepting = threading.Thread(target=accept)
        accepting.start()
        yield lambda: socket.create_connection(listener.getsockname())
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join(5)
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()


def _measured(serve: Serve, plan: Plan, stopped: Callable[[], bool] = _never) -> dict[Direction, float | None]:
    with _listening(serve) as connect:
        return probing.measure(connect, plan, stopped)


def _serving(sock: socket.socket) -> None:
    probing.serve(sock, _never)


@pytest.mark.parametrize("streams", [1, 4])
def test_both_directions_are_measured_in_about_the_time_agreed(streams: int) -> None:
    began = time.monotonic()
    rates = _measured(_serving, Plan(streams, 0.1))
    assert 0.2 <= time.monotonic() - began < 3.0
    assert set(rates) == {THERE, BACK} and all(rate is not None and rate > 1e6 for rate in rates.values())


def test_only_the_direction_that_is_wanted_is_measured() -> None:
    assert list(_measured(_serving, Plan(1, 0.05, (BACK,)))) == [BACK]


def _throttled(rate: float) -> Serve:
    """Serves as one does behind a shaper: 256 KiB at once, and then so many bytes per second."""

    def serve(sock: socket.socket) -> None:
        with sock:
            assert sock.recv(3, socket.MSG_WAITALL)[0] == BACK
            began, sent = time.monotonic(), -(256 << 10)
            while time.monotonic() - began < 3:
                if sent < rate * (time.monotonic() - began):
                    sent += sock.send(bytes(4096))
                else:
                    time.sleep(0.002)

    return serve


def test_what_a_shaper_lets_through_at_once_does_not_count() -> None:
    rate = _measured(_throttled(1_000_000), Plan(1, 0.3, (BACK,)))[BACK]
    assert rate == pytest.approx(1_000_000, rel=0.3)  # all of it would make 1.8 million


def test_streams_that_do_not_begin_together_count_while_all_of_them_run() -> None:
    """The way carries 100 a second: alone each of two gets all of it, together half."""
    early = [(0.0, 0), (0.1, 10), (0.3, 20), (0.3, 20)]
    late = [(0.1, 0), (0.3, 10), (0.4, 20), (0.4, 20)]
    assert common_rate([early, late], 0.3) == pytest.approx(100)


def test_streams_that_hardly_meet_tell_nothing() -> None:
    early, late = [(0.0, 0), (0.3, 30)], [(0.2, 0), (0.5, 30)]
    assert common_rate([early, late], 0.3) is None
    assert common_rate([early, []], 0.3) is None
    assert common_rate([[(0.0, 5), (0.3, 5)]], 0.3) is None


def test_one_stream_that_carries_little_is_measured_by_what_it_carries() -> None:
    assert common_rate([[(0.0, 1000), (0.05, 2000), (0.2, 3000), (0.3, 3000)]], 0.3) == pytest.approx(3333, rel=0.01)


def test_who_cannot_be_reached_is_tried_twice_and_counts_zero() -> None:
    tries = []

    def connect() -> socket.socket:
        tries.append(1)
        raise UnreachableError("no route to host")

    assert probing.measure(connect, Plan(1, 0.1, (THERE,)), _never) == {THERE: 0.0}
    assert len(tries) == 2
    assert probing.measure(connect, Plan(1, 0.1), _never) == {THERE: 0.0, BACK: 0.0}


def test_who_answers_the_second_time_is_measured() -> None:
    tries = iter([UnreachableError("busy")])
    with _listening(_serving) as dial:

        def connect() -> socket.socket:
            for error in tries:
                raise error
            return dial()

        assert probing.measure(connect, Plan(1, 0.05, (THERE,)), _never)[THERE]


def test_a_handshake_that_fails_leaves_the_edge_unknown() -> None:
    def connect() -> socket.socket:
        raise ConnectionResetError("in the handshake")

    assert probing.measure(connect, Plan(2, 0.1), _never) == {THERE: None, BACK: None}


@pytest.mark.parametrize("direction", [THERE, BACK])
def test_one_that_hangs_up_leaves_the_edge_unknown(direction: Direction) -> None:
    assert _measured(lambda sock: sock.close(), Plan(2, 0.1, (direction,))) == {direction: None}


def test_what_fails_once_is_tried_once_more() -> None:
    first = threading.Event()

    def serve(sock: socket.socket) -> None:
        if first.is_set():
            _serving(sock)
        else:
            first.set()
            sock.close()

    rates = _measured(serve, Plan(1, 0.05, (BACK,)))
    assert rates[BACK] is not None and rates[BACK] > 0


@pytest.mark.parametrize("direction", [THERE, BACK])
def test_one_that_says_and_takes_nothing_is_given_up(direction: Direction, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "GRACE_S", 0.3)
    over = threading.Event()

    def hold(sock: socket.socket) -> None:
        over.wait(10)
        sock.close()

    with _listening(hold) as connect:
        began = time.monotonic()
        assert probing.measure(connect, Plan(2, 0.1, (direction,)), _never) == {direction: None}
        assert time.monotonic() - began < 2.0
        over.set()


@pytest.mark.parametrize("direction", [THERE, BACK])
def test_who_is_stopped_ends_at_once(direction: Direction) -> None:
    stopped = threading.Event()
    threading.Timer(0.2, stopped.set).start()
    began = time.monotonic()
    _measured(lambda sock: probing.serve(sock, stopped.is_set), Plan(2, 2.0, (direction,)), stopped.is_set)
    assert time.monotonic() - began < 1.5


@pytest.mark.parametrize("head", [struct.pack(">BH", 3, 100), struct.pack(">BH", 1, 2001), struct.pack(">BH", 2, 0)])
def test_a_probe_that_asks_for_too_much_is_refused(head: bytes) -> None:
    near, far = socket.socketpair()
    with near:
        near.sendall(head)
        with pytest.raises(ProtocolError, match="a probe of kind"):
            probing.serve(far, _never)
        assert near.recv(1) == b""


def test_a_probe_that_says_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "MOST_MS", 100)
    monkeypatch.setattr(probing, "GRACE_S", 0.1)
    near, far = socket.socketpair()
    with near, pytest.raises(TimeoutError):
        probing.serve(far, _never)
