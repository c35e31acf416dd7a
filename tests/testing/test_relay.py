import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from ray_pccl import Endpoint
from ray_pccl.testing.relay import Relay

SILENCE_S = 0.2


@pytest.fixture
def echo() -> Iterator[Endpoint]:
    """A server that sends back what it gets."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve_one(sock: socket.socket) -> None:
        with sock, contextlib.suppress(ConnectionResetError):
            while data := sock.recv(4096):
                sock.sendall(data)

    def serve() -> None:
        while True:
            try:
                sock, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=serve_one, args=(sock,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield Endpoint("127.0.0.1", listening.getsockname()[1], b"key")
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()


@pytest.fixture
def relay(echo: Endpoint) -> Iterator[Relay]:
    relay = Relay(echo)
    yield relay
    relay.close()


@pytest.fixture
def sock(relay: Relay) -> Iterator[socket.socket]:
    with socket.create_connection((relay.endpoint.host, relay.endpoint.port), timeout=5) as sock:
        sock.sendall(b"hello")
        assert sock.recv(5) == b"hello"
        yield sock


def is_silent(sock: socket.socket) -> bool:
    sock.settimeout(SILENCE_S)
    try:
        sock.recv(1)
    except TimeoutError:
        return True
    finally:
        sock.settimeout(5)
    return False


def test_a_relay_has_the_key_of_its_master(relay: Relay, echo: Endpoint) -> None:
    assert relay.endpoint.key == echo.key
    assert relay.endpoint.port != echo.port


def test_what_is_delayed_comes_that_much_later_each_way_and_in_order(relay: Relay, sock: socket.socket) -> None:
    relay.delay(0.1)
    started = time.monotonic()
    sock.sendall(b"12")
    sock.sendall(b"34")

    assert sock.recv(2, socket.MSG_WAITALL) + sock.recv(2, socket.MSG_WAITALL) == b"1234"
    assert 0.2 <= time.monotonic() - started < 1.0


def test_a_partition_lets_nothing_through_and_healing_delivers_what_was_held_back(
    relay: Relay, sock: socket.socket
) -> None:
    relay.partition()
    sock.sendall(b"late")
    assert is_silent(sock)

    relay.heal()

    assert sock.recv(4, socket.MSG_WAITALL) == b"late"


def test_a_new_connection_hears_nothing_during_a_partition(relay: Relay) -> None:
    relay.partition()
    with socket.create_connection((relay.endpoint.host, relay.endpoint.port), timeout=5) as sock:
        sock.sendall(b"x")
        assert is_silent(sock)

        relay.heal()

        assert sock.recv(1) == b"x"


def test_healing_with_a_reset_breaks_the_old_connections_and_lets_new_ones_through(
    relay: Relay, sock: socket.socket
) -> None:
    relay.partition()
    sock.sendall(b"lost")

    relay.heal(reset=True)

    with pytest.raises(ConnectionResetError):
        sock.recv(1)
    with socket.create_connection((relay.endpoint.host, relay.endpoint.port), timeout=5) as fresh:
        fresh.sendall(b"y")
        assert fresh.recv(1) == b"y"


def test_the_end_of_one_side_reaches_the_other(relay: Relay) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    direct = Relay(Endpoint("127.0.0.1", listening.getsockname()[1], b"key"))
    near = socket.create_connection((direct.endpoint.host, direct.endpoint.port), timeout=5)
    far, _ = listening.accept()
    near.sendall(b"z")
    assert far.recv(1) == b"z"

    near.close()

    far.settimeout(5)
    assert far.recv(1) == b""
    far.close()
    listening.close()
    direct.close()


def test_a_relay_without_a_master_behind_it_closes_what_comes(relay: Relay, echo: Endpoint) -> None:
    unused = socket.create_server(("127.0.0.1", 0))
    port = unused.getsockname()[1]
    unused.close()
    dead = Relay(Endpoint("127.0.0.1", port, b"key"))
    with socket.create_connection((dead.endpoint.host, dead.endpoint.port), timeout=5) as sock:
        assert sock.recv(1) == b""
    dead.close()
