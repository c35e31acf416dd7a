"""Calls that run behind the caller's back: their order, futures and failures; and messages between two ranks."""

from __future__ import annotations

import os
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ray_pccl.errors import OperationTimeoutError, UsageError
from ray_pccl.peer.handles import Workers
from ray_pccl.testing import eventually
from ray_pccl.torch import process_group
from tests.torch.zygote import Zygote


def many_in_flight(rank: int) -> None:
    size = dist.get_world_size()
    tensors = [torch.full((1000,), float(rank + place)) for place in range(200)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        assert work.wait() is True
    for place, tensor in enumerate(tensors):
        assert bool((tensor == sum(other + place for other in range(size))).all())
    assert all(work.is_completed() and work.is_success() and work.exception() is None for work in works)


def test_many_calls_in_flight_come_out_in_the_order_they_were_issued(zygote: Zygote) -> None:
    zygote.run(many_in_flight, 3)


def futures(rank: int) -> None:
    tensor = torch.full((4,), float(rank + 1))
    work = dist.all_reduce(tensor, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    assert doubled.wait().tolist() == [6.0] * 4
    assert work.get_future().wait()[0] is not None  # one that is made afterwards is complete
    assert work.result()[0].tolist() == [3.0] * 4
    chained = [dist.all_reduce(torch.ones(10), async_op=True).get_future() for _ in range(20)]
    assert [each.wait()[0].tolist() for each in chained] == [[2.0] * 10] * 20
    for call in (
        lambda: dist.broadcast(tensor, 0, async_op=True),
        lambda: dist.all_gather([torch.zeros(4), torch.zeros(4)], tensor, async_op=True),
        lambda: dist.barrier(async_op=True),
    ):
        call().get_future().wait()


def test_futures_hold_the_result_and_run_their_callbacks(zygote: Zygote) -> None:
    zygote.run(futures, 2)


def nested(rank: int) -> None:
    def again(future: torch.futures.Future) -> torch.Tensor:
        return dist.all_reduce(future.value()[0], async_op=True).get_future().then(more).wait()

    def more(future: torch.futures.Future) -> torch.Tensor:
        return dist.all_reduce(future.value()[0], async_op=True).get_future().wait()[0]

    chains = []
    for _ in range(3):  # one after another: callbacks of two chains issue in an order of their own
        chains.append(dist.all_reduce(torch.ones(5), async_op=True).get_future().then(again).wait())
    assert [chain.tolist() for chain in chains] == [[8.0] * 5] * 3
    receive = torch.zeros(1)
    if rank == 0:
        first = dist.irecv(torch.zeros(1), 1).get_future()
        first.then(lambda future: dist.irecv(receive, 1).get_future().wait()).wait()
        assert receive.item() == 2.0
    else:
        dist.send(torch.tensor([1.0]), 0)
        dist.send(torch.tensor([2.0]), 0)


def test_a_callback_may_wait_for_another_call(zygote: Zygote) -> None:
    zygote.run(nested, 2)


def failing_future(rank: int) -> tuple[str, str]:
    work = dist.all_reduce(torch.zeros(2 + rank), async_op=True)
    with pytest.raises(RuntimeError) as from_future:
        work.get_future().then(lambda future: future.value()).wait()
    with pytest.raises(dist.DistBackendError) as from_work:
        work.wait()
    assert not work.is_success() and work.exception() is not None
    return str(from_future.value), str(from_work.value)


def test_a_call_that_fails_raises_from_its_work_and_from_its_future(zygote: Zygote) -> None:
    for texts in zygote.run(failing_future, 2):
        for text in texts:
            assert "count=2" in text and "count=3" in text


def blocking_behind_async(rank: int) -> None:
    first, second = torch.ones(100_000), torch.full((1,), float(rank))
    work = dist.all_reduce(first, async_op=True)
    dist.all_reduce(second)
    assert work.is_completed(), "a call that blocks overtook one that was issued before"
    assert second.item() == 1.0 and first[0].item() == 2.0


def test_a_blocking_call_waits_its_turn_behind_those_in_flight(zygote: Zygote) -> None:
    zygote.run(blocking_behind_async, 2)


def issue_and_look(rank: int) -> bool:
    other = dist.new_group([0, 1])
    if rank == 0:
        work = dist.all_reduce(torch.ones(10), async_op=True)
        started_before_the_other = work.is_completed()
        dist.barrier(group=other)
        work.wait()
        return started_before_the_other
    dist.barrier(group=other)  # which rank 0 gets to although its reduction can't have ended
    dist.all_reduce(torch.ones(10))
    return False


def test_a_call_in_flight_leaves_its_caller_and_other_groups_free(zygote: Zygote) -> None:
    assert zygote.run(issue_and_look, 2) == [False, False]


def give_up(rank: int) -> str:
    late = timedelta(seconds=0.3)
    group = dist.new_group([0, 1], timeout=late)
    if rank == 1:
        dist.barrier()
        return ""
    with pytest.raises(OperationTimeoutError) as caught:
        dist.all_reduce(torch.ones(1), group=group)
    assert isinstance(caught.value, dist.DistBackendError)
    dist.barrier()
    return str(caught.value)


def test_torchs_timeout_ends_a_wait_for_a_rank_that_does_not_come(zygote: Zygote) -> None:
    text, _ = zygote.run(give_up, 2)
    assert "rank1@" in text


def wait_with_a_limit(rank: int) -> None:
    if rank == 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        with pytest.raises(OperationTimeoutError):
            work.wait(timedelta(milliseconds=50))
        dist.send(torch.zeros(1), 1)
        work.wait()
    else:
        dist.recv(torch.zeros(1), 0)
        dist.all_reduce(torch.ones(1))


def test_a_wait_with_a_limit_ends_and_the_call_goes_on(zygote: Zygote) -> None:
    zygote.run(wait_with_a_limit, 2)


# ------------------------------------------------------------------------------------------------- point to point


def messages(rank: int) -> None:
    size = dist.get_world_size()
    following, previous = (rank + 1) % size, (rank - 1) % size
    sends = [dist.isend(torch.full((5,), float(10 * rank + place)), following) for place in range(20)]
    received = [torch.zeros(5) for _ in range(20)]
    receives = [dist.irecv(tensor, previous) for tensor in received]
    for work in [*receives, *sends]:
        work.wait()
    assert [tensor[0].item() for tensor in received] == [10.0 * previous + place for place in range(20)]
    tagged = torch.zeros(1), torch.zeros(1)
    receives = [dist.irecv(tagged[0], previous, tag=7), dist.irecv(tagged[1], previous, tag=9)]
    dist.isend(torch.tensor([9.0]), following, tag=9)
    receives[1].wait()
    dist.isend(torch.tensor([7.0]), following, tag=7)
    receives[0].wait()
    assert tagged[0].item() == 7.0 and tagged[1].item() == 9.0
    big = torch.full((3, 500_000), float(rank))
    room = torch.zeros(500_000, 3).T
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, big, following), dist.P2POp(dist.irecv, room, previous)]
    ):
        work.wait()
    assert bool((room == previous).all())
    dist.barrier()


def test_messages_of_one_tag_keep_their_order_and_those_of_others_overtake(zygote: Zygote) -> None:
    zygote.run(messages, 3)


def from_anyone(rank: int) -> list[int]:
    if rank:
        for number in range(3):
            dist.send(torch.tensor([rank * 100.0 + number]), 0)
        dist.barrier()
        return []
    sources = []
    for _ in range(6):
        tensor = torch.zeros(1)
        source = dist.recv(tensor)
        assert int(tensor.item()) == source * 100 + sources.count(source)  # each sender's in order
        sources.append(source)
    waiting = dist.irecv(torch.zeros(1), tag=5)
    assert not waiting.is_completed()
    dist.barrier()
    return sources


def test_a_receive_from_any_source_says_whose_message_it_took(zygote: Zygote) -> None:
    sources, _, _ = zygote.run(from_anyone, 3)
    assert sorted(sources) == [1, 1, 1, 2, 2, 2]


def misfit(rank: int) -> str:
    with pytest.raises(dist.DistBackendError) as caught:
        if rank:
            dist.recv(torch.zeros(4), 0)
        else:
            dist.send(torch.zeros(3), 1)
    dist.barrier()
    return str(caught.value)


def test_a_message_that_does_not_fit_is_an_error_at_both_ends(zygote: Zygote) -> None:
    for text in zygote.run(misfit, 2):
        assert "3 elements" in text and "4 elements" in text


# ------------------------------------------------------------------------------------------------ leaving no trace


def fork_and_exit(rank: int) -> int:
    group = dist.group.WORLD
    child = os.fork()
    if not child:
        code = 3
        try:
            dist.all_reduce(torch.ones(1))
        except UsageError:
            try:
                dist.all_reduce(torch.ones(1), async_op=True)
            except UsageError:
                group.shutdown()
                code = 0
        os._exit(code)
    _, status = os.waitpid(child, 0)
    dist.barrier()
    return os.waitstatus_to_exitcode(status)


def test_a_forked_child_can_not_use_its_parents_group_and_does_it_no_harm(zygote: Zygote) -> None:
    assert zygote.run(fork_and_exit, 2) == [0, 0]


def make_and_destroy_in_flight(rank: int, path: str) -> None:
    store = dist.FileStore(path, 2)
    dist.init_process_group("pccl", store=store, rank=rank, world_size=2)
    if rank == 0:
        work = dist.all_reduce(torch.ones(1000), async_op=True)
        receive = dist.irecv(torch.zeros(1), 1)
        store.set("in flight", "yes")
        dist.destroy_process_group()
        for each in (work, receive):
            eventually(each.is_completed, 5.0, "what was in flight ends")
            assert not each.is_success()
        eventually(lambda: not _ours(), 5.0, "threads end")
    else:
        store.wait(["in flight"])
        dist.destroy_process_group()


def _ours() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ray_pccl")]


def test_a_group_that_is_destroyed_with_calls_in_flight_ends_them(zygote: Zygote) -> None:
    zygote.run(make_and_destroy_in_flight, 2, group=False)


def average_and_leave(rank: int) -> None:
    group = dist.new_group([0, 1])
    source = torch.full((10,), float(rank))
    beside = group.averages.beside(source)
    group.average_into(beside, source).wait()
    assert beside.tolist() == [0.5] * 10 and group.averages.beside(source) is beside
    dist.destroy_process_group(group)
    assert group.averages.beside(source) is not beside


def test_a_group_that_was_left_keeps_no_tensors(zygote: Zygote) -> None:
    zygote.run(average_and_leave, 2)


def test_what_is_given_to_workers_that_have_ended_runs_at_once_and_starts_no_thread() -> None:
    workers, ran = Workers(), []
    workers.close()
    before = threading.active_count()
    workers.submit(lambda: ran.append(threading.current_thread()))
    assert ran == [threading.current_thread()] and threading.active_count() == before


class Leaving:
    def __init__(self, *, raises: bool) -> None:
        self.raises, self.left = raises, False

    def shutdown(self) -> None:
        self.left = True
        if self.raises:
            raise RuntimeError("it can't be left")


def test_a_group_that_can_not_be_left_does_not_keep_the_others_open(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [Leaving(raises=True), Leaving(raises=False)]
    monkeypatch.setattr(process_group, "_open", groups)
    process_group._leave()
    assert all(group.left for group in groups)
