"""Whatever comes to a peer's data port from who is no member is dropped, and the group goes on."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Callable

import pytest

from ray_pccl import Endpoint
from ray_pccl.control.handshake import ANSWER_BYTES, CHALLENGE_BYTES
from ray_pccl.ring import dialing
from ray_pccl.ring.dialing import Address
from ray_pccl.ring.wire import HEAD, PIECE_BYTES, Frame, Type
from ray_pccl.testing import MasterProcess, PeerGroup, PeerProcess, eventually
from tests.collectives import programs
from tests.collectives.conftest import check, over, together

PATIENCE_S = 20.0


def _address(peer: PeerProcess) -> Address:
    return Address.parse(peer.run(lambda comm: comm._running._plane.address))


def _tcp(address: Address) -> socket.socket:
    return socket.create_connection((address.host, address.port), PATIENCE_S)


def _unix(address: Address) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(PATIENCE_S)
    sock.connect(address.unix)
    return sock


DOORS = pytest.mark.parametrize("door", [_tcp, _unix])
Door = Callable[[Address], socket.socket]


def _is_dropped(sock: socket.socket) -> bool:
    """Reads to the end, which has to come."""
    sock.settimeout(PATIENCE_S)
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return True


def _send(sock: socket.socket, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        sock.sendall(data)


@DOORS
@over(2)
def test_garbage_is_dropped_and_the_group_goes_on(group: PeerGroup, door: Door) -> None:
    address = _address(group[0])
    for length in (1, ANSWER_BYTES, 1000, 1 << 20):
        with door(address) as sock:
            _send(sock, os.urandom(length))
            with contextlib.suppress(OSError):  # it may be dropped already
                sock.shutdown(socket.SHUT_WR)
            assert _is_dropped(sock)
    check(together(group, programs.meet, "numpy", "float32"))


@DOORS
@over(2)
def test_who_does_not_hold_the_key_is_dropped(group: PeerGroup, door: Door) -> None:
    address = _address(group[0])
    with door(address) as sock:
        assert len(sock.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)) == CHALLENGE_BYTES
        _send(sock, bytes(ANSWER_BYTES))
        assert _is_dropped(sock)
    check(together(group, programs.meet, "numpy", "float32"))


@over(2)
def test_the_key_of_another_group_opens_nothing(group: PeerGroup, shared_master: MasterProcess) -> None:
    address = _address(group[0])
    other = dialing.data_key(shared_master.endpoint.key, "another group")
    with pytest.raises(Exception, match=r"closed|reset|key"):
        dialing.dial(address, "tcp", other, "stranger", [])
    check(together(group, programs.meet, "numpy", "float32"))


@pytest.mark.slow
@over(2, transports=("tcp",))
def test_who_connects_and_says_nothing_holds_up_nobody(group: PeerGroup) -> None:
    address = _address(group[0])
    with contextlib.ExitStack() as idle:
        socks = [idle.enter_context(_tcp(address)) for _ in range(100)]
        check(together(group, programs.meet, "numpy", "float32"))
        assert all(_is_dropped(sock) for sock in socks)


def _frames() -> list[bytes]:
    """What even somebody with the key may not send."""
    oversized = HEAD.pack(Type.DATA, PIECE_BYTES + 1, 1, 0, 0, 0)
    return [
        oversized,
        HEAD.pack(Type.ENTER, 1 << 20, 1, 0, 0, 0),
        HEAD.pack(200, 0, 1, 0, 0, 0),
        HEAD.pack(Type.ENTER, 0, -1, 0, 0, 0),
        random.Random(1).randbytes(5000),
        Frame(Type.REFUSE, 3, 1).pack() + b"\xc1\xc1\xc1",
    ]


def _data_key(endpoint: Endpoint, peer: PeerProcess) -> bytes:
    return dialing.data_key(endpoint.key, peer.call("peer_group"))


@over(2)
def test_a_stranger_with_the_key_can_not_disturb_the_group(group: PeerGroup, shared_master: MasterProcess) -> None:
    address, key = _address(group[0]), _data_key(shared_master.endpoint, group[0])
    for number, data in enumerate(_frames()):
        meeting = dialing.dial(address, "tcp", key, f"stranger-{number}", [])
        with meeting.sock as sock:
            sock.settimeout(PATIENCE_S)
            _send(sock, data)
            if number < 4:
                assert _is_dropped(sock)
        check(together(group, programs.meet, "numpy", "float32"))


@over(2)
def test_links_of_strangers_are_let_go_when_they_close(group: PeerGroup, shared_master: MasterProcess) -> None:
    peer = group[0]
    address, key = _address(peer), _data_key(shared_master.endpoint, peer)
    before = peer.run(programs.open_files)
    for number in range(50):
        with dialing.dial(address, "auto", key, f"passer-by-{number}", []).sock:
            pass
    eventually(lambda: peer.run(programs.open_files) <= before, PATIENCE_S, "all are closed")
    check(together(group, programs.meet, "numpy", "float32"))
