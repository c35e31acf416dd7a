"""A mistake on one rank is an error on all, at once; and a rank is the peer that the caller knows by it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ray_pccl.torch
from ray_pccl.errors import CollectiveMismatchError, PeerLostError, UsageError
from ray_pccl.testing import eventually
from tests.torch.ranks import Ended
from tests.torch.zygote import Zygote

AT_ONCE_S = 5.0
"""Less than the group's timeout, after which ranks would not wait for one another any more."""


def too_few_outputs(wrong: bool) -> None:
    dist.all_gather([torch.zeros(1)] * (1 if wrong else 2), torch.ones(1))


def too_few_outputs_behind(wrong: bool) -> None:
    dist.all_gather([torch.zeros(1)] * (1 if wrong else 2), torch.ones(1), async_op=True).wait()


def splits_that_do_not_add_up(wrong: bool) -> None:
    dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [2, 1] if wrong else [2, 2], [2, 2])


def no_such_operation(wrong: bool) -> None:
    dist.all_reduce(torch.ones(1, dtype=torch.float32 if wrong else torch.int64), op=dist.ReduceOp.BXOR)


def an_output_of_another_size(wrong: bool) -> None:
    output, source = torch.zeros(1 if wrong else 2, dtype=torch.int64), torch.arange(4)
    dist.group.WORLD.reduce_scatter_single(output, source, _options(dist.ReduceOp.BOR)).wait()


def an_output_of_another_type(wrong: bool) -> None:
    dtype = torch.float64 if wrong else torch.float32
    dist.group.WORLD.all_gather_single(torch.zeros(4, dtype=dtype), torch.zeros(2)).wait()


def a_conjugated_view(wrong: bool) -> None:
    tensor = torch.ones(2, dtype=torch.complex64)
    dist.group.WORLD.broadcast([tensor.conj() if wrong else tensor]).wait()


def lists_of_different_lengths(wrong: bool) -> None:
    outputs, inputs = [torch.zeros(4), torch.zeros(4)], [torch.zeros(2), torch.zeros(2)]
    dist.group.WORLD.all_gather_single_coalesced(outputs[: 1 if wrong else 2], inputs).wait()


def no_such_root(wrong: bool) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 7 if wrong else 0
    dist.group.WORLD.broadcast([torch.zeros(1)], options).wait()


MISTAKES = (
    too_few_outputs,
    too_few_outputs_behind,
    splits_that_do_not_add_up,
    no_such_operation,
    an_output_of_another_size,
    an_output_of_another_type,
    a_conjugated_view,
    lists_of_different_lengths,
    no_such_root,
)


def _options(op: Any) -> Any:
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    return options


def make_mistakes(rank: int) -> list[tuple[str, float, bool, str]]:
    found = []
    for mistake in MISTAKES:
        began = time.monotonic()
        try:
            mistake(rank == 0)
            text, is_usage = "no error", False
        except Exception as error:
            text, is_usage = str(error), isinstance(error, UsageError)
        found.append((mistake.__name__, time.monotonic() - began, is_usage, text))
        tensor = torch.ones(1)
        dist.all_reduce(tensor)  # calls still pair
        assert tensor.item() == 2.0
    return found


def test_a_mistake_on_one_rank_raises_on_all_at_once_naming_it_and_the_group_goes_on(zygote: Zygote) -> None:
    mistaken, other = zygote.run(make_mistakes, 2)
    for (name, seconds, _, text), (_, waited, is_usage, told) in zip(mistaken, other, strict=True):
        assert text != "no error", name
        assert is_usage and "rank0@" in told and text.splitlines()[0] in told, f"{name}: {told}"
        assert max(seconds, waited) < AT_ONCE_S, name


def confuse(rank: int) -> None:
    small = torch.zeros(4, dtype=torch.uint8) if rank else torch.ones(4).to(torch.float8_e5m2)
    premultiplied: Any = dist._make_nccl_premul_sum(2.0)
    calls: list[Callable[[], Any]] = [
        lambda: dist.broadcast(small, 0),
        lambda: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.SUM if rank else premultiplied),
        lambda: dist.send(small, 1) if rank == 0 else dist.recv(small, 0),
    ]
    for call in calls:
        with pytest.raises(CollectiveMismatchError):
            call()
    tensor = torch.ones(2)
    dist.all_reduce(tensor, op=premultiplied)
    assert tensor.tolist() == [4.0, 4.0]


def test_types_and_operations_that_travel_as_others_are_not_taken_for_them(zygote: Zygote) -> None:
    zygote.run(confuse, 2)


# ---------------------------------------------------------------------------------------------------------- elastic


def join(rank: int, size: int, path: str) -> Any:
    options = ray_pccl.torch.Options(elastic=True, group=path)
    timeout, store = timedelta(seconds=20), dist.FileStore(path, size)
    dist.init_process_group("pccl", store=store, rank=rank, world_size=size, timeout=timeout, pg_options=options)
    dist.all_reduce(torch.ones(1))
    return dist.group.WORLD.membership.communicator


def outlive_the_root(rank: int, path: str) -> tuple[str, list[float]]:
    communicator = join(rank, 3, path)
    store = dist.group.WORLD.get_group_store()
    assert dist.get_rank() == rank
    store.set(f"rank {rank} has looked", "yes")
    if rank == 0:
        store.wait(["rank 1 has looked", "rank 2 has looked"])
        os.kill(os.getpid(), signal.SIGKILL)
    eventually(lambda: communicator.world_size == 2, 20.0, "the death is known, but not to who calls")
    tensor = torch.full((2,), float(rank))
    with pytest.raises(PeerLostError) as caught:
        dist.broadcast(tensor, 0)
    assert tensor.tolist() == [float(rank)] * 2
    dist.broadcast(tensor, 0)  # now that it was told, rank 0 is the next one
    dist.destroy_process_group()
    return str(caught.value), tensor.tolist()


def test_a_root_that_died_unnoticed_is_an_error_and_not_the_peer_that_has_its_rank_now(zygote: Zygote) -> None:
    ends = zygote.run(outlive_the_root, 3, group=False)
    assert isinstance(ends[0], Ended)
    for text, tensor in ends[1:]:
        assert "rank0@" in text and tensor == [1.0, 1.0]


def send_across_a_death(rank: int, path: str) -> list[float]:
    communicator = join(rank, 4, path)
    store = dist.group.WORLD.get_group_store()
    received = []
    if rank == 0:
        works = [dist.isend(torch.tensor([number]), 2) for number in (1.0, 2.0)]
        store.set("sent", "yes")
        for work in works:
            work.wait()
    else:
        store.wait(["sent"])
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        eventually(lambda: communicator.world_size == 3, 20.0, "the death is known")
        for _ in range(2 if rank == 2 else 0):
            tensor = torch.zeros(1)
            dist.recv(tensor, 0)
            received.append(tensor.item())
    store.set(f"through/{rank}", "yes")
    store.wait([f"through/{other}" for other in (0, 2, 3)])
    dist.destroy_process_group()
    return received


def test_messages_that_wait_go_to_the_peer_that_was_meant_when_they_were_issued(zygote: Zygote) -> None:
    ends = zygote.run(send_across_a_death, 4, group=False)
    assert isinstance(ends[1], Ended)
    assert (ends[2], ends[3]) == ([1.0, 2.0], [])


def receive_from_one_who_left(rank: int, path: str) -> int:
    communicator = join(rank, 3, path)
    if rank:
        if rank == 1:
            dist.send(torch.ones(1), 0)
        else:
            eventually(lambda: communicator.world_size == 2, 20.0, "the sender has left")
            dist.group.WORLD.get_group_store().wait(["received"])
        dist.destroy_process_group()
        return rank
    mailbox = dist.group.WORLD._mailbox
    transfer = mailbox._transfer

    def slow(*args: Any, **given: Any) -> Any:
        info = transfer(*args, **given)
        eventually(lambda: communicator.world_size == 2, 20.0, "the sender has left")
        return info

    mailbox._transfer = slow
    source = dist.recv(torch.zeros(1))
    dist.group.WORLD.get_group_store().set("received", "yes")
    dist.destroy_process_group()
    return source


def test_a_receive_from_anyone_names_a_sender_that_has_left_meanwhile(zygote: Zygote) -> None:
    assert zygote.run(receive_from_one_who_left, 3, group=False)[0] == 1
