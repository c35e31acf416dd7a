"""`ray.util.collective`, on a data plane that notices deaths at once and never hangs.

Replace ``import ray.util.collective as col`` with ``import ray_pccl.util.collective as col``, and nothing else: the
functions, signatures, types and exceptions are Ray's. What is different:

- Every backend that Ray knows (NCCL, GLOO) is served by ray_pccl: nothing has to be installed for it.
- When a rank dies, every survivor's call raises within milliseconds, as does every later one: `PeerLostError` of
  ray_pccl, which is a `RuntimeError` here. After `destroy_collective_group` the group can be initialised again, with
  the ranks that are left, or with new ones.
- `ReduceOp.AVG`; any numpy, torch or CuPy tensor; `reducescatter` leaves its inputs alone; `send` and `recv` are of
  their group; ``gloo_timeout`` holds for operations. The first group starts the master, if there is none.
- One GPU a process: the ``*_multigpu`` functions take lists of one tensor.

Importing it registers the backend "PCCL" with Ray, so that `ray.util.collective` itself can run on it.
"""

from __future__ import annotations

from ray.util.collective.backend_registry import register_collective_backend

from ray_pccl.util.collective import types
from ray_pccl.util.collective.backend import PCCLGroup, register_backend
from ray_pccl.util.collective.collective import (
    allgather,
    allgather_multigpu,
    allreduce,
    allreduce_multigpu,
    barrier,
    broadcast,
    broadcast_multigpu,
    create_collective_group,
    destroy_collective_group,
    get_collective_group_size,
    get_group_handle,
    get_rank,
    gloo_available,
    init_collective_group,
    is_backend_available,
    is_group_initialized,
    nccl_available,
    recv,
    recv_multigpu,
    reduce,
    reduce_multigpu,
    reducescatter,
    reducescatter_multigpu,
    send,
    send_multigpu,
)

__all__ = [
    "PCCLGroup",
    "allgather",
    "allgather_multigpu",
    "allreduce",
    "allreduce_multigpu",
    "barrier",
    "broadcast",
    "broadcast_multigpu",
    "create_collective_group",
    "destroy_collective_group",
    "get_collective_group_size",
    "get_group_handle",
    "get_rank",
    "gloo_available",
    "init_collective_group",
    "is_backend_available",
    "is_group_initialized",
    "nccl_available",
    "recv",
    "recv_multigpu",
    "reduce",
    "reduce_multigpu",
    "reducescatter",
    "reducescatter_multigpu",
    "register_backend",
    "register_collective_backend",
    "send",
    "send_multigpu",
    "types",
]

register_backend()
