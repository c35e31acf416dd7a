"""What a user does with a `Communicator`, and what it promises, end to end but for Ray."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from master_actor import serve
from master_actor.thread import MasterThread
from ray_pccl import (
    Attribute,
    AuthenticationError,
    Communicator,
    Endpoint,
    GroupMismatchError,
    MasterStoppedError,
    MasterUnreachableError,
    MembershipChange,
    MembershipEvent,
    NotConnectedError,
    OperationTimeoutError,
    PCCLError,
    PeerEvictedError,
    RankTakenError,
    RendezvousClosedError,
    RendezvousTimeoutError,
    SettingsError,
    StoreError,
    StoreTimeoutError,
    TooFewPeersError,
    UsageError,
)
from ray_pccl.control.handshake import ANSWER_BYTES, CHALLENGE_BYTES
from ray_pccl.settings import Settings
from tests.peer.conftest import CALM, Make, together, until

Group = Callable[..., list[Communicator]]


@contextlib.contextmanager
def _meanwhile(call: Callable[[], object]) -> Iterator[Callable[[], object]]:
    """Runs a call in the background; what is given waits for its result."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(call)
        yield lambda: future.result(15)


def _waiting(member: Communicator, count: int) -> None:
    until(lambda: member.num_waiting() == count, f"{count} wait")


# ------------------------------------------------------------------------------------------------- connect and close


def test_all_members_agree_on_who_is_where(group: Group) -> None:
    peers = group(3)
    assert [peer.rank for peer in peers] == [0, 1, 2]
    assert {peer.world_size for peer in peers} == {3} and {peer.epoch for peer in peers} == {1}
    assert {peer.members for peer in peers} == {tuple(peer.peer_id for peer in peers)}
    assert {peer.peer_group for peer in peers} == {"g"}


def test_a_peer_alone_is_a_group_by_default(make: Make) -> None:
    peer = make()
    peer.connect()
    assert (peer.rank, peer.world_size) == (0, 1)


def test_a_communicator_is_a_context(make: Make) -> None:
    with make() as peer:
        assert peer.world_size == 1
    with pytest.raises(NotConnectedError):
        _ = peer.rank


def test_requested_ranks_are_honoured(make: Make) -> None:
    peers = [make(min_world_size=3, rank=rank) for rank in (2, 0, 1)]
    together(*(peer.connect for peer in peers))
    assert [peer.rank for peer in peers] == [2, 0, 1]


def test_an_endpoint_may_be_given_as_text(endpoint: Endpoint, make: Make) -> None:
    peer = make(master=str(endpoint))
    peer.connect()
    assert peer.world_size == 1


def test_connecting_twice_is_an_error_and_changes_nothing(make: Make) -> None:
    peer = make()
    peer.connect()
    with pytest.raises(UsageError, match="already connected"):
        peer.connect()
    assert peer.epoch == 1


def test_every_call_before_connect_and_after_close_says_so(make: Make) -> None:
    peer = make()

    def calls() -> None:
        for call in (
            lambda: peer.rank,
            lambda: peer.epoch,
            lambda: peer.members,
            lambda: peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE),
            lambda: peer.store.set("k", b"v"),
            peer.update_topology,
            peer.are_peers_pending,
            peer.await_minimum,
            peer.num_waiting,
            peer.set_closed,
            peer.is_closed,
        ):
            with pytest.raises(NotConnectedError):
                call()

    calls()
    peer.close()
    calls()
    peer.connect()
    peer.close()
    peer.close()
    calls()


def test_a_peer_that_closes_is_gone_and_the_others_go_on(group: Group) -> None:
    first, second, third = group(3)
    second.close()
    until(lambda: first.epoch == third.epoch == 2, "the new epoch")
    assert first.members == third.members == (first.peer_id, third.peer_id)
    assert (first.rank, third.rank) == (0, 1)


def test_a_peer_that_connects_again_after_close_is_a_new_peer(make: Make) -> None:
    peer = make()
    peer.connect()
    before = peer.peer_id
    peer.close()
    peer.connect()
    assert peer.peer_id != before  # unique for ever
    assert peer.epoch == 2


@pytest.mark.parametrize("timeout", [0, -1.0])
def test_a_timeout_of_nothing_is_refused(make: Make, timeout: float) -> None:
    with pytest.raises(SettingsError):
        make().connect(timeout=timeout)


@pytest.mark.parametrize("name", ["", True, None, 1.5, b"g"])
def test_a_group_needs_a_name_or_a_number(endpoint: Endpoint, name: object) -> None:
    with pytest.raises(SettingsError, match="peer_group"):
        Communicator(name, master=endpoint)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"min_world_size": 0}, "min_world_size"),
        ({"min_world_size": 1.5}, "min_world_size"),
        ({"min_world_size": 3, "max_world_size": 2}, "max_world_size"),
        ({"rank": -1}, "rank"),
        ({"rank": 2, "max_world_size": 2}, "rank"),
    ],
)
def test_impossible_sizes_and_ranks_are_refused(make: Make, given: dict, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        make(**given)


def test_a_number_and_its_text_name_the_same_group(make: Make) -> None:
    number, text = make(7, min_world_size=2), make("7", min_world_size=2)
    together(number.connect, text.connect)
    assert number.members == text.members and number.peer_group == "7"


@pytest.mark.parametrize("sentinel", [False, True])
def test_no_thread_and_no_file_is_left_after_close(endpoint: Endpoint, make: Make, sentinel: bool) -> None:
    threads = set(threading.enumerate())
    files = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        peer = make(sentinel=sentinel)
        peer.on_membership(lambda event: None)
        peer.connect()
        peer.store.set("k", b"v")
        peer.close()
    until(lambda: set(threading.enumerate()) <= threads, "no thread is left")
    until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= files, "no file is left open")


def test_nothing_is_left_of_a_connect_that_failed(endpoint: Endpoint, make: Make) -> None:
    threads = set(threading.enumerate())
    files = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(RendezvousTimeoutError):
            make(min_world_size=2).connect(timeout=0.05)
    until(lambda: set(threading.enumerate()) <= threads, "no thread is left")
    until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= files, "no file is left open")


def test_closing_ends_a_call_that_waits_in_another_thread(make: Make) -> None:
    peer = make()
    peer.connect()
    with _meanwhile(lambda: peer.store.wait(["never"])) as result:
        until(lambda: bool(peer._connection and peer._connection.membership._requests), "the call waits")
        peer.close()
        with pytest.raises(NotConnectedError):
            result()


def test_closing_ends_a_connect_that_waits_in_another_thread(make: Make) -> None:
    peer = make(min_world_size=2)
    with _meanwhile(peer.connect) as result:
        until(lambda: peer._connection is not None and peer._connection.membership.boot > 0, "it waits for another")
        peer.close()
        with pytest.raises(NotConnectedError):
            result()


def test_a_forked_child_can_not_use_its_parents_communicator(make: Make) -> None:
    peer = make()
    peer.connect()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            peer.store.set("k", b"of the child")
        except UsageError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    peer.store.set("k", b"of the parent")
    assert peer.store.get("k") == b"of the parent"


# -------------------------------------------------------------------------------------------------- who may come in


def test_a_group_that_does_not_form_in_time_fails_every_waiter_and_can_be_formed_afresh(make: Make) -> None:
    peers = [make(min_world_size=3, join_timeout_s=0.2) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(peer.connect) for peer in peers]:
            with pytest.raises(RendezvousTimeoutError, match="'g'"):
                future.result(15)
    together(*(peer.connect for peer in [*peers, make(min_world_size=3)]))
    assert peers[0].world_size == 3


def test_a_timeout_of_connect_counts_more_than_the_setting(make: Make) -> None:
    started = time.monotonic()
    with pytest.raises(RendezvousTimeoutError):
        make(min_world_size=2).connect(timeout=0.1)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("other", [{"min_world_size": 1}, {"min_world_size": 2, "max_world_size": 4}])
def test_another_minimum_or_maximum_is_an_error(group: Group, make: Make, other: dict[str, int]) -> None:
    group(2)
    with pytest.raises(GroupMismatchError):
        make(**other).connect()


def test_a_rank_that_another_asked_for_is_an_error(make: Make) -> None:
    first = make(min_world_size=2, rank=0)
    with _meanwhile(first.connect) as result:
        until(lambda: first._connection is not None and first._connection.membership.boot > 0, "it waits for another")
        second = make(min_world_size=2, rank=0, join_timeout_s=5)
        with pytest.raises(RankTakenError) as caught:
            second.connect()
        assert (caught.value.rank, caught.value.holder) == (0, first.peer_id)
        make(min_world_size=2).connect()
        result()


def test_a_closed_group_lets_nobody_in_and_its_members_go_on(group: Group, make: Make) -> None:
    first, second = group(2)
    late = make(min_world_size=2)
    with _meanwhile(late.connect) as result:
        _waiting(first, 1)
        assert first.is_closed() is False
        first.set_closed()
        with pytest.raises(RendezvousClosedError):
            result()
    assert first.is_closed() is second.is_closed() is True
    with pytest.raises(RendezvousClosedError):
        make(min_world_size=2).connect()
    assert together(first.are_peers_pending, second.are_peers_pending) == [False, False]


def test_over_the_maximum_the_rest_waits_until_there_is_room(group: Group, make: Make) -> None:
    first, second = group(2, max_world_size=2)
    for peer in (first, second):
        peer.update_topology()  # the first call since admission
    third = make(min_world_size=2, max_world_size=2)
    with _meanwhile(third.connect) as admitted:
        _waiting(first, 1)
        together(first.update_topology, second.update_topology)
        assert first.world_size == 2 and first.num_waiting() == 1
        second.close()
        until(lambda: first.world_size == 1, "the death is known")
        first.update_topology()
        admitted()
    assert first.members == third.members == (first.peer_id, third.peer_id)


# ------------------------------------------------------------------------------------------------------------ votes


def test_the_first_update_since_admission_returns_at_once_and_later_ones_vote(group: Group, make: Make) -> None:
    first, second = group(2)
    first.update_topology()  # nobody else is in it
    second.update_topology()
    with pytest.raises(OperationTimeoutError):
        first.update_topology(timeout=0.05)
    late = make(min_world_size=2)
    with _meanwhile(late.connect) as admitted:
        _waiting(first, 1)
        together(first.update_topology, second.update_topology)
        admitted()
    assert first.epoch == second.epoch == late.epoch == 2
    assert [peer.rank for peer in (first, second, late)] == [0, 1, 2]
    late.update_topology()  # at once: the others have just left the call that admitted it
    with pytest.raises(OperationTimeoutError):
        first.update_topology(timeout=0.05)


def test_a_peer_that_has_worked_since_its_admission_votes_like_the_others(group: Group) -> None:
    first, second = group(2)
    for peer in (first, second):
        peer._operations().entered += 1
    with pytest.raises(OperationTimeoutError):
        first.update_topology(timeout=0.05)


def test_all_members_get_the_same_answer_to_whether_peers_are_pending(group: Group, make: Make) -> None:
    first, second = group(2)
    assert together(first.are_peers_pending, second.are_peers_pending) == [False, False]
    late = make(min_world_size=2)
    with _meanwhile(late.connect) as result:
        _waiting(first, 1)
        assert together(first.are_peers_pending, second.are_peers_pending) == [True, True]
        late.close()
        with pytest.raises(NotConnectedError):
            result()
    _waiting(first, 0)
    assert together(first.are_peers_pending, second.are_peers_pending) == [False, False]


def test_members_in_different_calls_are_told_who_is_in_which(group: Group) -> None:
    first, second = group(2, op_timeout_s=0.3)
    for peer in (first, second):
        peer.update_topology()
    with ThreadPoolExecutor(2) as pool:
        update, pending = pool.submit(first.update_topology), pool.submit(second.are_peers_pending, 5.0)
        with pytest.raises(OperationTimeoutError) as caught:
            update.result(15)
        assert caught.value.calls == {first.peer_id: "update_topology", second.peer_id: "are_peers_pending"}
        first.are_peers_pending()
        assert pending.result(15) is False


def test_a_group_below_its_minimum_waits_for_newcomers(group: Group, make: Make) -> None:
    first, second = group(2)
    first.await_minimum()  # it is there
    second.close()
    until(lambda: first.world_size == 1, "the death is known")
    with pytest.raises(TooFewPeersError, match="needs 2"):
        first.await_minimum(timeout=0.1)
    with _meanwhile(first.await_minimum) as enough:
        late = make(min_world_size=2)
        late.connect()
        enough()
    assert first.members == late.members


# ------------------------------------------------------------------------------------------------------------ store


def test_the_store_does_what_it_says(group: Group) -> None:
    first, second = group(2)
    first.store.set("text", "grüße")
    assert second.store.get("text") == "grüße".encode()
    first.store.multi_set({"a": b"1", "b": b"2"})
    assert second.store.multi_get(["b", "a"]) == [b"2", b"1"]
    assert first.store.add("n", 5) == 5 and second.store.add("n", -7) == -2
    assert first.store.compare_set("c", "", "new") == b"new" == second.store.compare_set("c", "other", "x")
    first.store.append("a", "0")
    assert second.store.get("a") == b"10"
    assert second.store.check(["a", "b"]) is True and second.store.check(["a", "z"]) is False
    assert first.store.num_keys() == 5
    assert second.store.delete("a") is True and first.store.delete("a") is False
    assert first.store.num_keys() == 4


def test_a_wait_returns_when_the_key_comes(group: Group) -> None:
    first, second = group(2)
    with _meanwhile(lambda: (first.store.wait(["k", "l"], timeout=10), time.monotonic())[1]) as ended:
        second.store.set("k", b"1")
        second.store.set("l", b"2")
        started = time.monotonic()
        assert ended() - started < 1.0
    assert first.store.get("k", timeout=0) == b"1"


@pytest.mark.parametrize("call", ["wait", "get"])
def test_a_wait_for_a_key_that_never_comes_ends_in_time_and_names_it(make: Make, call: str) -> None:
    peer = make()
    peer.connect()
    started = time.monotonic()
    with pytest.raises(StoreTimeoutError, match="'never'") as caught:
        peer.store.wait(["never"], timeout=0.1) if call == "wait" else peer.store.get("never", timeout=0.1)
    assert list(caught.value.keys) == ["never"]
    assert 0.1 <= time.monotonic() - started < 3


def test_the_default_patience_of_the_store_is_a_setting(make: Make) -> None:
    peer = make(store_timeout_s=0.05)
    peer.connect()
    with pytest.raises(StoreTimeoutError):
        peer.store.get("never")


def test_many_threads_may_use_one_communicator(make: Make) -> None:
    peer = make()
    peer.connect()
    together(*([lambda: [peer.store.add("n", 1) for _ in range(25)]] * 8))
    assert peer.store.get("n") == b"200"


def test_the_store_says_what_is_wrong_with_a_request(make: Make) -> None:
    peer = make()
    peer.connect()
    peer.store.set("k", "no number")
    with pytest.raises(StoreError, match="no number"):
        peer.store.add("k", 1)
    with pytest.raises(StoreError, match="limit"):
        peer.store.set("k", bytes(5 << 20))
    with pytest.raises(SettingsError, match="list"):
        peer.store.wait("k")
    with pytest.raises(SettingsError):
        peer.store.wait(["k"], timeout=-1)


UNSENDABLE = {
    "a value over a frame": lambda store: store.set("k", bytes(9 << 20)),
    "values over a frame together": lambda store: store.multi_set({f"k{n}": bytes(3 << 20) for n in range(3)}),
    "a key that is no text": lambda store: store.set(5, b"v"),
    "a key that is no Unicode": lambda store: store.set("\ud800", b"v"),
    "an amount that is no integer": lambda store: store.add("n", 1.5),
    "an amount over 64 bits": lambda store: store.add("n", 1 << 70),
    "a timeout that is no number": lambda store: store.wait(["k"], timeout="soon"),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("call", UNSENDABLE.values(), ids=UNSENDABLE.keys())
def test_a_request_that_can_not_be_sent_raises_at_once_and_harms_nothing(
    make: Make, call: Callable[[object], object]
) -> None:
    peer = make(master_timeout_s=1)
    peer.connect()
    started = time.monotonic()
    with pytest.raises((PCCLError, TypeError, ValueError, OverflowError)) as caught:
        call(peer.store)
    assert time.monotonic() - started < 0.9
    assert not isinstance(caught.value, PeerEvictedError | MasterUnreachableError)
    peer.store.set("k", b"v")
    assert peer.store.get("k") == b"v"
    assert peer.epoch == 1


def test_only_members_use_the_store_and_each_group_has_its_own(group: Group, make: Make) -> None:
    first, _ = group(2)
    first.store.set("k", b"of g")
    other = make("h")
    other.connect()
    assert other.store.check(["k"]) is False
    late = make(min_world_size=2)
    with _meanwhile(late.connect) as result:
        _waiting(first, 1)
        with pytest.raises(NotConnectedError):
            late.store.get("k", timeout=0)
        late.close()
        with pytest.raises(NotConnectedError):
            result()


# ----------------------------------------------------------------------------------------------------------- events


class Heard:
    """Collects the events of a communicator."""

    def __init__(self, peer: Communicator) -> None:
        self.events: list[MembershipEvent] = []
        peer.on_membership(self.events.append)

    def wait_for(self, change: MembershipChange) -> MembershipEvent:
        until(lambda: any(event.change is change for event in self.events), f"{change} in {self.events}")
        return next(event for event in self.events if event.change is change)


def test_callbacks_hear_of_joins_deaths_with_their_reason_and_epochs(
    group: Group, make: Make, master: MasterThread
) -> None:
    first, second = group(2)
    heard = Heard(first)
    late = make(min_world_size=2)
    with _meanwhile(late.connect) as result:
        assert heard.wait_for(MembershipChange.WAITING).peer_id == late.peer_id
        late.close()
        with pytest.raises(NotConnectedError):
            result()
    assert heard.wait_for(MembershipChange.WITHDRAWN).peer_id == late.peer_id
    master.evict(second.peer_id, "too slow")
    lost = heard.wait_for(MembershipChange.LOST)
    assert (lost.peer_id, lost.reason, lost.group) == (second.peer_id, "too slow", "g")
    epoch = heard.wait_for(MembershipChange.EPOCH)
    assert (epoch.epoch, epoch.members) == (2, (first.peer_id,))
    first.set_closed()
    heard.wait_for(MembershipChange.CLOSED)


def test_callbacks_tell_a_goodbye_from_a_death(group: Group) -> None:
    first, second = group(2)
    heard = Heard(first)
    second.close()
    assert heard.wait_for(MembershipChange.LEFT).peer_id == second.peer_id
    assert all(event.change is not MembershipChange.LOST for event in heard.events)


def test_a_callback_may_raise_and_may_use_the_communicator(group: Group) -> None:
    first, second = group(2)
    epochs: list[int] = []

    def callback(event: MembershipEvent) -> None:
        if event.change is MembershipChange.EPOCH:
            first.store.set("seen", b"1")
            epochs.append(first.epoch)
        raise RuntimeError("a bug of the user's")

    first.on_membership(callback)
    second.close()
    until(lambda: epochs == [2], "the callback was called in spite of what it raised before")
    assert first.store.get("seen") == b"1"


def test_attributes_are_a_snapshot_of_the_epoch(group: Group) -> None:
    group(3, "other")
    first, second = group(2)
    for peer in (first, second):
        assert peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE) == 5
        assert peer.get_attribute(Attribute.PEER_GROUP_WORLD_SIZE) == 2
        assert peer.get_attribute(Attribute.LOCAL_WORLD_SIZE) == 2
        assert peer.get_attribute(Attribute.NUM_DISTINCT_PEER_GROUPS) == 2
        assert peer.get_attribute(Attribute.LARGEST_PEER_GROUP_WORLD_SIZE) == 3


# ---------------------------------------------------------------------------------------------- evictions and groups


def test_a_death_in_one_group_is_not_noticed_in_another(group: Group, master: MasterThread) -> None:
    first, second = group(2)
    one, two = group(2, "other")
    heard = Heard(one)
    with _meanwhile(lambda: one.store.get("k", timeout=10)) as result:
        master.evict(second.peer_id, "too slow")
        until(lambda: first.epoch == 2, "the new epoch")
        two.store.set("k", b"v")
        assert result() == b"v"
    assert together(one.are_peers_pending, two.are_peers_pending) == [False, False]
    assert (one.epoch, two.epoch) == (1, 1) and heard.events == []


def test_an_evicted_peer_is_told_why_by_every_call_and_joins_again_as_a_new_one(
    group: Group, master: MasterThread
) -> None:
    first, second = group(2)
    before = second.peer_id
    heard = Heard(second)
    with _meanwhile(lambda: second.store.wait(["never"])) as result:
        until(lambda: bool(second._connection.membership._requests), "the call waits")
        master.evict(second.peer_id, "too slow")
        with pytest.raises(PeerEvictedError, match="too slow") as caught:
            result()
    assert caught.value.reason == "too slow"
    assert heard.wait_for(MembershipChange.EVICTED).reason == "too slow"
    for call in (
        lambda: second.rank,
        lambda: second.epoch,
        second.are_peers_pending,
        second.num_waiting,
        lambda: second.store.set("k", b""),
    ):
        with pytest.raises(PeerEvictedError, match="too slow"):
            call()
    until(lambda: first.epoch == 2, "the others go on")
    first.update_topology()  # the first call since admission
    with _meanwhile(second.connect) as admitted:
        _waiting(first, 1)
        first.update_topology()
        admitted()
    assert second.peer_id != before
    assert first.members == second.members == (first.peer_id, second.peer_id)
    assert (second.rank, second.epoch) == (1, 3)


def test_a_peer_whose_connection_is_cut_finds_itself_evicted(group: Group) -> None:
    first, second = group(2)
    second._connection.cut()
    until(lambda: first.world_size == 1, "the others go on")
    with pytest.raises(PeerEvictedError):
        second.store.set("k", b"v")


# ----------------------------------------------------------------------------------------------------------- masters


class Restartable:
    """A master on a journal, which can be crashed and started again on the same port."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.thread: MasterThread
        self.endpoint = self.start()

    def start(self) -> Endpoint:
        self.thread = serve(journal=str(self._path), settings=Settings(**CALM))
        return self.thread.start()


@pytest.fixture
def restartable(tmp_path: Path) -> Iterator[Restartable]:
    master = Restartable(tmp_path / "journal")
    yield master
    master.thread.stop("the test is over")


def test_a_restarted_master_keeps_the_epoch_and_the_store(restartable: Restartable, group: Group) -> None:
    peers = group(2, master=restartable.endpoint)
    heard = Heard(peers[0])
    peers[0].store.set("k", b"v")
    restartable.thread.crash()
    heard.wait_for(MembershipChange.MASTER_LOST)
    assert restartable.start() == restartable.endpoint
    heard.wait_for(MembershipChange.MASTER_BACK)
    assert [peer.store.get("k") for peer in peers] == [b"v", b"v"]
    assert together(*(peer.are_peers_pending for peer in peers)) == [False, False]
    assert [peer.epoch for peer in peers] == [1, 1]
    assert [event.change for event in heard.events] == [MembershipChange.MASTER_LOST, MembershipChange.MASTER_BACK]


def test_calls_that_wait_while_the_master_restarts_are_answered_by_the_next_one(
    restartable: Restartable, group: Group
) -> None:
    first, second = group(2, master=restartable.endpoint)
    with _meanwhile(lambda: first.store.get("k", timeout=15)) as got, _meanwhile(first.are_peers_pending) as pending:
        until(lambda: len(first._connection.membership._votes) == 1, "the vote is cast")
        restartable.thread.crash()
        with _meanwhile(lambda: second.store.add("k", 1)) as added:  # asked while there is no master
            restartable.start()
            assert added() == 1
        assert got() == b"1"
        assert second.are_peers_pending() is False
        assert pending() is False
    assert first.store.get("k") == b"1"


def test_a_peer_can_join_after_the_master_restarted(restartable: Restartable, group: Group, make: Make) -> None:
    first, second = group(2, master=restartable.endpoint)
    for peer in (first, second):
        peer.update_topology()  # the first call since admission
    restartable.thread.crash()
    restartable.start()
    late = make(master=restartable.endpoint, min_world_size=2)
    with _meanwhile(late.connect) as admitted:
        _waiting(first, 1)
        together(first.update_topology, second.update_topology)
        admitted()
    assert late.epoch == first.epoch == second.epoch == 2


def test_a_peer_that_left_before_the_restart_and_comes_again_writes_what_it_says(
    restartable: Restartable, group: Group
) -> None:
    # Requests are numbered from 0 by each membership: the old one's stamps must not swallow the new one's.
    first, second = group(2, master=restartable.endpoint)
    second.store.set("k", b"old")
    second.close()
    until(lambda: first.world_size == 1, "it left")
    first.update_topology()
    restartable.thread.crash()
    restartable.start()
    with _meanwhile(second.connect) as admitted:
        _waiting(first, 1)
        first.update_topology()
        admitted()
    second.store.set("k", b"new")
    assert first.store.get("k") == b"new"


def test_peers_of_a_master_that_is_stopped_are_told(group: Group, master: MasterThread) -> None:
    first, second = group(2)
    with _meanwhile(first.are_peers_pending) as result:
        until(lambda: bool(first._connection.membership._votes), "the vote is cast")
        master.stop("for the night")
        with pytest.raises(MasterStoppedError, match="for the night"):
            result()
    with pytest.raises(MasterStoppedError):
        second.store.set("k", b"v")
    assert first.world_size == 2  # what was known is still there


def test_a_wrong_key_is_an_authentication_error(endpoint: Endpoint, make: Make) -> None:
    peer = make(master=Endpoint(endpoint.host, endpoint.port, b"another key"))
    started = time.monotonic()
    with pytest.raises(AuthenticationError):
        peer.connect(timeout=10)
    assert time.monotonic() - started < 5


def test_no_master_is_an_error_within_the_timeout(make: Make) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        endpoint = Endpoint("127.0.0.1", nobody.getsockname()[1], b"key")
        started = time.monotonic()
        with pytest.raises(MasterUnreachableError, match="check the endpoint"):
            make(master=endpoint).connect(timeout=0.3)
        assert 0.3 <= time.monotonic() - started < 2


def test_a_server_that_says_nothing_is_an_error_within_the_timeout(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = Endpoint("127.0.0.1", silent.getsockname()[1], b"key")
        started = time.monotonic()
        with pytest.raises(MasterUnreachableError):
            make(master=endpoint).connect(timeout=0.3)
        assert time.monotonic() - started < 2.5


def test_a_master_that_comes_late_is_found(make: Make) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    peer = make(master=Endpoint("127.0.0.1", port, b"key"))
    with _meanwhile(peer.connect) as result:
        until(lambda: peer._connection is not None, "it looks for the master")
        with serve(port=port, key=b"key", settings=Settings(**CALM)):
            result()
            assert peer.world_size == 1


class CutsHandshakes:
    """A relay to a master that closes its first connections when the client has answered the challenge."""

    def __init__(self, endpoint: Endpoint, cuts: int) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint("127.0.0.1", self._listening.getsockname()[1], endpoint.key)
        self._target, self._cuts = endpoint, cuts
        self._sockets = [self._listening]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                master = socket.create_connection((self._target.host, self._target.port))
                self._sockets += [client, master]
                if self._cuts:
                    self._cuts -= 1
                    client.sendall(master.recv(CHALLENGE_BYTES, socket.MSG_WAITALL))
                    client.recv(ANSWER_BYTES, socket.MSG_WAITALL)
                    client.close()
                    master.close()
                    continue
                for source, target in ((client, master), (master, client)):
                    threading.Thread(target=self._copy, args=(source, target), daemon=True).start()

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def test_a_master_that_dies_in_the_middle_of_a_handshake_is_not_taken_for_a_wrong_key(
    endpoint: Endpoint, make: Make
) -> None:
    relay = CutsHandshakes(endpoint, cuts=1)
    try:
        peer = make(master=relay.endpoint)
        peer.connect(timeout=10)
        assert peer.world_size == 1
        peer.close()
    finally:
        relay.close()
