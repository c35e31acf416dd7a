"""A rank dies. By default every survivor is told at once, in whatever call it is; an elastic group goes on."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ray_pccl.torch
from ray_pccl import SharedState
from ray_pccl.control.endpoint import Endpoint
from ray_pccl.errors import PeerLostError, WorldChangedError
from ray_pccl.testing import eventually
from ray_pccl.testing.master import MasterProcess
from tests.torch.ranks import Ended
from tests.torch.zygote import Zygote

AT_ONCE_S = 0.9
"""Less than the second after which a host that is silent counts as dead: someone must have told."""


def die() -> None:
    """Ends this process as a crash would, with all that it leads, and leaves the time of it in the store."""
    dist.group.WORLD.get_group_store().set("died", str(time.monotonic()))
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def raised_by(call: Callable[[], Any]) -> tuple[float, str]:
    """How long after the death a call raised, and what it said."""
    with pytest.raises(PeerLostError) as caught:
        call()
    at = time.monotonic()
    assert isinstance(caught.value, dist.DistBackendError) and isinstance(caught.value, RuntimeError)
    return at - float(dist.group.WORLD.get_group_store().get("died")), str(caught.value)


def in_all_reduce(rank: int) -> Callable[[], Any]:
    return lambda: dist.all_reduce(torch.ones(1000))


def in_a_large_all_reduce(rank: int) -> Callable[[], Any]:
    def loop() -> None:
        while True:
            dist.all_reduce(torch.ones(2_000_000))

    return loop


def in_a_work(rank: int) -> Callable[[], Any]:
    works = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(5)]
    return works[-1].wait


def in_all_gather(rank: int) -> Callable[[], Any]:
    return lambda: dist.all_gather([torch.zeros(2) for _ in range(3)], torch.ones(2))


def in_barrier(rank: int) -> Callable[[], Any]:
    return dist.barrier


def in_a_receive_from_another_survivor(rank: int) -> Callable[[], Any]:
    (other,) = {0, 1, 2} - {rank, PHASES.index(in_a_receive_from_another_survivor) % 3}
    return lambda: dist.recv(torch.zeros(1), other)


def in_a_receive_from_anyone(rank: int) -> Callable[[], Any]:
    return lambda: dist.recv(torch.zeros(1))


def survive(rank: int, path: str, phase: Callable[[int], Callable[[], Any]], victim: int) -> Any:
    os.setpgrp()  # as a launcher has it, which ends a rank with all its children
    timeout = timedelta(seconds=20)
    dist.init_process_group("pccl", store=dist.FileStore(path, 3), rank=rank, world_size=3, timeout=timeout)
    endpoint = str(dist.group.WORLD.membership.master)
    dist.all_reduce(torch.ones(1))
    if rank == victim:
        if phase is in_a_large_all_reduce:
            threading.Timer(0.1, die).start()
            in_a_large_all_reduce(rank)()
        store = dist.group.WORLD.get_group_store()
        store.wait([f"entering/{place}" for place in range(3) if place != victim])
        die()
    call = phase(rank)
    dist.group.WORLD.get_group_store().set(f"entering/{rank}", "yes")
    first = raised_by(call)
    again = raised_by(lambda: dist.all_reduce(torch.ones(1)))
    raised_by(lambda: dist.isend(torch.ones(1), victim))
    began = time.monotonic()
    dist.destroy_process_group()
    return first, again, time.monotonic() - began, endpoint


PHASES = (
    in_all_reduce,
    in_a_large_all_reduce,
    in_a_work,
    in_all_gather,
    in_barrier,
    in_a_receive_from_another_survivor,
    in_a_receive_from_anyone,
)


@pytest.mark.parametrize("phase", PHASES)
def test_a_death_raises_on_every_survivor_at_once_naming_the_peer(zygote: Zygote, phase: Any) -> None:
    victim = PHASES.index(phase) % 3
    ends = zygote.run(survive, 3, phase, victim, group=False)
    assert isinstance(ends.pop(victim), Ended)
    for (seconds, text), (_, later), leaving_s, _ in ends:
        assert seconds < AT_ONCE_S, text
        assert f"rank{victim}@" in text and f"rank{victim}@" in later
        assert leaving_s < 1.0


def listens(endpoint: Endpoint) -> bool:
    try:
        socket.create_connection((endpoint.host, endpoint.port), 1.0).close()
    except OSError:
        return False
    return True


def test_rank_zero_may_die_too_and_the_master_it_started_tells_the_others_and_ends(zygote: Zygote) -> None:
    ends = zygote.run(survive, 3, in_all_reduce, 0, group=False, environment={"RAY_PCCL_MASTER": None})
    assert isinstance(ends.pop(0), Ended)
    for (seconds, text), _, _, endpoint in ends:
        assert seconds < AT_ONCE_S and "rank0@" in text
        eventually(lambda endpoint=endpoint: not listens(Endpoint.parse(endpoint)), 10.0, "its master ends")


def not_having_heard(rank: int, path: str) -> list[str]:
    """The survivors know of the death, but this layer is kept from looking: the group itself has to refuse."""
    dist.init_process_group("pccl", store=dist.FileStore(path, 3), rank=rank, world_size=3)
    membership = dist.group.WORLD.membership
    dist.all_reduce(torch.ones(1))
    membership._look = lambda: None
    if rank == 1:
        die()
    eventually(lambda: membership.communicator.world_size == 2, 10.0, "the death is known")
    texts = []
    for call in (lambda: dist.all_reduce(torch.ones(1)), dist.barrier, lambda: dist.broadcast(torch.ones(1), 0)):
        with pytest.raises(dist.DistBackendError) as caught:
            call()
        texts.append(str(caught.value))
    return texts


def test_no_call_begins_with_fewer_ranks_even_if_the_death_was_not_heard_of(zygote: Zygote) -> None:
    ends = zygote.run(not_having_heard, 3, group=False)
    assert all(len(ends[rank]) == 3 for rank in (0, 2))


def break_links(rank: int) -> None:
    """The link between two neighbours breaks twice, and so the master has the ring avoid it: nobody is dead."""
    communicator = dist.group.WORLD.membership.communicator
    before, plane = communicator.members, communicator._operations()._plane
    first = communicator.epoch
    for epoch in (first + 1, first + 2):
        dist.barrier()
        if rank == 0:
            link = plane.link_to(before[1])
            plane.call(lambda link=link: link.sock.shutdown(socket.SHUT_RDWR))
        eventually(lambda epoch=epoch: communicator.epoch >= epoch, 20.0, "the links are made anew")
    assert communicator.members != before


def leave_together(rank: int, size: int) -> None:
    store = dist.group.WORLD.get_group_store()
    store.set(f"through/{rank}", "yes")
    store.wait([f"through/{other}" for other in range(size)])
    dist.destroy_process_group()


def go_on_in_another_order(rank: int, path: str) -> tuple[str, str, float]:
    dist.init_process_group("pccl", store=dist.FileStore(path, 4), rank=rank, world_size=4)
    own, gathered = torch.tensor([float(rank)]), [torch.zeros(1) for _ in range(4)]
    break_links(rank)
    with pytest.raises(WorldChangedError) as caught:
        dist.all_gather(gathered, own)
    received = torch.zeros(1)
    works = [dist.isend(own, (rank + 1) % 4), dist.irecv(received, (rank + 3) % 4)]
    for work in works:
        work.wait()
    with pytest.raises(WorldChangedError) as again:
        dist.broadcast(received, 0)
    leave_together(rank, 4)
    return str(caught.value), str(again.value), received.item()


def test_ranks_in_another_order_are_refused_on_all_and_messages_go_to_who_is_meant(zygote: Zygote) -> None:
    ends = zygote.run(go_on_in_another_order, 4, group=False)
    for rank, (text, again, received) in enumerate(ends):
        assert "rank0@" in text and "another order" in text and "another order" in again
        assert received == float((rank + 3) % 4)


def train_until_someone_dies(rank: int, path: str) -> str:
    dist.init_process_group("pccl", store=dist.FileStore(path, 3), rank=rank, world_size=3)
    model = DistributedDataParallel(nn.Linear(300, 300), bucket_cap_mb=0.1)
    for step in range(1000):
        if step == 3 and rank == 2:
            die()
        try:
            model(torch.ones(4, 300)).sum().backward()
        except RuntimeError as error:
            return str(error)
    return "nobody died"


def test_a_death_in_the_backward_pass_of_ddp_raises_there_naming_the_peer(zygote: Zygote) -> None:
    for text in zygote.run(train_until_someone_dies, 3, group=False)[:2]:
        assert "rank2@" in text


# ---------------------------------------------------------------------------------------------------------- elastic


def join(rank: int, size: int, store: dist.Store, name: str) -> None:
    options = ray_pccl.torch.Options(elastic=True, group=name)
    timeout = timedelta(seconds=20)
    dist.init_process_group("pccl", store=store, rank=rank, world_size=size, timeout=timeout, pg_options=options)


def go_on(rank: int, path: str, victim: int) -> list[Any]:
    join(rank, 3, dist.FileStore(path, 3), path)
    own, seen = torch.tensor([float(10**rank)]), []
    for step in range(6):
        if step == 3 and rank == victim:
            die()
        tensor, large = own.clone(), torch.full((200_000,), float(rank + 1))
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        world = dist.get_world_size(), dist.get_rank()  # here: who has all that it needs of a step may die at once
        work = dist.all_reduce(large, async_op=True)
        work.wait()
        seen.append((tensor.item(), large[0].item(), *world))
    gathered = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    seen.append([each.item() for each in gathered])
    dist.destroy_process_group()
    return seen


@pytest.mark.parametrize("victim", [0, 1])
def test_an_elastic_group_shrinks_and_averages_over_those_who_contributed(zygote: Zygote, victim: int) -> None:
    ends = zygote.run(go_on, 3, victim, group=False)
    assert isinstance(ends[victim], Ended)
    left = [rank for rank in range(3) if rank != victim]
    average = torch.tensor([float(10**rank) for rank in left]).mean().item()
    for place, rank in enumerate(left):
        *steps, gathered = ends[rank]
        assert steps[:3] == [(37.0, 6.0, 3, rank)] * 3
        assert steps[3:] == [(average, float(sum(other + 1 for other in left)), 2, place)] * 3
        assert gathered == [float(10**other) for other in left]


def come_late(rank: int, path: str) -> list[Any]:
    """Ranks 0 to 2 begin, rank 1 dies, rank 3 comes: it takes over what the others hold."""
    meeting = dist.FileStore(path, -1)
    weights, seen = torch.full((1000,), -1.0), []
    state = SharedState({"weights": weights})
    if rank == 3:
        meeting.wait(["shrunk"])
        join(0, 1, dist.HashStore(), path)
        first = ray_pccl.torch.step(state)
        seen.append((first.world_size, first.sync is not None))
    else:
        join(rank, 3, dist.PrefixStore("initial", meeting), path)
        weights.fill_(0.0)
        done = ray_pccl.torch.step(state)
        assert (done.world_size, done.changed) == (3, False)
    while weights[0].item() < 12.0:
        if rank == 1 and weights[0].item() == 3.0:
            die()
        gradient = torch.ones_like(weights)
        dist.all_reduce(gradient, dist.ReduceOp.AVG)
        weights += gradient
        if weights[0].item() == 6.0:
            meeting.set("shrunk", "yes")
            eventually(dist.group.WORLD.membership.communicator.num_waiting, 20.0, "the newcomer comes")
        state.revision += 1
        done = ray_pccl.torch.step(state)
        assert dist.get_process_group_ranks(dist.group.WORLD) == list(range(done.world_size))
        seen.append((weights[0].item(), done.world_size, len(done.joined), len(done.left), dist.get_world_size()))
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return [*seen, total.item()]


def test_a_newcomer_is_admitted_at_step_with_the_others_state(zygote: Zygote) -> None:
    ends = zygote.run(come_late, 4, group=False)
    for rank in (0, 2):
        *seen, total = ends[rank]
        assert total == 3.0
        worlds = [(weights, size) for weights, size, _, _, _ in seen]
        assert [weights for weights, _ in worlds] == [float(number) for number in range(1, 13)]
        assert dict(worlds)[5.0] == 2 and dict(worlds)[7.0] == 3
        assert all(size == said for _, size, _, _, said in seen)
        assert sum(joined for _, _, joined, _, _ in seen) == 1 and sum(left for _, _, _, left, _ in seen) == 1
    (first_world, synced), *seen, total = ends[3]
    assert (first_world, synced, total) == (3, True, 3.0)
    assert [each[0] for each in seen] == [float(number) for number in range(7, 13)]


def step_in_another_order(rank: int, path: str) -> tuple[bool, bool, int, int]:
    join(rank, 4, dist.FileStore(path, 4), path)
    first = ray_pccl.torch.step()
    break_links(rank)
    done = ray_pccl.torch.step()
    leave_together(rank, 4)
    return first.changed, done.changed, len(done.joined) + len(done.left), done.rank


def test_step_says_that_ranks_have_changed_though_nobody_came_or_went(zygote: Zygote) -> None:
    ends = zygote.run(step_in_another_order, 4, group=False)
    assert [end[:3] for end in ends] == [(False, True, 0)] * 4
    ranks = [end[3] for end in ends]
    assert sorted(ranks) == [0, 1, 2, 3] and ranks != [0, 1, 2, 3]


def train_on(rank: int, path: str) -> tuple[list[float], float]:
    join(rank, 3, dist.FileStore(path, 3), path)
    torch.manual_seed(5)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)), bucket_cap_mb=0.001)
    model.register_comm_hook(None, ray_pccl.torch.average_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs = torch.randn(30, 8, generator=torch.Generator().manual_seed(1))
    targets = inputs.sum(dim=1, keepdim=True)
    for step in range(30):
        if step == 10 and rank == 1:
            threading.Timer(0.002, die).start()  # anywhere in the steps that follow
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs[rank::3]), targets[rank::3])
        loss.backward()
        optimizer.step()
        if rank == 1 and step > 10:
            time.sleep(0.05)
    weights = torch.cat([value.detach().reshape(-1) for value in model.module.parameters()])
    return weights.tolist(), loss.item()


def test_ddp_trains_on_through_a_death_and_the_survivors_stay_alike(zygote: Zygote) -> None:
    ends = zygote.run(train_on, 3, group=False)
    assert isinstance(ends[1], Ended)
    (first, loss), (second, _) = ends[0], ends[2]
    assert first == second, "the survivors' weights differ"
    assert loss < 2.0


def outlive_the_master(rank: int, path: str, folder: str) -> list[float]:
    join(rank, 3, dist.FileStore(path, 3), path)
    here, seen = Path(folder), []
    Path(folder, f"running-{rank}").touch()
    while True:
        over = torch.tensor([float((here / "restarted").exists())])
        dist.all_reduce(over, dist.ReduceOp.MIN)
        tensor = torch.full((1000,), float(rank + 1))
        dist.all_reduce(tensor)
        seen.append(tensor[0].item())
        if over.item():
            break
    if rank == 2:
        die()
    tensor = torch.full((1000,), float(rank + 1))
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return [min(seen), max(seen), tensor[0].item()]


def test_an_elastic_group_outlives_its_master_and_shrinks_under_the_next(
    zygote: Zygote, master_process: MasterProcess, tmp_path: Path
) -> None:
    found: list[Any] = []
    environment = {"RAY_PCCL_MASTER": str(master_process.endpoint)}
    thread = threading.Thread(
        target=lambda: found.extend(
            zygote.run(outlive_the_master, 3, str(tmp_path), group=False, environment=environment)
        )
    )
    thread.start()
    eventually(lambda: len(list(tmp_path.glob("running-*"))) == 3, 20.0, "all ranks run")
    master_process.kill()
    master_process.start()
    (tmp_path / "restarted").touch()
    thread.join(60.0)
    assert found[:2] == [[6.0, 6.0, 3.0]] * 2
