"""What every `torch.distributed.Store` does: torch's own stores are asked first, ours has to answer the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from master_actor import serve
from master_actor.thread import MasterThread
from ray_pccl.settings import Settings
from ray_pccl.torch import PCCLStore

SHORT = timedelta(milliseconds=100)
PATIENT = timedelta(seconds=10)
CALM = {"heartbeat_timeout_s": 10, "stall_timeout_s": 30, "sentinel": False, "last_call_s": 0.0}

Make = Callable[[], dist.Store]


@pytest.fixture(scope="module")
def master() -> Iterator[MasterThread]:
    thread = serve(settings=Settings(**CALM))
    thread.start()
    yield thread
    thread.stop("the tests are over")


@pytest.fixture(params=["HashStore", "TCPStore", "PCCLStore", "PrefixStore of PCCLStore"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes handles on one store, which is empty at first."""
    kind = request.param
    ours: list[PCCLStore] = []
    theirs: list[dist.Store] = []

    def make_one() -> dist.Store:
        if kind == "HashStore":
            store: dist.Store = theirs[0] if theirs else dist.HashStore()
        elif kind == "TCPStore":
            port = theirs[0].port if theirs else 0
            store = dist.TCPStore("127.0.0.1", port, is_master=not theirs, wait_for_workers=False)
        else:
            endpoint = request.getfixturevalue("master").server.endpoint
            store = PCCLStore.connect(endpoint, request.node.name, settings=Settings(**CALM))
            ours.append(store)
        theirs.append(store)
        store.set_timeout(PATIENT)
        return dist.PrefixStore("prefix", store) if kind.startswith("PrefixStore") else store

    yield make_one
    for store in ours:
        store.close()


@pytest.fixture
def store(make: Make) -> dist.Store:
    return make()


def test_text_and_bytes_come_back_as_bytes(store: dist.Store) -> None:
    store.set("text", "grün")
    store.set("bytes", b"\x00\xff")
    assert store.get("text") == "grün".encode() and store.get("bytes") == b"\x00\xff"
    store.set("text", "other")
    assert store.get("text") == b"other"


@pytest.mark.parametrize("value", [7, None, ["x"]])
def test_other_values_are_type_errors(store: dist.Store, value: object) -> None:
    with pytest.raises(TypeError):
        store.set("k", value)


def test_a_string_is_no_list_of_keys(store: dist.Store) -> None:
    for call in (store.check, store.wait, store.multi_get):
        with pytest.raises(TypeError):
            call("abc")


def test_an_empty_value_is_a_value(store: dist.Store) -> None:
    store.set("k", "")
    assert store.check(["k"]) and store.get("k") == b""


def test_add_counts_from_nothing_and_down_and_leaves_a_decimal_number(store: dist.Store) -> None:
    assert store.add("n", 5) == 5
    assert store.add("n", -7) == -2
    assert store.get("n") == b"-2"
    store.set("n", "40")
    assert store.add("n", 2) == 42


def test_sums_of_several_threads_lose_nothing(make: Make) -> None:
    stores = [make() for _ in range(3)]
    threads = [threading.Thread(target=lambda s=s: [s.add("n", 1) for _ in range(20)]) for s in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stores[0].add("n", 0) == 60


@pytest.mark.parametrize(
    ("held", "expected", "desired", "answer", "holds"),
    [
        (None, "", "new", b"new", b"new"),
        (None, "old", "new", b"old", None),
        ("old", "old", "new", b"new", b"new"),
        ("old", "other", "new", b"old", b"old"),
        ("old", "", "new", b"old", b"old"),
        ("", "", "new", b"new", b"new"),
        (None, "", "", b"", b""),
        ("old", b"old", b"\xff\x00", b"\xff\x00", b"\xff\x00"),
    ],
)
def test_compare_set_sets_only_what_it_expects(store: dist.Store, held, expected, desired, answer, holds) -> None:
    if held is not None:
        store.set("k", held)
    assert store.compare_set("k", expected, desired) == answer
    assert store.check(["k"]) is (holds is not None)
    if holds is not None:
        assert store.get("k") == holds


def test_of_several_who_create_a_key_by_compare_set_one_wins(make: Make) -> None:
    answers = [make().compare_set("k", "", f"{place}") for place in range(3)]
    assert answers == [b"0", b"0", b"0"]


def test_check_wants_all_keys(store: dist.Store) -> None:
    store.set("a", "1")
    assert store.check(["a"]) is True and store.check(["a", "b"]) is False and store.check([]) is True


def test_deleting_tells_whether_the_key_was_there(store: dist.Store) -> None:
    store.set("a", "1")
    assert store.delete_key("a") is True and store.delete_key("a") is False and store.check(["a"]) is False


def test_keys_are_counted(store: dist.Store) -> None:
    before = store.num_keys()
    store.multi_set(["a", "b"], ["1", "2"])
    store.add("c", 1)
    store.delete_key("a")
    assert store.num_keys() == before + 2


def test_append_adds_to_the_end(store: dist.Store) -> None:
    store.append("k", "ab")
    store.append("k", b"c")
    assert store.get("k") == b"abc"


def test_several_keys_at_once(store: dist.Store) -> None:
    assert store.has_extended_api() is True
    store.multi_set(["a", "b"], ["1", b"\xff"])
    assert store.multi_get(["b", "a"]) == [b"\xff", b"1"]
    assert store.multi_get([]) == []


def test_large_values_together_are_more_than_one_message(store: dist.Store) -> None:
    values = [bytes([place]) * (3 << 20) for place in range(3)]
    store.multi_set(["a", "b", "c"], values)
    assert store.multi_get(["a", "b", "c"]) == values


def test_what_is_not_there_in_time_is_a_dist_store_error_that_says_timeout(store: dist.Store) -> None:
    store.set("there", "1")
    store.set_timeout(SHORT)
    calls = [
        lambda: store.get("k"),
        lambda: store.wait(["there", "k"]),
        lambda: store.multi_get(["there", "k"]),
        lambda: store.wait(["k"], SHORT),
    ]
    for call in calls:
        started = time.monotonic()
        with pytest.raises(dist.DistStoreError, match=r"(?i)timeout"):
            call()
        assert 0.05 < time.monotonic() - started < 5


def test_a_wait_has_a_timeout_of_its_own(store: dist.Store) -> None:
    started = time.monotonic()
    with pytest.raises(dist.DistStoreError):
        store.wait(["k"], SHORT)
    assert time.monotonic() - started < 5 < PATIENT.total_seconds()


@pytest.mark.parametrize("write", ["set", "add", "append", "compare_set", "multi_set"])
def test_every_kind_of_write_ends_a_wait(make: Make, write: str) -> None:
    waiter, writer = make(), make()
    if isinstance(waiter, dist.HashStore) and write == "add":
        pytest.skip("torch's HashStore wakes nobody on add: its waiters see the sum when their time is up")
    arguments = {"set": ("k", "1"), "add": ("k", 1), "append": ("k", "1"), "compare_set": ("k", "", "1")}
    timer = threading.Timer(0.1, lambda: getattr(writer, write)(*arguments.get(write, (["k"], ["1"]))))
    timer.start()
    assert waiter.get("k") == b"1"
    timer.join()


def test_nothing_to_wait_for_is_there_at_once(store: dist.Store) -> None:
    store.wait([])
    store.wait([], SHORT)


def test_the_timeout_can_be_read_and_set(store: dist.Store) -> None:
    assert store.timeout == PATIENT
    store.set_timeout(timedelta(seconds=7))
    assert store.timeout == timedelta(seconds=7)
    with pytest.raises(TypeError):
        store.set_timeout(7)


def test_a_clone_is_the_same_store(store: dist.Store) -> None:
    clone = store.clone()
    clone.set("k", "1")
    assert store.get("k") == b"1" and clone.timeout == store.timeout


def test_a_barrier_lets_all_through_together(make: Make) -> None:
    stores = [make() for _ in range(3)]
    passed: list[int] = []
    threads = [
        threading.Thread(target=lambda s=s, p=p: (s.barrier("b", 3, PATIENT), passed.append(p)))
        for p, s in enumerate(stores[:2])
    ]
    for thread in threads:
        thread.start()
    assert stores[2].add("b/num_members", 0) <= 2 and passed == []
    stores[2].barrier("b", 3, PATIENT)
    for thread in threads:
        thread.join()
    assert sorted(passed) == [0, 1]
