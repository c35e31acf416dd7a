"""One connection: frames out, frames in, and memory that is let go of."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from ray_pccl.errors import ProtocolError
from ray_pccl.ring.link import Link
from ray_pccl.ring.wire import HEAD, PIECE_BYTES, Frame, Type

LARGE = PIECE_BYTES


class Handler:
    """Notes what a link brings."""

    def __init__(self) -> None:
        self.said: list[tuple[Frame, bytes]] = []
        self.drops = False

    def control(self, link: Link, frame: Frame, body: bytes) -> None:
        self.said.append((frame, body))

    def destination(self, link: Link, frame: Frame) -> memoryview | None:
        return None if self.drops else memoryview(bytearray(frame.length))

    def data(self, link: Link, frame: Frame, body: memoryview | None) -> None:
        if body is not None:
            self.said.append((frame, bytes(body)))


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link, Handler]]:
    """A sender, a receiver, and who takes what it receives."""
    ours, theirs = socket.socketpair()
    handler = Handler()
    for sock in (ours, theirs):
        sock.setblocking(False)
    yield Link(ours, "a", Handler(), local=True), Link(theirs, "b", handler, local=True), handler
    ours.close()
    theirs.close()


def _flow(sender: Link, receiver: Link) -> None:
    for _ in range(200):
        sender.pump()
        receiver.pull()


def test_frames_of_all_sizes_arrive_in_order(ends: tuple[Link, Link, Handler]) -> None:
    sender, receiver, handler = ends
    expected = []
    for number in range(40):
        body = bytes([number]) * (number * 1000)
        if number % 3:
            frame = Frame(Type.DATA, len(body), 1, 2, number, 3, 4)
            sender.send_data(frame, memoryview(body), object())
        else:
            frame, body = Frame(Type.ENTER, number, 1, 2, number), bytes(number)
            sender.send(frame, body)
        expected.append((frame, body))
    _flow(sender, receiver)
    assert handler.said == expected


def test_a_full_connection_asks_to_be_told_when_it_may_write_again(ends: tuple[Link, Link, Handler]) -> None:
    sender, receiver, handler = ends
    wishes: list[bool] = []
    sender.wants_write = lambda _link, wants: wishes.append(wants)
    for number in range(4):
        sender.send_data(Frame(Type.DATA, LARGE, 1, 0, number), memoryview(bytes(LARGE)), object())
    sender.pump()
    assert wishes == [True]
    _flow(sender, receiver)
    assert wishes == [True, False] and len(handler.said) == 4


def test_what_has_not_begun_is_dropped_with_its_owner_and_what_has_is_sent_on_from_a_copy(
    ends: tuple[Link, Link, Handler],
) -> None:
    sender, receiver, handler = ends
    first, second, third = (bytearray(b"x" * LARGE) for _ in range(3))
    mine, another = object(), object()
    sender.send_data(Frame(Type.DATA, LARGE, 1, 0, 1), memoryview(first), mine)
    sender.send_data(Frame(Type.DATA, LARGE, 1, 0, 2), memoryview(second), mine)
    sender.send_data(Frame(Type.DATA, LARGE, 1, 0, 3), memoryview(third), another)
    sender.pump()  # as much as the connection takes: the first has begun
    sender.release(mine)
    first[:] = second[:] = b"y" * LARGE  # they belong to the user again
    _flow(sender, receiver)
    assert [frame.number for frame, _ in handler.said] == [1, 3]
    assert all(body == b"x" * LARGE for _, body in handler.said)


def test_the_end_of_the_stream_is_an_error(ends: tuple[Link, Link, Handler]) -> None:
    sender, receiver, _ = ends
    receiver.pull()  # nothing there
    sender.sock.close()
    with pytest.raises(ConnectionError, match="closed"):
        receiver.pull()


def test_garbage_is_an_error(ends: tuple[Link, Link, Handler]) -> None:
    sender, receiver, _ = ends
    sender.sock.sendall(b"\xff" * HEAD.size)
    with pytest.raises(ProtocolError):
        receiver.pull()


def test_data_that_nobody_wants_is_passed_over(ends: tuple[Link, Link, Handler]) -> None:
    sender, receiver, handler = ends
    handler.drops = True
    sender.send_data(Frame(Type.DATA, LARGE, 1), memoryview(bytes(LARGE)), object())
    sender.send(Frame(Type.PREPARED, 0, 1))
    _flow(sender, receiver)
    assert handler.said == [(Frame(Type.PREPARED, 0, 1), b"")]


def test_the_rest_of_a_piece_is_dropped_when_its_memory_is_taken_back(ends: tuple[Link, Link, Handler]) -> None:
    sender, receiver, handler = ends
    sender.send_data(Frame(Type.DATA, LARGE, 1, 7), memoryview(bytes(LARGE)), object())
    sender.pump()
    receiver.pull()
    receiver.drop(lambda frame: frame.tag == 7)
    sender.send(Frame(Type.PREPARED, 0, 1))
    _flow(sender, receiver)
    assert handler.said == [(Frame(Type.PREPARED, 0, 1), b"")]
