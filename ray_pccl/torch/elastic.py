"""Training in a group that shrinks and grows: where newcomers come in, and averages over those who contributed."""

from __future__ import annotations

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
    reordered: bool
    """Whether those who stayed have other ranks, though nobody before them may have gone."""
    sync: SharedStateSyncInfo | None
    """What the sync of the shared state moved, if one was given."""

    @property
    def changed(self) -> bool:
        """Whether the world is another one than at the last call."""
        return self.reordered or bool(self.joined or self.left)


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
    members, rank, before = membership.changes()
    joined = tuple(member for member in members if member not in before)
    left = tuple(member for member in before if member not in members)
    reordered = [member for member in before if member in members] != [member for member in members if member in before]
    if found is dist.group.WORLD:  # torch keeps a table of its ranks
        distributed_c10d._world.pg_group_ranks[found] = {rank: rank for rank in range(len(members))}
    return Step(rank, len(members), joined, left, reordered, synced[0] if synced else None)


def average_hook(group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[torch.Tensor]:
    """For `DistributedDataParallel.register_comm_hook(None, average_hook)`: gradients are averaged over contributors.

    DDP by itself divides by the world size that it saw before the all-reduce: when a rank dies meanwhile, the sum of
    those who are left has been divided by too much. The hook is faster, too: it divides only what this rank reduces,
    and the average is made beside the bucket, where DDP takes it from. That takes as much memory as the gradients.
    """
    source = bucket.buffer()
    found = _pccl(group)
    averaged: Future[torch.Tensor] = (
        found.average_into(found.averages.beside(source), source).get_future().then(lambda future: future.value()[0])
    )
    return averaged


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
