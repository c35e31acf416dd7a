"""Torch's collectives, each made of calls of a `Communicator`. All of it blocks; `process_group` says when it runs.

Tensors in host memory go to the data plane as they are. Lists of tensors become one tensor, and are copied back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ray_pccl.descriptors import ReduceInfo, ReduceOp
from ray_pccl.peer.communicator import Communicator
from ray_pccl.torch.backend_errors import MismatchBackendError, UsageBackendError
from ray_pccl.torch.reductions import Reduction, reduction

Tensor = torch.Tensor
_CARRIED = frozenset(
    {
        torch.bool,
        *(torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    }
)
_BITWISE = 0x6269740000000000
_SPLITS = 0x73706C6974730000
_SPARSE = 0x7370617200000000
"""Signatures: members whose calls are made of the same steps, but are not the same call, get a mismatch."""


class CollectiveCalls:
    """The collectives of one process group."""

    def __init__(self, communicator: Communicator, *, retry: bool) -> None:
        self._communicator = communicator
        self._retry = retry

    # ----------------------------------------------------------------------------------------------- reductions

    def all_reduce(self, tensor: Tensor, op: Any, timeout: float) -> None:
        """Combines all ranks' tensors into everyone's."""
        how = reduction(op, tensor.dtype)
        if tensor.is_sparse:
            self._all_reduce_sparse(tensor, how, timeout)
            return
        plain = _plain(tensor)
        if how.op is None:
            plain.copy_(how.fold(self._all_inputs(plain, how, timeout)))
        else:
            send = plain if how.factor is None else plain * _factor(how.factor, plain)
            self._communicator.all_reduce(send, plain, op=how.op, retry=self._retry, timeout=timeout)

    def average_into(self, output: Tensor, source: Tensor, timeout: float) -> None:
        """Averages all ranks' `source` over those who contributed, into everyone's `output`."""
        self._communicator.all_reduce(
            _plain(source), _plain(output), op=ReduceOp.AVG, retry=self._retry, timeout=timeout
        )

    def reduce(self, tensor: Tensor, op: Any, root: int, timeout: float) -> None:
        """Combines all ranks' tensors into the root's; the others' stay what they are."""
        how = reduction(op, tensor.dtype)
        plain = _plain(tensor)
        is_root = self._communicator.rank == root
        if how.op is None:
            folded = how.fold(self._all_inputs(plain, how, timeout))
            if is_root:
                plain.copy_(folded)
            return
        send = plain if how.factor is None else plain * _factor(how.factor, plain)
        self._communicator.reduce(
            send, plain if is_root else None, op=how.op, root=root, retry=self._retry, timeout=timeout
        )

    def reduce_scatter(self, output: Tensor, source: Tensor, op: Any, timeout: float) -> None:
        """Combines all ranks' `source`, and leaves each the part of its rank."""
        how = reduction(op, output.dtype)
        out, send = _plain(output), _plain(source)
        if how.factor is not None:
            send = send * _factor(how.factor, send)
        if how.op is not None:
            self._communicator.reduce_scatter(send, out, op=how.op, timeout=timeout)
            return
        parts = torch.empty_like(send, memory_format=torch.contiguous_format)
        self._run("ALL_TO_ALL", send, parts, _BITWISE | how.signature, timeout)
        out.copy_(how.fold(parts.view(-1, *out.shape)))

    def _all_reduce_sparse(self, tensor: Tensor, how: Reduction, timeout: float) -> None:
        """All ranks learn all ranks' entries, and add them up; how many each has is told first."""
        if how.op is not ReduceOp.SUM or how.factor is not None:
            raise UsageBackendError(f"of sparse tensors there is only the SUM, not {how.name}")
        mine = tensor.detach().coalesce()
        if mine.is_complex():
            raise UsageBackendError("complex sparse tensors can't be reduced: pass a dense one, as .to_dense() makes")
        shape = (mine.sparse_dim(), mine.dense_dim(), *mine.shape)
        signature = _SPARSE | (hash(shape) & 0xFFFFFFFF)
        counts = torch.empty(self._communicator.world_size, dtype=torch.int64)
        self._run("ALL_GATHER", torch.tensor([mine._nnz()]), counts, signature, timeout)
        most = int(counts.max())
        indices = self._padded(mine.indices().T, most, signature, timeout)
        values = self._padded(mine.values(), most, signature, timeout)
        rows = [slice(int(count)) for count in counts]
        whole = torch.sparse_coo_tensor(
            torch.cat([part[taken] for part, taken in zip(indices, rows, strict=True)]).T,
            torch.cat([part[taken] for part, taken in zip(values, rows, strict=True)]),
            mine.shape,
        )
        with torch.no_grad():  # a detached one would not be this one: a sparse tensor's entries are replaced
            tensor.copy_(whole.coalesce())

    def _padded(self, entries: Tensor, most: int, signature: int, timeout: float) -> Tensor:
        """All ranks' entries, each with room for `most`."""
        send = torch.zeros((most, *entries.shape[1:]), dtype=entries.dtype)
        send[: len(entries)] = entries
        parts = torch.empty((self._communicator.world_size, *send.shape), dtype=send.dtype)
        self._run("ALL_GATHER", send, parts, signature, timeout)
        return parts

    def _all_inputs(self, plain: Tensor, how: Reduction, timeout: float) -> Tensor:
        parts = torch.empty((self._communicator.world_size, *plain.shape), dtype=plain.dtype)
        self._run("ALL_GATHER", plain, parts, _BITWISE | how.signature, timeout)
        return parts

    # ------------------------------------------------------------------------------------------ moving, no more

    def broadcast(self, tensor: Tensor, root: int, timeout: float) -> None:
        """Brings the root's tensor to all."""
        self._communicator.broadcast(carried(tensor), root=root, retry=self._retry, timeout=timeout)

    def barrier(self, timeout: float) -> None:
        """Returns when all ranks are here."""
        self._communicator.barrier(retry=self._retry, timeout=timeout)

    def all_gather(self, output: Tensor, source: Tensor, timeout: float) -> None:
        """Brings all ranks' `source` to everyone's `output`, by rank."""
        self._communicator.all_gather(carried(source), carried(output), timeout=timeout)

    def all_gather_list(self, outputs: Sequence[Tensor], source: Tensor, timeout: float) -> None:
        """Brings all ranks' `source` to everyone, a tensor for each."""
        self._check_parts(outputs, source, "output")
        whole = _room(outputs)
        self._communicator.all_gather(carried(source), carried(whole), timeout=timeout)
        _spread(whole, outputs)

    def gather(self, outputs: Sequence[Tensor], source: Tensor, root: int, timeout: float) -> None:
        """Brings all ranks' `source` to the root, a tensor for each."""
        if self._communicator.rank != root:
            self._communicator.gather(carried(source), None, root=root, timeout=timeout)
            return
        self._check_parts(outputs, source, "output")
        whole = _room(outputs)
        self._communicator.gather(carried(source), carried(whole), root=root, timeout=timeout)
        _spread(whole, outputs)

    def scatter(self, output: Tensor, sources: Sequence[Tensor], root: int, timeout: float) -> None:
        """Brings the root's tensors to the ranks, one to each."""
        if self._communicator.rank != root:
            self._communicator.scatter(None, carried(output), root=root, timeout=timeout)
            return
        self._check_parts(sources, output, "input")
        self._communicator.scatter(carried(_joined(sources)), carried(output), root=root, timeout=timeout)

    def reduce_scatter_list(self, output: Tensor, sources: Sequence[Tensor], op: Any, timeout: float) -> None:
        """Combines all ranks' tensors, place by place, and leaves each rank the one of its place."""
        self._check_parts(sources, output, "input")
        self.reduce_scatter(output, _joined(sources), op, timeout)

    def all_to_all(self, output: Tensor, source: Tensor, timeout: float) -> None:
        """Exchanges equal parts."""
        self._communicator.all_to_all(carried(source), carried(output), timeout=timeout)

    def all_to_all_split(
        self, output: Tensor, source: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], timeout: float
    ) -> None:
        """Exchanges parts whose sizes along the first dimension each rank says."""
        size = self._communicator.world_size
        output_splits = output_splits or _even(output, size, "output")
        input_splits = input_splits or _even(source, size, "input")
        for tensor, splits, what in ((output, output_splits, "output"), (source, input_splits, "input")):
            if len(splits) != size or sum(splits) != tensor.shape[0]:
                raise UsageBackendError(
                    f"the {what} splits {list(splits)} are not {size} numbers that add up to {tensor.shape[0]}, "
                    f"the {what}'s first dimension"
                )
        self.all_to_all_list(
            list(torch.split(output, list(output_splits))), list(torch.split(source, list(input_splits))), timeout
        )

    def all_to_all_list(self, outputs: Sequence[Tensor], sources: Sequence[Tensor], timeout: float) -> None:
        """Exchanges tensors of any sizes: all ranks learn all sizes first, so that a misfit is an error on all."""
        communicator = self._communicator
        size = communicator.world_size
        if len(outputs) != size or len(sources) != size:
            raise UsageBackendError(f"all_to_all of {size} ranks has {len(sources)} inputs and {len(outputs)} outputs")
        given, wanted = [carried(tensor) for tensor in sources], [carried(tensor) for tensor in outputs]
        mine = torch.tensor([[tensor.numel() for tensor in tensors] for tensors in (given, wanted)])
        sizes = torch.empty((size, 2, size), dtype=torch.int64)
        self._run("ALL_GATHER", mine, sizes, _SPLITS, timeout)
        _check_sizes(sizes, communicator.members)
        most = int(sizes.max())
        send = torch.empty((size, most), dtype=given[0].dtype)
        recv = torch.empty_like(send)
        for row, tensor in zip(send, given, strict=True):
            row[: tensor.numel()] = tensor.reshape(-1)
        self._run("ALL_TO_ALL", send, recv, _SPLITS, timeout)
        for row, tensor in zip(recv, wanted, strict=True):
            tensor.copy_(row[: tensor.numel()].view(tensor.shape))

    def _check_parts(self, parts: Sequence[Tensor], one: Tensor, what: str) -> None:
        size = self._communicator.world_size
        if len(parts) != size:
            raise UsageBackendError(f"a list of {size} {what} tensors is due, one for each rank, not of {len(parts)}")
        for part in parts:
            if part.numel() != one.numel() or part.dtype != one.dtype:
                raise UsageBackendError(
                    f"{what} tensors of {one.numel()} elements of {one.dtype} are due, and one has {part.numel()} of "
                    f"{part.dtype}: all ranks' tensors have one size here"
                )

    def _run(self, kind: str, send: Tensor, recv: Tensor, signature: int, timeout: float) -> ReduceInfo:
        operations = self._communicator._operations()
        return operations.run(operations.request(kind, send, recv, tag=0, signature=signature), timeout)


def _check_sizes(sizes: Tensor, members: Sequence[str]) -> None:
    sent, awaited = sizes[:, 0, :], sizes[:, 1, :]
    wrong = (sent != awaited.T).nonzero()
    if len(wrong):
        sender, receiver = (int(rank) for rank in wrong[0])
        sends, awaits = int(sent[sender, receiver]), int(awaited[receiver, sender])
        calls = {members[sender]: f"sends {sends} elements", members[receiver]: f"awaits {awaits} elements"}
        raise MismatchBackendError(
            f"all_to_all: rank {sender} ({members[sender]}) sends {sends} elements to rank {receiver} "
            f"({members[receiver]}), which has room for {awaits}",
            calls=calls,
        )


def _plain(tensor: Tensor) -> Tensor:
    """The tensor as numbers that can be combined: complex ones are pairs."""
    plain = tensor.detach()
    return torch.view_as_real(plain) if plain.is_complex() else plain


def carried(tensor: Tensor) -> Tensor:
    """The tensor as something that can be moved, whatever its elements are."""
    plain = _plain(tensor)
    return plain if plain.dtype in _CARRIED else plain.view(torch.uint8)


def _factor(factor: Any, tensor: Tensor) -> Any:
    return factor.to(tensor.dtype) if isinstance(factor, Tensor) else factor


def _room(parts: Sequence[Tensor]) -> Tensor:
    """One tensor with room for all parts."""
    return torch.empty((len(parts), parts[0].numel()), dtype=parts[0].dtype)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.detach().reshape(-1) for part in parts])


def _spread(whole: Tensor, parts: Sequence[Tensor]) -> None:
    for row, part in zip(whole, parts, strict=True):
        part.detach().copy_(row.view(part.shape))


def _even(tensor: Tensor, size: int, what: str) -> list[int]:
    if tensor.shape[0] % size:
        raise UsageBackendError(
            f"the {what}'s first dimension is {tensor.shape[0]}, which {size} ranks can't share evenly: give its splits"
        )
    return [tensor.shape[0] // size] * size
