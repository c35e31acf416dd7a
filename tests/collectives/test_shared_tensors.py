"""Tensors in shared memory need no copy; device tensors are staged through host memory."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np

import ray_pccl
from ray_pccl import Communicator
from ray_pccl.testing import PeerGroup
from tests.collectives.conftest import over, together
from tests.ring.test_tensors import DeviceArray

LARGE, SMALL = 1 << 20, 1000
"""Elements: above and below what is published whole."""


def _reduces(comm: Communicator, send: Any, recv: Any, what: str, copies: bool | None) -> list[str]:
    """All-reduces ones; `copies`: whether bytes have to be handed over, None if that is not looked at."""
    send[:] = 1
    info = comm.all_reduce(send, recv)
    result = send if recv is None else recv
    found = [] if (np.asarray(result) == comm.world_size).all() else [f"{what}: the sum is {result}"]
    if copies is not None and (info.tx_bytes > 0) != copies:
        found.append(f"{what}: {info.tx_bytes} bytes were copied")
    return found


def shared(comm: Communicator, one_host: bool) -> list[str]:
    from ray_pccl.ring.arena import own_arena

    free_before = list(own_arena()._free)
    found: list[str] = []
    for count in (LARGE, SMALL):
        no_copy = one_host and count == LARGE
        there = ray_pccl.empty(count, np.float32)
        plain = np.empty(count, np.float32)
        found += _reduces(comm, there, plain, f"{count} shared", copies=not no_copy)
        found += _reduces(comm, plain, ray_pccl.empty_like(plain), f"{count} into shared", copies=True)
        found += _reduces(comm, there, None, f"{count} in place", copies=not no_copy)
        found += _reduces(comm, there[7 : count // 2], None, f"a part of {count}", copies=None)
        again = ray_pccl.empty((2, count // 2), np.int64)
        found += _reduces(comm, again, None, f"{count} again", copies=None)
        del there, plain, again
    gc.collect()
    if own_arena()._free != free_before:
        found.append(f"not all was given back: {own_arena()._free}")
    return found


def on_a_device(comm: Communicator) -> list[str]:
    found = []
    for count in (LARGE, SMALL):
        send, recv = DeviceArray(np.full(count, comm.rank + 1, np.float32)), DeviceArray(np.zeros(count, np.float32))
        comm.all_reduce(send, recv)
        due = comm.world_size * (comm.world_size + 1) / 2
        if not (recv.get() == due).all() or not (send.get() == comm.rank + 1).all():
            found.append(f"{count} elements: {recv.get()[:3]} and {send.get()[:3]}")
        comm.broadcast(send, root=1)
        if not (send.get() == 2).all():
            found.append(f"{count} elements of the root: {send.get()[:3]}")
    return found


@over(2, 3)
def test_a_tensor_in_shared_memory_is_read_where_it_is_and_its_memory_comes_back(group: PeerGroup) -> None:
    transport = group[0].run(lambda comm: __import__("os").environ["RAY_PCCL_TRANSPORT"])
    assert together(group, shared, transport == "auto") == [[]] * len(group)


@over(2)
def test_a_device_tensor_is_staged_through_host_memory(group: PeerGroup) -> None:
    assert together(group, on_a_device) == [[]] * len(group)
