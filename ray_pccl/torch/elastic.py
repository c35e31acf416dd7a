"""Training in a group that shrinks and grows: where newcomers come in, and averages over those who contributed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed import distributed_c10d
from torch.futures import Future

from ray_pccl.torch.backend_errors import UsageBackendError
from ray_pccl.torch.process_group import PCCLProcessGroup

if TYPE_CHECKING:
    from ray_pccl.state.sharing import SharedState, SharedStateSyncInfo


@dataclass(frozen=True, slots=True)
class Step:
    """What a call of `step` found."""

    rank: int
    """This process's rank from now on."""
    world_size: int
    """How many ranks there are from now on."""
    joined: tuple[str, ...]
    """Who has come since the last call, by `peer_id`."""
    left: tuple[str, ...]
    """Who has gone since the last call, by `peer_id`."""
    sync: SharedStateSyncInfo | None
    """What the sync of the shared state moved, if one was given."""

    @property
    def changed(self) -> bool:
        """Whether the world is another one than at the last call."""
        return bool(self.joined or self.left)


def step(state: SharedState | None = None, *, group: dist.ProcessGroup | None = None) -> Step:
    """Between two steps of a training: admits who waits, and brings all ranks' `state` to the same content.

    All ranks of an elastic group call it, each between its collectives; it blocks until all have. A newcomer's first
    call meets the others' in the sync of the state, if there is one, and otherwise returns at once.

    Raises:
        UsageBackendError: The group is not elastic, or not one of the backend "pccl".
        BackendError: As `Communicator.update_topology` and `Communicator.sync_shared_state`.
    """
    found = _elastic(group)
    membership = found.membership
    communicator = membership.communicator
    synced: list[SharedStateSyncInfo] = []

    def run() -> None:
        communicator.update_topology()
        if state is not None:
            synced.append(communicator.sync_shared_state(state))

    found.run_in_turn(run, "step")
    joined, left = membership.changes()
    if found is dist.group.WORLD:  # torch keeps a table of its ranks
        distributed_c10d._world.pg_group_ranks[found] = {rank: rank for rank in range(membership.size)}
    return Step(membership.rank, membership.size, joined, left, synced[0] if synced else None)


def average_hook(group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[torch.Tensor]:
    """For `DistributedDataParallel.register_comm_hook(None, average_hook)`: gradients are averaged over contributors.

    DDP by itself divides by the world size that it saw before the all-reduce: when a rank dies meanwhile, the sum of
    those who are left has been divided by too much. The hook is faster, too: it divides only what this rank reduces,
    and the average is made beside the bucket, where DDP takes it from. That takes as much memory as the gradients.
    """
    source = bucket.buffer()
    averaged: Future[torch.Tensor] = (
        _pccl(group).average_into(_averages.beside(source), source).get_future().then(lambda future: future.value()[0])
    )
    return averaged


class _Averages:
    """Where averages are made: a tensor for each bucket, which is used again for the same one.

    Buckets are told apart by their address: two that live at the same time have two. The average of a bucket is read
    before the bucket is filled again. What was not used for long is let go of; if torch still reads it, torch holds it.
    """

    KEPT = 256

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tensors: OrderedDict[int, torch.Tensor] = OrderedDict()

    def beside(self, source: torch.Tensor) -> torch.Tensor:
        """The tensor for what is to be averaged."""
        address = source.data_ptr()
        with self._lock:
            found = self._tensors.pop(address, None)
            if found is None or found.shape != source.shape or found.dtype != source.dtype:
                found = torch.empty_like(source)
            self._tensors[address] = found
            if len(self._tensors) > self.KEPT:
                self._tensors.popitem(last=False)
            return found


_averages = _Averages()
# Torch looks at a hook's annotations themselves, and takes no text for a type.
average_hook.__annotations__ = {"bucket": dist.GradBucket, "return": Future[torch.Tensor]}  # type: ignore[attr-defined]


def _pccl(group: dist.ProcessGroup | None) -> PCCLProcessGroup:
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, PCCLProcessGroup):
        raise UsageBackendError(f"this is for a process group of the backend 'pccl', not {found!r}")
    return found


def _elastic(group: dist.ProcessGroup | None) -> PCCLProcessGroup:
    found = _pccl(group)
    if not found.membership.elastic:
        raise UsageBackendError("step() is for an elastic group: pg_options=ray_pccl.torch.Options(elastic=True, ...)")
    return found
