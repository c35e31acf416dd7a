"""The journal's records: replayed, they give what the running master holds."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from master_actor.core.actions import Append
from master_actor.core.records import (
    Booted,
    Durable,
    EpochBegan,
    GroupClosed,
    GroupEmptied,
    Record,
    Stamp,
    StoreWritten,
    VoteCounted,
    decode_records,
    decode_snapshot,
    encode_records,
    encode_snapshot,
)
from ray_pccl.control.messages import Answer, Ask, Leave, LinkBroken, Query, Question, StoreOp, StoreRequest, VoteCount
from tests.core.driven import PENDING, TOPOLOGY, DrivenMaster, of

EXAMPLES: list[Record] = [
    Booted(1, "nonce", "master", "h", 1, b"key"),
    EpochBegan("g", 1, of("a", "b"), 1, {"update_topology": VoteCount(1, True)}, 2, None),
    VoteCounted("g", PENDING, VoteCount(3, False)),
    StoreWritten("g", "k", b"v", (Stamp("a", 0, (b"x",), True, -3),)),
    StoreWritten("g", "l", None, (Stamp("a", 1),)),
    StoreWritten("g", "m", b"v"),
    StoreWritten("g", "m", None),
    GroupClosed("g"),
    EpochBegan("h", 4, of("x"), 2, {}, 1, 8),
    GroupEmptied("h"),
]


def _folded(records: list[Record]) -> Durable:
    durable = Durable()
    for record in records:
        durable.apply(record)
    return durable


def _without_stamps(durable: Durable) -> object:
    """Stamps whose answers were confirmed are dropped without a record: all but them must be the same."""
    groups = {
        name: msgspec.structs.replace(group, store={key: stored.value for key, stored in group.store.items()})
        for name, group in durable.groups.items()
        if group.epoch or group.closed or group.store
    }
    return durable.identity, groups


def _stamps(durable: Durable) -> set[tuple[str, str, Stamp]]:
    return {
        (name, key, stamp)
        for name, group in durable.groups.items()
        for key, stored in group.store.items()
        for stamp in stored.stamps
    }


def test_records_survive_their_bytes() -> None:
    assert decode_records(encode_records(EXAMPLES)) == EXAMPLES


def test_a_snapshot_stands_for_the_records_before_it() -> None:
    for cut in range(len(EXAMPLES) + 1):
        durable = decode_snapshot(encode_snapshot(_folded(EXAMPLES[:cut])))
        for record in EXAMPLES[cut:]:
            durable.apply(record)
        assert durable == _folded(EXAMPLES)


def test_the_fold_of_the_records_is_what_they_say() -> None:
    durable = _folded(EXAMPLES)
    group, gone = durable.groups["g"], durable.groups["h"]
    assert (group.epoch, group.members, group.closed, group.min_world_size) == (1, of("a", "b"), True, 2)
    assert group.votes == {"update_topology": VoteCount(1, True), "are_peers_pending": VoteCount(3, False)}
    assert set(group.store) == {"k", "l"}
    assert (gone.epoch, gone.members, gone.store, gone.votes, gone.max_world_size) == (4, (), {}, {}, None)


def test_groups_share_nothing() -> None:
    durable = _folded([StoreWritten("g", "k", b"v"), VoteCounted("g", TOPOLOGY, VoteCount(1, True))])
    assert durable.group("h").store == {} == durable.group("h").votes


def test_what_is_no_record_is_an_error() -> None:
    with pytest.raises(TypeError):
        Durable().apply("nonsense")  # type: ignore[arg-type]


@pytest.mark.parametrize("entry", [b"", b"nonsense", msgspec.msgpack.encode([["NoSuchRecord"]])])
def test_a_spoilt_entry_is_an_error_and_not_a_shorter_history(entry: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_records(entry)


PEERS = st.sampled_from("abcdef")
STEPS = st.one_of(
    st.tuples(st.sampled_from(["join", "leave", "dies", "evict", "topology", "pending", "close"]), PEERS),
    st.tuples(st.sampled_from(["set", "add", "delete", "append"]), PEERS, st.sampled_from("kl"), st.booleans()),
    st.tuples(st.just("link"), PEERS, PEERS),
    st.tuples(st.just("time"), st.sampled_from([0.1, 0.5, 2.0, 6.0])),
)


class _Play:
    """Plays random steps; every question of the master is answered by whoever lives."""

    def __init__(self) -> None:
        self.master = DrivenMaster()
        self.numbers = dict.fromkeys("abcdef", 0)

    def step(self, what: str, *rest) -> None:
        master = self.master
        if what == "time":
            self._do(master.at(master.now + rest[0]))
            return
        peer = rest[0]
        if what == "join" and ("g" not in master.master.groups or not master.group().has(peer)):
            self._do(master.join(peer, max_world_size=4))
        elif what == "leave":
            self._do(master.say(peer, Leave()))
        elif what in ("dies", "evict"):
            self._do(master.dies(peer) if what == "dies" else master.evict(peer))
        elif what in ("topology", "pending") and "g" in master.master.groups:
            kind = TOPOLOGY if what == "topology" else PENDING
            self._do(master.vote(peer, kind, master.group().ballot.counted(kind).served))
        elif what == "close":
            self._do(master.say(peer, Query(0, Question.SET_CLOSED)))
        elif what == "link" and "g" in master.master.groups:
            self._do(master.say(peer, LinkBroken(master.group().durable.epoch, rest[1])))
        elif what in ("set", "add", "delete", "append"):
            self._store(StoreOp(what), *rest)

    def _store(self, op: StoreOp, peer: str, key: str, acknowledge: bool) -> None:
        number = self.numbers[peer]
        self.numbers[peer] += 1
        values = (b"1",) if op in (StoreOp.SET, StoreOp.APPEND) else ()
        self._do(self.master.say(peer, StoreRequest(number, number if acknowledge else 0, op, (key,), values, 1)))

    def _do(self, actions: list) -> None:
        for action in actions:
            if not isinstance(action, Append) and isinstance(action.message, Ask):
                self._do(self.master.say(action.peer_id, Answer(action.message.round, 0, ())))


@settings(max_examples=150, deadline=None)
@given(st.lists(STEPS, max_size=40))
def test_replaying_the_journal_gives_what_the_running_master_holds(steps) -> None:
    play = _Play()
    for step in [("join", "a"), ("join", "b"), ("time", 0.5), *steps]:
        play.step(*step)
    running, replayed = play.master.master.durable, play.master.replayed()
    assert _without_stamps(replayed) == _without_stamps(running)
    assert _stamps(running) <= _stamps(replayed)
    assert decode_snapshot(encode_snapshot(running)) == running
