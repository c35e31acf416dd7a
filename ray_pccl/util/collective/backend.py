"""The backend: what `ray.util.collective` calls a group, on our data plane. Ray's own module runs on it, too."""

from __future__ import annotations

from typing import Any

from ray.util.collective.backend_registry import _global_registry, register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup

from ray_pccl.errors import PCCLError, SettingsError
from ray_pccl.util.collective.errors import as_runtime_error
from ray_pccl.util.collective.rendezvous import meet
from ray_pccl.util.collective.tensors import first_elements
from ray_pccl.util.collective.types import (
    AllGatherOptions,
    BarrierOptions,
    BroadcastOptions,
    RecvOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    SendOptions,
    as_pccl_op,
)
from ray_pccl.util.collective.world import FixedWorld

BACKEND_NAME = "PCCL"
_MILLISECONDS = 1000


def register_backend() -> None:
    """Makes ``backend="PCCL"`` known to `ray.util.collective` in this process. Does nothing if it is.

    Importing `ray_pccl.util.collective` does it: in the driver, and in each actor.
    """
    if not _global_registry.is_registered(BACKEND_NAME):
        register_collective_backend(BACKEND_NAME, PCCLGroup)


class PCCLGroup(BaseGroup):
    """This process's membership in one collective group. Made when all ranks are there.

    The methods are those that `ray.util.collective` calls: a tensor comes as a list of the tensors that this process
    has on its GPUs. It has to be a list of one: run one process per GPU.

    Args:
        world_size: The number of ranks.
        rank: That of this process.
        group_name: The group's name, in this job's Ray namespace.
        gloo_timeout: How long an operation waits until all ranks have entered it, in milliseconds; ``op_timeout_s`` if
            None.

    Every error is a `RuntimeError`.
    """

    def __init__(self, world_size: int, rank: int, group_name: str, gloo_timeout: int | None = None) -> None:
        super().__init__(world_size, rank, group_name)
        timeout_s = None if gloo_timeout is None else gloo_timeout / _MILLISECONDS
        if timeout_s is not None and timeout_s <= 0:
            raise as_runtime_error(SettingsError(f"gloo_timeout is more than 0 milliseconds, not {gloo_timeout!r}"))
        try:
            communicator, members = meet(group_name, world_size, rank)
        except PCCLError as error:
            raise as_runtime_error(error) from error
        self._world = FixedWorld(communicator, members, group_name, timeout_s)

    @classmethod
    def backend(cls) -> str:
        """The backend's name."""
        return BACKEND_NAME

    @classmethod
    def check_backend_availability(cls) -> bool:
        """It needs nothing that could be missing."""
        return True

    def destroy_group(self) -> None:
        """Leaves the group."""
        self._world.close()

    def allreduce(self, tensor: list[Any], allreduce_options: Any = None) -> None:
        """Combines the tensors of all ranks into everyone's, in place; their sum, without options."""
        # Ray writes the op of each call into the class of its options: what stands there is no default.
        op = ReduceOp.SUM if allreduce_options is None else allreduce_options.reduceOp
        self._world.all_reduce(_only(tensor), as_pccl_op(op))

    def barrier(self, barrier_options: Any = BarrierOptions) -> None:
        """Returns when all ranks have called it."""
        self._world.barrier()

    def reduce(self, tensor: list[Any], reduce_options: Any = ReduceOptions) -> None:
        """Combines the tensors of all ranks into that of the root, in place; the others keep theirs."""
        self._world.reduce(_only(tensor), reduce_options.root_rank, as_pccl_op(reduce_options.reduceOp))

    def allgather(
        self, tensor_list: list[list[Any]], tensor: list[Any], allgather_options: Any = AllGatherOptions
    ) -> None:
        """Brings the tensors of all ranks to everyone's list."""
        outputs = _only(tensor_list)
        self._require_one_per_rank(outputs, "allgather")
        self._world.all_gather(outputs, _only(tensor))

    def broadcast(self, tensor: list[Any], broadcast_options: Any = BroadcastOptions) -> None:
        """Brings the root's tensor to everyone."""
        self._world.broadcast(_only(tensor), broadcast_options.root_rank)

    def reducescatter(
        self, tensor: list[Any], tensor_list: list[list[Any]], reducescatter_options: Any = ReduceScatterOptions
    ) -> None:
        """Combines the lists of all ranks, and leaves each rank the tensor at its place. The lists stay untouched."""
        inputs = _only(tensor_list)
        self._require_one_per_rank(inputs, "reducescatter")
        self._world.reduce_scatter(_only(tensor), inputs, as_pccl_op(reducescatter_options.reduceOp))

    def send(self, tensor: list[Any], send_options: SendOptions) -> None:
        """Sends a tensor, or its first elements, to a rank; returns when it is there."""
        _require_only_gpu(send_options.dst_gpu_index)
        self._world.send(_part(_only(tensor), send_options.n_elements), send_options.dst_rank)

    def recv(self, tensor: list[Any], recv_options: RecvOptions) -> None:
        """Receives what a rank sends, into a tensor or its first elements."""
        _require_only_gpu(recv_options.src_gpu_index)
        self._world.recv(_part(_only(tensor), recv_options.n_elements), recv_options.src_rank)

    def _require_one_per_rank(self, tensors: list[Any], what: str) -> None:
        if len(tensors) != self._world_size:
            raise RuntimeError(
                f"the tensor list of {what} has {len(tensors)} tensors, and world_size is {self._world_size}: "
                "it needs one for each rank"
            )


def _only(tensors: list[Any]) -> Any:
    if len(tensors) != 1:
        raise NotImplementedError(
            f"{len(tensors)} tensors of one process, as for several GPUs: only one is supported. Run one process (one "
            "actor with num_gpus=1) per GPU, each with a rank of its own, and pass a list of one tensor"
        )
    return tensors[0]


def _require_only_gpu(index: int) -> None:
    if index != 0:
        raise NotImplementedError(
            f"GPU {index} of a rank: each rank has only one, number 0. Run one process (one actor with num_gpus=1) per "
            "GPU, each with a rank of its own"
        )


def _part(tensor: Any, count: int) -> Any:
    try:
        return first_elements(tensor, count)
    except PCCLError as error:
        raise as_runtime_error(error) from None
