"""Frames: what is sent comes out, however it is cut; what is no frame is a `ProtocolError`, and nothing else."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_pccl.errors import ProtocolError
from ray_pccl.ring.wire import CONTROL_BYTES, HEAD, PIECE_BYTES, Frame, Receiver, Type, parse

WITH_DATA = (Type.DATA, Type.MESSAGE)
CONTROL = [type_ for type_ in Type if type_ not in WITH_DATA]
LARGEST_BUFFER = PIECE_BYTES
FUZZED = 100_000

Said = tuple[Frame, bytes]


class Sink:
    """Takes all frames, or drops the data of some."""

    def __init__(self, drops: frozenset[int] = frozenset(), wrong: int = 0) -> None:
        self.said: list[Said] = []
        self.dropped: list[Frame] = []
        self.largest = 0
        self._drops = drops
        self._wrong = wrong

    def control(self, frame: Frame, body: bytes) -> None:
        assert len(body) == frame.length <= CONTROL_BYTES
        self.said.append((frame, body))

    def destination(self, frame: Frame) -> memoryview | None:
        assert frame.length <= PIECE_BYTES
        if frame.tag in self._drops:
            return None
        self.largest = max(self.largest, frame.length)
        return memoryview(bytearray(frame.length + self._wrong))

    def data(self, frame: Frame, body: memoryview | None) -> None:
        if body is None:
            self.dropped.append(frame)
        else:
            self.said.append((frame, bytes(body)))


def feed(receiver: Receiver, data: bytes, random_: random.Random | None = None, most: int = 1 << 30) -> None:
    """Hands bytes over as a socket does: some of them at a time, never more than the buffer takes."""
    view = memoryview(data)
    while len(view):
        buffer = receiver.buffer()
        assert 0 < len(buffer) <= LARGEST_BUFFER, "an empty buffer would look like the end of the stream"
        count = min(len(buffer), len(view), most)
        if random_ is not None:
            count = random_.randint(1, count) if random_.random() < 0.7 else min(count, random_.randint(1, 60))
        buffer[:count] = view[:count]
        receiver.received(count)
        view = view[count:]


def stream(said: list[Said]) -> bytes:
    return b"".join(frame.pack() + body for frame, body in said)


def frames(random_: random.Random, number: int, longest: int) -> list[Said]:
    made = []
    for _ in range(number):
        type_ = random_.choice(list(Type))
        limit = PIECE_BYTES if type_ in WITH_DATA else CONTROL_BYTES
        length = min(limit, random_.choice([0, 1, 7, HEAD.size, random_.randint(0, longest)]))
        numbers = [random_.choice([0, 1, random_.getrandbits(31)]) for _ in range(3)]
        where = (random_.getrandbits(20), random_.getrandbits(40)) if type_ in WITH_DATA else (0, 0)
        made.append((Frame(type_, length, *numbers, *where), random_.randbytes(length)))
    return made


# ---------------------------------------------------------------------------------------------------- single frames


@pytest.mark.parametrize("type_", Type)
def test_a_head_comes_back_as_it_was(type_: Type) -> None:
    frame = Frame(type_, 1000, 2**40, 2**31 - 1, 2**50, 2**22, 2**40 - 1)
    assert parse(frame.pack()) == frame and len(frame.pack()) == HEAD.size


@pytest.mark.parametrize("type_", Type)
def test_the_limit_is_taken_and_one_byte_more_is_refused(type_: Type) -> None:
    limit = PIECE_BYTES if type_ in WITH_DATA else CONTROL_BYTES
    assert parse(Frame(type_, limit, 1).pack()).length == limit
    with pytest.raises(ProtocolError, match="over the limit"):
        parse(Frame(type_, limit + 1, 1).pack())


@pytest.mark.parametrize("kind", [0, 100, 255])
def test_an_unknown_type_is_refused(kind: int) -> None:
    with pytest.raises(ProtocolError, match="unknown type"):
        parse(HEAD.pack(kind, 0, 1, 0, 0, 0))


@pytest.mark.parametrize("place", range(4))
def test_a_negative_number_is_refused(place: int) -> None:
    numbers = [1] * 4
    numbers[place] = -1
    with pytest.raises(ProtocolError, match="negative"):
        parse(HEAD.pack(Type.ENTER, 0, *numbers))


@pytest.mark.parametrize("type_", Type)
@pytest.mark.parametrize("most", [1, 3, HEAD.size, 100_000])
def test_a_body_of_the_largest_size_comes_whole(type_: Type, most: int) -> None:
    length = (PIECE_BYTES if type_ in WITH_DATA else CONTROL_BYTES) if most > 3 else 500
    said = [(Frame(type_, length, 1), random.Random(1).randbytes(length)), (Frame(Type.PREPARED, 0, 1), b"")]
    sink = Sink()
    feed(Receiver(sink), stream(said), most=most)
    assert sink.said == said


def test_data_for_which_there_is_another_place_is_refused() -> None:
    for wrong in (1, -1):
        with pytest.raises(ProtocolError, match="are due"):
            feed(Receiver(Sink(wrong=wrong)), stream([(Frame(Type.DATA, 10, 1), bytes(10))]))


def test_what_is_dropped_half_way_leaves_its_memory_alone() -> None:
    place = memoryview(bytearray(100))
    sink = Sink()
    sink.destination = lambda frame: place if frame.tag == 1 else None  # type: ignore[method-assign]
    receiver = Receiver(sink)
    piece = Frame(Type.DATA, 100, 1, 1)
    data = stream([(piece, b"x" * 100), (Frame(Type.PREPARED, 0, 2), b"")])
    feed(receiver, data[: HEAD.size + 40])
    receiver.drop(lambda frame: frame.tag == 1)
    feed(receiver, data[HEAD.size + 40 :])
    assert bytes(place) == b"x" * 40 + bytes(60)
    assert sink.dropped == [piece] and sink.said == [(Frame(Type.PREPARED, 0, 2), b"")]


def test_dropping_does_not_touch_other_frames() -> None:
    sink = Sink()
    receiver = Receiver(sink)
    said = [(Frame(Type.DATA, 100, 1, 1), b"x" * 100)]
    feed(receiver, stream(said)[:60])
    receiver.drop(lambda frame: frame.tag == 2)
    feed(receiver, stream(said)[60:])
    assert sink.said == said


# -------------------------------------------------------------------------------------------------------- all splits


def test_a_stream_may_be_cut_anywhere() -> None:
    said = frames(random.Random(2), 4, 60)
    data = stream(said)
    for cut in range(1, len(data)):
        sink = Sink()
        receiver = Receiver(sink)
        feed(receiver, data[:cut])
        feed(receiver, data[cut:])
        assert sink.said == said


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 12))
def test_frames_come_out_as_they_went_in_however_they_are_cut(random_: random.Random, number: int) -> None:
    said = frames(random_, number, 3000)
    drops = frozenset({0}) if random_.random() < 0.3 else frozenset()
    sink = Sink(drops)
    feed(Receiver(sink), stream(said), random_)
    kept = [one for one in said if one[0].type not in WITH_DATA or one[0].tag not in drops]
    assert sink.said == kept
    assert sink.dropped == [one[0] for one in said if one not in kept]


# ------------------------------------------------------------------------------------------------------------- fuzz


def _mutated(random_: random.Random, data: bytes) -> bytes:
    """A valid stream in which something is wrong: bytes changed, lost, doubled or swapped."""
    spoilt = bytearray(data)
    for _ in range(random_.randint(1, 4)):
        at = random_.randrange(len(spoilt))
        match random_.randrange(5):
            case 0:
                spoilt[at] = random_.getrandbits(8)
            case 1:
                del spoilt[at : at + random_.randint(1, 50)]
            case 2:
                spoilt[at:at] = random_.randbytes(random_.randint(1, 50))
            case 3:
                spoilt[at:at] = spoilt[at : at + 50]
            case _:
                spoilt[at : at + 8] = random_.choice([b"\xff" * 8, bytes(8), b"\x7f" * 8])
        if not spoilt:
            return b"\0"
    return bytes(spoilt)


def test_no_input_does_anything_but_give_frames_or_a_protocol_error() -> None:
    random_ = random.Random(3)
    receivers = 0
    refused = 0
    for number in range(FUZZED):
        if number % 3 == 0:
            data = random_.randbytes(random_.randint(1, 120))
        elif number % 3 == 1:  # the type is known, the rest is not
            data = bytes([random_.randint(1, 11)]) + random_.randbytes(random_.randint(39, 200))
        else:
            data = _mutated(random_, stream(frames(random_, random_.randint(1, 3), 80)))
        sink = Sink(frozenset({0}) if number % 5 == 0 else frozenset())
        try:
            feed(Receiver(sink), data, random_)
        except ProtocolError:
            refused += 1
        assert sink.largest <= PIECE_BYTES
        receivers += 1
    assert receivers == FUZZED and 0.2 * FUZZED < refused < FUZZED
