from __future__ import annotations

import struct
import tracemalloc
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_pccl.control import frames
from ray_pccl.control.frames import MAX_FRAME_BYTES, FrameReader
from ray_pccl.control.messages import (
    Answer,
    Ask,
    Beat,
    Decide,
    Evicted,
    Failure,
    FromMaster,
    Join,
    Leave,
    LinkBroken,
    OpenVote,
    OperationReport,
    OperationState,
    Outcome,
    ProcessState,
    Reply,
    Seen,
    StoreOp,
    StoreRequest,
    ToMaster,
    Verdict,
    Vote,
    VoteCount,
    VoteKind,
)
from ray_pccl.errors import ProtocolError
from ray_pccl.types import Member

NAMES = st.text(max_size=12)
NUMBERS = st.integers(0, 2**63 - 1)
REPORTS = st.builds(
    OperationReport,
    NUMBERS,
    NUMBERS,
    st.sampled_from(OperationState),
    NUMBERS,
    st.booleans(),
    st.none() | st.builds(Failure, NAMES, NAMES, st.dictionaries(NAMES, NAMES)),
)
TO_MASTER = st.one_of(
    st.builds(Beat, NUMBERS),
    st.builds(Leave),
    st.builds(LinkBroken, NUMBERS, NAMES),
    st.builds(Answer, st.tuples(NUMBERS, NUMBERS), NUMBERS, st.lists(REPORTS, max_size=3).map(tuple)),
    st.builds(Vote, st.builds(OpenVote, st.sampled_from(VoteKind), NUMBERS, st.floats(0, 1e6))),
    st.builds(
        StoreRequest,
        NUMBERS,
        NUMBERS,
        st.sampled_from(StoreOp),
        st.lists(NAMES, max_size=3).map(tuple),
        st.lists(st.binary(max_size=20), max_size=3).map(tuple),
        st.integers(-(2**63), 2**63 - 1),
    ),
)
A_JOIN = Join("a", "g", "h", 2, None, None, 3.0, 0.5, True, None)


def _fed(reader: FrameReader, stream: bytes, cuts: list[int]) -> list[object]:
    places = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    return [message for start, end in pairwise(places) for message in reader.feed(stream[start:end])]


@given(st.lists(TO_MASTER, max_size=8), st.lists(st.integers(0, 2**16), max_size=12))
def test_any_split_of_a_stream_gives_the_same_messages(messages: list, cuts: list[int]) -> None:
    stream = b"".join(map(frames.encode, messages))
    assert _fed(FrameReader(at_master=True), stream, cuts) == messages


def test_one_byte_at_a_time_gives_the_same_messages() -> None:
    decide = Decide(
        3,
        (Member("a", "h"), Member("b", "h")),
        1,
        (Outcome(0, 1, Verdict.CONSUME, 2, Failure("PeerLostError", "text", {"peers": ["c"]})),),
        {"update_topology": VoteCount(4, True)},
        (("c", "it left"),),
        2,
        {"global_world_size": 2},
    )
    messages = [Ask((1, 2)), decide, Evicted("reason"), Reply(7, (b"x",), amount=-3)]
    stream = b"".join(map(frames.encode, messages))
    assert _fed(FrameReader(at_master=False), stream, list(range(len(stream)))) == messages


@given(st.binary(max_size=200), st.lists(st.integers(0, 2**16), max_size=4))
def test_garbage_is_a_protocol_error_or_nothing_yet_but_never_anything_else(garbage: bytes, cuts: list[int]) -> None:
    try:
        messages = _fed(FrameReader(at_master=True), garbage, cuts)
    except ProtocolError:
        return
    assert all(isinstance(message, ToMaster) for message in messages)


@given(st.binary(max_size=200))
def test_a_frame_of_garbage_is_a_protocol_error_or_a_message(body: bytes) -> None:
    for at_master, kinds in ((True, ToMaster), (False, FromMaster)):
        try:
            messages = FrameReader(at_master=at_master).feed(struct.pack(">I", len(body)) + body)
        except ProtocolError:
            continue
        assert all(isinstance(message, kinds) for message in messages)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        msgspec.msgpack.encode(["NoSuchMessage", 1]),
        msgspec.msgpack.encode(["Beat"]),
        msgspec.msgpack.encode(["Beat", "one"]),
        msgspec.msgpack.encode({"type": "Beat", "number": 1}),
        msgspec.msgpack.encode(["Evicted", "only the master says this"]),
        msgspec.msgpack.encode(["Join", "a", "g", "h", 2.5, None, None, 3.0, 0.5, True, None]),
        msgspec.msgpack.encode(["Seen", "a", "no such state"]),
        frames.encode(Beat(1))[4:] + b"\x00",
        b"\x92\xa4Beat\xc1",
        b"\x91" * 5000,
    ],
)
def test_a_frame_that_is_no_message_to_the_master_is_a_protocol_error(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        FrameReader(at_master=True).feed(struct.pack(">I", len(body)) + body)


def test_what_peers_say_is_no_message_from_the_master() -> None:
    for message in (A_JOIN, Leave(), Seen("a", ProcessState.RUNNING)):
        with pytest.raises(ProtocolError):
            FrameReader(at_master=False).feed(frames.encode(message))


def test_an_oversized_length_is_refused_before_its_body_comes() -> None:
    with pytest.raises(ProtocolError, match=str(MAX_FRAME_BYTES)):
        FrameReader(at_master=True).feed(struct.pack(">I", MAX_FRAME_BYTES + 1))


def test_the_largest_frame_passes_and_one_byte_more_does_not() -> None:
    overhead = len(frames.encode(Evicted("x" * (1 << 20)))) - 4 - (1 << 20)
    largest = Evicted("x" * (MAX_FRAME_BYTES - overhead))
    assert FrameReader(at_master=False).feed(frames.encode(largest)) == [largest]
    with pytest.raises(ProtocolError, match="Evicted"):
        frames.encode(Evicted("x" * (MAX_FRAME_BYTES - overhead + 1)))


def test_a_stream_of_any_length_takes_no_more_memory_than_one_frame() -> None:
    reader = FrameReader(at_master=True)
    frame = frames.encode(StoreRequest(0, 0, StoreOp.SET, ("k",), (bytes(1 << 16),)))
    tracemalloc.start()
    try:
        for _ in range(500):  # 32 MiB, a frame and a half at a time
            assert len(reader.feed(frame + frame[: len(frame) // 2])) == 1
            assert len(reader.feed(frame[len(frame) // 2 :])) == 1
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * len(frame)
