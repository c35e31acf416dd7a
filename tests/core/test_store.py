"""The store of a group: what each request means, and that it counts once, whatever is lost on the way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from master_actor.core.records import Durable, Record, StoreWritten, decode_records, encode_records
from master_actor.core.store import MAX_VALUE_BYTES, Store
from ray_pccl.control import frames
from ray_pccl.control.messages import Failure, Reply, StoreOp, StoreRequest


class StoreUnderTest:
    """A store whose records and replies are kept; each peer numbers its requests as a real one does."""

    def __init__(self, records: list[Record] | None = None) -> None:
        self.records: list[Record] = list(records or [])
        self.replies: list[tuple[str, Reply]] = []
        self.durable = Durable()
        for record in self.records:
            self.durable.apply(record)
        self.store = Store(self.durable.group("g"), self._append, self._reply)
        self.now = 0.0
        self._next: dict[str, int] = {}

    def _append(self, record: Record) -> None:
        self.records.append(record)
        self.durable.apply(record)

    def _reply(self, peer_id: str, reply: Reply) -> None:
        frames.encode(reply)  # whatever is answered must be possible to send
        self.replies.append((peer_id, reply))

    def ask(
        self,
        op: StoreOp,
        keys: tuple[str, ...] = (),
        values: tuple[bytes, ...] = (),
        *,
        peer: str = "a",
        amount: int = 0,
        timeout_s: float = 0.0,
        number: int | None = None,
        acknowledged: int | None = None,
    ) -> Reply | None:
        """The reply to the request, if it comes at once."""
        if number is None:
            number = self._next[peer] = self._next.get(peer, -1) + 1
        acknowledged = number if acknowledged is None else acknowledged
        before = len(self.replies)
        self.store.request(peer, StoreRequest(number, acknowledged, op, keys, values, amount, timeout_s), self.now)
        own = [reply for who, reply in self.replies[before:] if (who, reply.number) == (peer, number)]
        assert len(own) <= 1
        return own[0] if own else None

    def tick(self, now: float) -> list[tuple[str, Reply]]:
        self.now = now
        before = len(self.replies)
        self.store.tick(now)
        return self.replies[before:]

    def get(self, *keys: str) -> tuple[bytes, ...]:
        reply = self.ask(StoreOp.GET, keys, peer="reader")
        assert reply is not None and reply.failure is None
        return reply.values

    def rebuilt(self) -> StoreUnderTest:
        """The store of a restarted master, from the bytes of the journal."""
        return StoreUnderTest(list(decode_records(encode_records(self.records))))


@pytest.fixture
def store() -> StoreUnderTest:
    return StoreUnderTest()


def _error(reply: Reply | None) -> Failure:
    assert reply is not None and reply.failure is not None
    return reply.failure


# ------------------------------------------------------------------------------------------- what requests mean


def test_what_was_set_is_got(store: StoreUnderTest) -> None:
    assert store.ask(StoreOp.SET, ("k", "l"), (b"1", b"2")) == Reply(0)
    assert store.get("l", "k") == (b"2", b"1")


def test_an_empty_value_is_a_value(store: StoreUnderTest) -> None:
    store.ask(StoreOp.SET, ("k",), (b"",))
    assert store.get("k") == (b"",)
    assert store.ask(StoreOp.CHECK, ("k",)).flag is True


def test_check_tells_whether_all_keys_are_there(store: StoreUnderTest) -> None:
    store.ask(StoreOp.SET, ("k",), (b"1",))
    assert store.ask(StoreOp.CHECK, ("k",)).flag is True
    assert store.ask(StoreOp.CHECK, ("k", "l")).flag is False
    assert store.ask(StoreOp.CHECK, ()).flag is True


def test_add_counts_from_zero_and_down(store: StoreUnderTest) -> None:
    assert store.ask(StoreOp.ADD, ("k",), amount=5).amount == 5
    assert store.ask(StoreOp.ADD, ("k",), amount=-7).amount == -2
    assert store.get("k") == (b"-2",)


def test_add_to_what_is_no_number_is_an_error_and_changes_nothing(store: StoreUnderTest) -> None:
    store.ask(StoreOp.SET, ("k",), (b"many",))
    failure = _error(store.ask(StoreOp.ADD, ("k",), amount=1))
    assert failure.error == "StoreError" and "many" in failure.text and "'k'" in failure.text
    assert store.get("k") == (b"many",)


@pytest.mark.parametrize("start", [str(2**63 - 1).encode(), str(2**64).encode(), b"9" * 100, b"-" + b"9" * 100])
def test_a_sum_that_no_reply_can_carry_is_an_error_and_not_the_masters_end(store: StoreUnderTest, start: bytes) -> None:
    store.ask(StoreOp.SET, ("k",), (start,))
    reply = store.ask(StoreOp.ADD, ("k",), amount=-(2**63) if start.startswith(b"-") else 2**63 - 1)
    encode_records(store.records)
    if reply.failure is not None:
        assert reply.failure.error == "StoreError"
        assert store.get("k") == (start,)


def test_append_adds_to_the_end(store: StoreUnderTest) -> None:
    store.ask(StoreOp.APPEND, ("k",), (b"ab",))
    store.ask(StoreOp.APPEND, ("k",), (b"c",))
    assert store.get("k") == (b"abc",)


@pytest.mark.parametrize(
    ("held", "expected", "desired", "answer", "holds"),
    [
        (None, b"", b"new", b"new", b"new"),
        (None, b"old", b"new", b"old", None),
        (b"old", b"old", b"new", b"new", b"new"),
        (b"old", b"other", b"new", b"old", b"old"),
        (b"old", b"", b"new", b"old", b"old"),
        (b"", b"", b"new", b"new", b"new"),
    ],
)
def test_compare_set_sets_only_what_it_expects(store: StoreUnderTest, held, expected, desired, answer, holds) -> None:
    if held is not None:
        store.ask(StoreOp.SET, ("k",), (held,))
    assert store.ask(StoreOp.COMPARE_SET, ("k",), (expected, desired)).values == (answer,)
    assert store.ask(StoreOp.CHECK, ("k",)).flag is (holds is not None)
    if holds is not None:
        assert store.get("k") == (holds,)


def test_delete_tells_whether_the_key_was_there(store: StoreUnderTest) -> None:
    store.ask(StoreOp.SET, ("k",), (b"1",))
    assert store.ask(StoreOp.DELETE, ("k",)).flag is True
    assert store.ask(StoreOp.DELETE, ("k",)).flag is False
    assert store.ask(StoreOp.CHECK, ("k",)).flag is False


def test_keys_are_counted_without_deleted_ones(store: StoreUnderTest) -> None:
    store.ask(StoreOp.SET, ("k", "l", "m"), (b"1", b"2", b"3"))
    store.ask(StoreOp.DELETE, ("l",))
    assert store.ask(StoreOp.NUM_KEYS).amount == 2


@pytest.mark.parametrize("op", [StoreOp.SET, StoreOp.APPEND])
def test_a_value_over_the_limit_is_refused_and_changes_nothing(store: StoreUnderTest, op: StoreOp) -> None:
    assert store.ask(op, ("k",), (bytes(MAX_VALUE_BYTES),)).failure is None
    failure = _error(store.ask(op, ("k",), (bytes(MAX_VALUE_BYTES + 1),)))
    assert failure.error == "StoreError" and str(MAX_VALUE_BYTES) in failure.text
    assert len(store.get("k")[0]) == MAX_VALUE_BYTES


@pytest.mark.parametrize(
    ("op", "keys", "values"),
    [
        (StoreOp.SET, ("k", "l"), (b"1",)),
        (StoreOp.SET, ("k",), ()),
        (StoreOp.COMPARE_SET, ("k",), (b"1",)),
        (StoreOp.ADD, ("k",), (b"1",)),
        (StoreOp.COMPARE_SET, ("k", "l"), (b"1", b"2", b"3", b"4")),
    ],
)
def test_a_request_whose_values_do_not_fit_its_keys_is_an_error(store: StoreUnderTest, op, keys, values) -> None:
    assert _error(store.ask(op, keys, values)).error == "StoreError"
    assert store.records == []


def test_values_that_are_too_much_for_one_answer_are_an_error(store: StoreUnderTest) -> None:
    for key in "kl":
        store.ask(StoreOp.SET, (key,), (bytes(3 << 20),))
    assert _error(store.ask(StoreOp.GET, ("k", "l"))).error == "StoreError"


# ------------------------------------------------------------------------------------------------------- waiting


def test_a_wait_is_answered_as_soon_as_the_last_key_is_there(store: StoreUnderTest) -> None:
    assert store.ask(StoreOp.WAIT, ("k", "l"), timeout_s=9.0) is None
    store.ask(StoreOp.SET, ("k",), (b"1",), peer="b")
    assert [who for who, _ in store.replies] == ["b"]
    store.ask(StoreOp.SET, ("l",), (b"2",), peer="b")
    assert store.replies[1:] == [("b", Reply(1)), ("a", Reply(0))]
    assert store.tick(100.0) == []


def test_a_get_waits_and_brings_the_value(store: StoreUnderTest) -> None:
    assert store.ask(StoreOp.GET, ("k",), timeout_s=9.0) is None
    store.ask(StoreOp.ADD, ("k",), amount=3, peer="b")
    assert store.replies[-1] == ("a", Reply(0, (b"3",)))


@pytest.mark.parametrize(
    ("op", "values"), [(StoreOp.APPEND, (b"x",)), (StoreOp.COMPARE_SET, (b"", b"x")), (StoreOp.ADD, ())]
)
def test_every_kind_of_write_ends_a_wait(store: StoreUnderTest, op: StoreOp, values: tuple[bytes, ...]) -> None:
    store.ask(StoreOp.WAIT, ("k",), timeout_s=9.0)
    store.ask(op, ("k",), values, peer="b")
    assert store.replies[-1] == ("a", Reply(0))


def test_a_wait_ends_with_its_time_and_names_the_keys_that_are_missing(store: StoreUnderTest) -> None:
    store.ask(StoreOp.SET, ("k",), (b"1",), peer="b")
    store.ask(StoreOp.WAIT, ("k", "l"), timeout_s=2.0)
    assert store.tick(1.99) == []
    ((who, reply),) = store.tick(2.0)
    failure = _error(reply)
    assert (who, failure.error, failure.details) == ("a", "StoreTimeoutError", {"keys": ("l",)})
    assert "'l'" in failure.text and "'k'" not in failure.text and "2 s" in failure.text
    assert store.tick(3.0) == []


def test_each_waiter_has_a_deadline_of_its_own(store: StoreUnderTest) -> None:
    store.ask(StoreOp.WAIT, ("k",), timeout_s=5.0, peer="a")
    store.ask(StoreOp.WAIT, ("k",), timeout_s=2.0, peer="b")
    assert [who for who, _ in store.tick(2.0)] == ["b"]
    assert [who for who, _ in store.tick(5.0)] == ["a"]


def test_a_wait_that_is_asked_again_is_answered_once(store: StoreUnderTest) -> None:
    store.ask(StoreOp.WAIT, ("k",), timeout_s=5.0)
    store.ask(StoreOp.WAIT, ("k",), timeout_s=4.0, number=0)
    store.ask(StoreOp.SET, ("k",), (b"1",), peer="b")
    assert [who for who, _ in store.replies] == ["b", "a"]


def test_who_is_gone_waits_no_more(store: StoreUnderTest) -> None:
    store.ask(StoreOp.WAIT, ("k",), timeout_s=5.0)
    store.store.drop("a")
    store.ask(StoreOp.SET, ("k",), (b"1",), peer="b")
    assert [who for who, _ in store.replies] == ["b"]
    assert store.tick(9.0) == []


def test_a_wait_for_more_keys_than_an_answer_can_name_still_gets_an_answer(store: StoreUnderTest) -> None:
    keys = tuple(f"{place:05d}".ljust(1000) for place in range(6000))  # fits a frame; named twice it would not
    store.ask(StoreOp.WAIT, keys, timeout_s=1.0)
    ((_, reply),) = store.tick(1.0)
    assert _error(reply).error == "StoreTimeoutError"


# ----------------------------------------------------------------------------------------------- counting once


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize(
    ("op", "values", "amount", "held"),
    [
        (StoreOp.ADD, (), 5, b"12"),
        (StoreOp.APPEND, (b"3",), 0, b"73"),
        (StoreOp.COMPARE_SET, (b"7", b"8"), 0, b"8"),
        (StoreOp.SET, (b"9",), 0, b"9"),
    ],
)
def test_a_request_that_is_sent_again_counts_once_and_has_the_same_answer(
    store: StoreUnderTest, op: StoreOp, values: tuple[bytes, ...], amount: int, held: bytes, restart: bool
) -> None:
    store.ask(StoreOp.SET, ("k",), (b"7",), peer="b")
    first = store.ask(op, ("k",), values, amount=amount)
    store = store.rebuilt() if restart else store
    assert store.ask(op, ("k",), values, amount=amount, number=0) == first
    assert store.get("k") == (held,)


@pytest.mark.parametrize("restart", [False, True])
def test_a_request_that_is_sent_again_does_not_undo_what_others_did_since(store: StoreUnderTest, restart: bool) -> None:
    store.ask(StoreOp.SET, ("k",), (b"mine",))
    store.ask(StoreOp.SET, ("k",), (b"theirs",), peer="b")
    store = store.rebuilt() if restart else store
    store.ask(StoreOp.SET, ("k",), (b"mine",), number=0)
    assert store.get("k") == (b"theirs",)


@pytest.mark.parametrize("restart", [False, True])
def test_a_delete_that_is_sent_again_still_says_that_the_key_was_there(store: StoreUnderTest, restart: bool) -> None:
    store.ask(StoreOp.SET, ("k",), (b"1",), peer="b")
    assert store.ask(StoreOp.DELETE, ("k",)).flag is True
    store = store.rebuilt() if restart else store
    assert store.ask(StoreOp.DELETE, ("k",), number=0).flag is True


def test_several_keys_that_were_half_written_are_completed(store: StoreUnderTest) -> None:
    store.ask(StoreOp.SET, ("k", "l"), (b"1", b"2"))
    store.records.pop()  # as if only the first record had become durable
    store = store.rebuilt()
    store.ask(StoreOp.SET, ("k",), (b"3",), peer="b")
    store.ask(StoreOp.SET, ("k", "l"), (b"1", b"2"), number=0)
    assert store.get("k", "l") == (b"3", b"2")


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 3), st.booleans()), min_size=1, max_size=12))
def test_sums_are_right_however_often_requests_are_repeated_and_masters_restart(steps) -> None:
    store = StoreUnderTest()
    total, numbers = 0, {"a": 0, "b": 0}
    for peer, repeats, restart in steps:
        number = numbers[peer]
        numbers[peer] += 1
        total += 1
        for _ in range(repeats):
            assert store.ask(StoreOp.ADD, ("k",), amount=1, peer=peer, number=number).amount == total
            store = store.rebuilt() if restart else store
    assert store.get("k") == (str(total).encode(),)


# -------------------------------------------------------------------------------------------- what is forgotten


def test_answers_that_were_received_are_forgotten(store: StoreUnderTest) -> None:
    for _ in range(50):
        store.ask(StoreOp.ADD, ("k",), amount=1)
    assert len(store.durable.group("g").store["k"].stamps) == 1
    store.ask(StoreOp.NUM_KEYS)
    assert store.durable.group("g").store["k"].stamps == ()


def test_answers_to_who_is_gone_are_forgotten(store: StoreUnderTest) -> None:
    store.ask(StoreOp.ADD, ("k",), amount=1)
    store.store.drop("a")
    assert store.durable.group("g").store["k"].stamps == ()


def test_requests_that_are_not_yet_acknowledged_are_kept(store: StoreUnderTest) -> None:
    store.ask(StoreOp.ADD, ("k",), amount=1, acknowledged=0)
    store.ask(StoreOp.ADD, ("k",), amount=1, acknowledged=0)
    assert store.ask(StoreOp.ADD, ("k",), amount=1, number=0, acknowledged=0).amount == 1


@pytest.mark.parametrize("restart", [False, True])
def test_a_deleted_key_is_forgotten_once_its_deleter_knows(store: StoreUnderTest, restart: bool) -> None:
    store.ask(StoreOp.SET, ("k",), (b"1",))
    store.ask(StoreOp.DELETE, ("k",))
    assert "k" in store.durable.group("g").store
    store = store.rebuilt() if restart else store
    store.ask(StoreOp.NUM_KEYS, number=2)
    assert store.durable.group("g").store == {}
    assert store.records[-1] == StoreWritten("g", "k", None)
    assert store.rebuilt().durable.group("g").store == {}


def test_a_deleted_key_is_forgotten_even_if_its_writer_died_before_a_restart(store: StoreUnderTest) -> None:
    store.ask(StoreOp.SET, ("k",), (b"1",), peer="b")
    store.store.drop("b")
    store = store.rebuilt()
    store.ask(StoreOp.DELETE, ("k",), number=0)
    store.ask(StoreOp.NUM_KEYS, number=1)
    assert store.durable.group("g").store == {}


def test_a_thousand_short_lived_keys_leave_nothing_behind(store: StoreUnderTest) -> None:
    for place in range(1000):
        store.ask(StoreOp.SET, (f"k{place}",), (b"1",), peer="ab"[place % 2])
        store.ask(StoreOp.DELETE, (f"k{place}",), peer="ba"[place % 2])
    for peer in "ab":
        store.ask(StoreOp.NUM_KEYS, peer=peer)
    assert store.durable.group("g").store == {}
    assert store.store._stamped == {} and store.store.pending == {}
