"""The functions of `ray.util.collective`, with its signatures and its exceptions, on our own data plane."""

from __future__ import annotations

from typing import Any

from ray_pccl.util.collective import checks, groups, types
from ray_pccl.util.collective.backend import PCCLGroup

_groups = groups.Groups()


def nccl_available() -> bool:
    """Whether ``backend="NCCL"`` can be used: always."""
    return is_backend_available("NCCL")


def gloo_available() -> bool:
    """Whether ``backend="GLOO"`` can be used: always."""
    return is_backend_available("GLOO")


def is_backend_available(backend: str) -> bool:
    """Whether a backend can be used: Ray's and ours always, one that was registered if it says so."""
    return groups.is_available(backend)


# ------------------------------------------------------------------------------------------------------------ groups


def is_group_initialized(group_name: str) -> bool:
    """Whether this process is in the group."""
    return _groups.get(group_name) is not None


def init_collective_group(
    world_size: int,
    rank: int,
    backend: str = types.Backend.NCCL,
    group_name: str = "default",
    gloo_timeout: int = groups.DEFAULT_TIMEOUT_MS,
) -> None:
    """Joins a group, in an actor or a task: returns when all its ranks have called it.

    Args:
        world_size: The number of ranks.
        rank: That of this process.
        backend: Any that Ray knows, in any case: NCCL, GLOO and PCCL are all served by our data plane.
        group_name: Names the group in this job's Ray namespace.
        gloo_timeout: How long each operation waits until all ranks have entered it, in milliseconds.

    Raises:
        RuntimeError: In a driver, in a group of that name already, or the other ranks did not come in time.
        AssertionError: `world_size` or `rank` makes no sense.
        ValueError: No name, or no such backend.
    """
    checks.inside_actor()
    if not group_name:
        raise ValueError(f"group_name '{group_name}' needs to be a string.")
    _groups.create(group_name, groups.Declaration(world_size, rank, backend, gloo_timeout))


def create_collective_group(
    actors: list[Any],
    world_size: int,
    ranks: list[int],
    backend: str = types.Backend.NCCL,
    group_name: str = "default",
    gloo_timeout: int = groups.DEFAULT_TIMEOUT_MS,
) -> None:
    """Declares actors to be a group, in a driver. Each of them joins it by itself when it first uses it.

    Args:
        actors: The handles of the actors.
        world_size: The number of ranks.
        ranks: That of each actor.
        backend: As in `init_collective_group`.
        group_name: Names the group in this job's Ray namespace.
        gloo_timeout: As in `init_collective_group`.

    Raises:
        RuntimeError: Ranks or sizes make no sense, a group of that name is declared, or there is no such backend.
    """
    if groups.is_declared(group_name):
        raise groups.twice(group_name)
    checks.membership(ranks, actors, world_size)
    if not groups.is_known(backend):
        raise RuntimeError(
            f"Backend {backend.upper()} is not registered. Please register it using "
            f"register_collective_backend('{backend.upper()}', YourBackendClass)."
        )
    if not groups.is_available(backend):
        raise RuntimeError(f"Backend {backend.upper()} is registered but not available: check what it requires.")
    actor_ids = [actor._ray_actor_id for actor in actors]
    groups.declare(group_name, actor_ids, ranks, world_size, backend, gloo_timeout)


def destroy_collective_group(group_name: str = "default") -> None:
    """Leaves a group, and ends its declaration. Does nothing but warn if this process is not in it."""
    checks.inside_actor()
    _groups.destroy(group_name)


def get_rank(group_name: str = "default") -> int:
    """This process's rank in the group, the one that was asked for; -1 if it is not in it."""
    checks.inside_actor()
    group = _groups.get(group_name)
    return -1 if group is None else int(group.rank)


def get_collective_group_size(group_name: str = "default") -> int:
    """The group's world size; -1 if this process is not in it."""
    checks.inside_actor()
    group = _groups.get(group_name)
    return -1 if group is None else int(group.world_size)


def get_group_handle(group_name: str = "default") -> groups.Group:
    """The group; one that was declared is joined first. `RuntimeError` if there is none."""
    checks.inside_actor()
    return _groups.get_or_create(group_name)


# ------------------------------------------------------------------------------------------------------- collectives


def allreduce(tensor: Any, group_name: str = "default", op: types.AnyReduceOp = types.ReduceOp.SUM) -> None:
    """Combines the tensors of all ranks into everyone's, in place: the same bits on all."""
    checks.single_tensor(tensor)
    _allreduce([tensor], group_name, op)


def allreduce_multigpu(
    tensor_list: list[Any], group_name: str = "default", op: types.AnyReduceOp = types.ReduceOp.SUM
) -> None:
    """`allreduce` of a list of one tensor."""
    checks.tensor_list(tensor_list)
    _allreduce(tensor_list, group_name, op)


def _allreduce(tensors: list[Any], group_name: str, op: types.AnyReduceOp) -> None:
    group = get_group_handle(group_name)
    options: Any = types.AllReduceOptions()
    options.reduceOp = _op_for(group, op)
    group.allreduce(tensors, options)


def barrier(group_name: str = "default") -> None:
    """Returns when all ranks have called it."""
    get_group_handle(group_name).barrier()


def reduce(
    tensor: Any, dst_rank: int = 0, group_name: str = "default", op: types.AnyReduceOp = types.ReduceOp.SUM
) -> None:
    """Combines the tensors of all ranks into that of `dst_rank`, in place; the others keep theirs."""
    checks.single_tensor(tensor)
    _reduce([tensor], dst_rank, 0, group_name, op)


def reduce_multigpu(
    tensor_list: list[Any],
    dst_rank: int = 0,
    dst_tensor: int = 0,
    group_name: str = "default",
    op: types.AnyReduceOp = types.ReduceOp.SUM,
) -> None:
    """`reduce` of a list of one tensor."""
    checks.tensor_list(tensor_list)
    _reduce(tensor_list, dst_rank, dst_tensor, group_name, op)


def _reduce(tensors: list[Any], dst_rank: int, dst_tensor: int, group_name: str, op: types.AnyReduceOp) -> None:
    group = get_group_handle(group_name)
    checks.rank_of(group, dst_rank)
    checks.root_tensor(len(tensors), dst_tensor)
    options: Any = types.ReduceOptions()
    options.reduceOp = _op_for(group, op)
    options.root_rank, options.root_tensor = dst_rank, dst_tensor
    group.reduce(tensors, options)


def broadcast(tensor: Any, src_rank: int = 0, group_name: str = "default") -> None:
    """Brings the tensor of `src_rank` to everyone, into theirs."""
    checks.single_tensor(tensor)
    _broadcast([tensor], src_rank, 0, group_name)


def broadcast_multigpu(
    tensor_list: list[Any], src_rank: int = 0, src_tensor: int = 0, group_name: str = "default"
) -> None:
    """`broadcast` of a list of one tensor."""
    checks.tensor_list(tensor_list)
    _broadcast(tensor_list, src_rank, src_tensor, group_name)


def _broadcast(tensors: list[Any], src_rank: int, src_tensor: int, group_name: str) -> None:
    group = get_group_handle(group_name)
    checks.rank_of(group, src_rank)
    checks.root_tensor(len(tensors), src_tensor)
    options: Any = types.BroadcastOptions()
    options.root_rank, options.root_tensor = src_rank, src_tensor
    group.broadcast(tensors, options)


def allgather(tensor_list: list[Any], tensor: Any, group_name: str = "default") -> None:
    """Brings the tensor of each rank to everyone's `tensor_list`, which has one of the same shape for each."""
    checks.single_tensor(tensor)
    checks.tensor_list(tensor_list)
    group = get_group_handle(group_name)
    if len(tensor_list) != group.world_size:
        raise RuntimeError("The length of the tensor list operands to allgather must be equal to world_size.")
    group.allgather([tensor_list], [tensor], types.AllGatherOptions())


def allgather_multigpu(
    output_tensor_lists: list[list[Any]], input_tensor_list: list[Any], group_name: str = "default"
) -> None:
    """`allgather` of a list of one tensor into a list of one list."""
    checks.tensor_lists(output_tensor_lists)
    checks.tensor_list(input_tensor_list)
    get_group_handle(group_name).allgather(output_tensor_lists, input_tensor_list, types.AllGatherOptions())


def reducescatter(
    tensor: Any, tensor_list: list[Any], group_name: str = "default", op: types.AnyReduceOp = types.ReduceOp.SUM
) -> None:
    """Combines the lists of all ranks, and leaves each rank the tensor at its place. The lists stay untouched."""
    checks.single_tensor(tensor)
    checks.tensor_list(tensor_list)
    if len(tensor_list) != get_group_handle(group_name).world_size:
        raise RuntimeError("The length of the tensor list operands to reducescatter must be equal to world_size.")
    _reducescatter([tensor], [tensor_list], group_name, op)


def reducescatter_multigpu(
    output_tensor_list: list[Any],
    input_tensor_lists: list[list[Any]],
    group_name: str = "default",
    op: types.AnyReduceOp = types.ReduceOp.SUM,
) -> None:
    """`reducescatter` of a list of one list into a list of one tensor."""
    checks.tensor_lists(input_tensor_lists)
    checks.tensor_list(output_tensor_list)
    _reducescatter(output_tensor_list, input_tensor_lists, group_name, op)


def _reducescatter(outputs: list[Any], lists: list[list[Any]], group_name: str, op: types.AnyReduceOp) -> None:
    group = get_group_handle(group_name)
    options: Any = types.ReduceScatterOptions()
    options.reduceOp = _op_for(group, op)
    group.reducescatter(outputs, lists, options)


# ---------------------------------------------------------------------------------------------------- point to point


def send(tensor: Any, dst_rank: int, group_name: str = "default") -> None:
    """Sends a tensor to a rank of the group; returns when it is there."""
    send_multigpu(tensor, dst_rank, 0, group_name)


def send_multigpu(
    tensor: Any, dst_rank: int, dst_gpu_index: int, group_name: str = "default", n_elements: int = 0
) -> None:
    """`send` to the only GPU of a rank, number 0; with `n_elements`, of that many elements from the tensor's start."""
    checks.single_tensor(tensor)
    group = get_group_handle(group_name)
    checks.other_rank_of(group, dst_rank)
    checks.element_count(n_elements)
    options: Any = types.SendOptions()
    options.dst_rank, options.dst_gpu_index, options.n_elements = dst_rank, dst_gpu_index, n_elements
    group.send([tensor], options)


def recv(tensor: Any, src_rank: int, group_name: str = "default") -> None:
    """Receives what a rank of the group sends, into a tensor of the same count and type."""
    recv_multigpu(tensor, src_rank, 0, group_name)


def recv_multigpu(
    tensor: Any, src_rank: int, src_gpu_index: int, group_name: str = "default", n_elements: int = 0
) -> None:
    """`recv` from the only GPU of a rank, number 0; with `n_elements`, into that many elements from the start."""
    checks.single_tensor(tensor)
    group = get_group_handle(group_name)
    checks.other_rank_of(group, src_rank)
    checks.element_count(n_elements)
    options: Any = types.RecvOptions()
    options.src_rank, options.src_gpu_index, options.n_elements = src_rank, src_gpu_index, n_elements
    group.recv([tensor], options)


def _op_for(group: groups.Group, op: types.AnyReduceOp) -> types.AnyReduceOp:
    """A backend of the user's was written for Ray's ops."""
    return op if isinstance(group, PCCLGroup) else types.as_rays_op(op)
