"""Torch's collectives, each made of calls of a `Communicator`. All of it blocks; `process_group` says when it runs.

Tensors in host memory go to the data plane as they are. Lists of tensors become one tensor, and are copied back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from ray_pccl.control.messages import Failure
from ray_pccl.descriptors import ReduceInfo, ReduceOp
from ray_pccl.errors import PCCLError
from ray_pccl.peer.communicator import Communicator
from ray_pccl.ring.tensors import as_output
from ray_pccl.torch.backend_errors import MismatchBackendError, UsageBackendError, WorldChangedBackendError
from ray_pccl.torch.reductions import CARRIED, Reduction, reduction, signature_of

Tensor = torch.Tensor
_SPLITS = 0x73706C6974730000
_SPARSE = 0x7370617200000000
"""Signatures: members whose calls are made of the same steps, but are not the same call, get a mismatch."""
_WORLD_AT = 16
"""Where in a signature is for how many ranks a rank has made its tensors."""


class CollectiveCalls:
    """The collectives of one process group. Roots are peers, whatever their ranks are by the time of the call."""

    def __init__(self, communicator: Communicator, *, retry: bool) -> None:
        self._communicator = communicator
        self._retry = retry
        self.begun = False
        """Whether the others can know of the present call: what fails before that, `fail` has to tell them."""

    def fail(self, error: Exception, timeout: float) -> None:
        """This rank can't take part in the call that the others are in, or come to: they get an error, too."""
        communicator = self._communicator
        with contextlib.suppress(PCCLError):  # that is the error itself, or there is nobody to tell
            text = f"peer {communicator.peer_id} could not take part: {type(error).__name__}: {error}"
            operations = communicator._operations()
            refusal = Failure("UsageError", text)
            operations.run(operations.request("BARRIER", None, None, tag=0, refusal=refusal), timeout)

    def _run(
        self, kind: str, send: Tensor | None, recv: Tensor | None, timeout: float, signature: int = 0, **given: Any
    ) -> ReduceInfo:
        operations = self._communicator._operations()
        request = operations.request(kind, send, recv, tag=0, signature=signature, **given)
        self.begun = True
        return operations.run(request, timeout)

    # ----------------------------------------------------------------------------------------------- reductions

    def all_reduce(self, tensor: Tensor, op: Any, timeout: float) -> None:
        """Combines all ranks' tensors into everyone's."""
        self.begun = False
        how = reduction(op, tensor.dtype)
        if tensor.is_sparse:
            self._all_reduce_sparse(tensor, how, timeout)
            return
        plain = _plain(tensor)
        if how.op is None:
            plain.copy_(how.fold(self._all_inputs(plain, how, timeout)))
        else:
            send = plain if how.factor is None else plain * _factor(how.factor, plain)
            self._all_reduce(send, plain, how.op, how.signature, timeout)

    def average_into(self, output: Tensor, source: Tensor, timeout: float) -> None:
        """Averages all ranks' `source` over those who contributed, into everyone's `output`."""
        self.begun = False
        self._all_reduce(_plain(source), _plain(output), ReduceOp.AVG, signature_of(source.dtype), timeout)

    def _all_reduce(self, send: Tensor, recv: Tensor, op: ReduceOp, signature: int, timeout: float) -> None:
        operations = self._communicator._operations()
        request = operations.all_reduce(send, recv, op, 0, None, None, retry=self._retry, signature=signature)
        self.begun = True
        operations.run(request, timeout)

    def reduce(self, tensor: Tensor, op: Any, root: str, timeout: float) -> None:
        """Combines all ranks' tensors into the root's; the others' stay what they are."""
        self.begun = False
        _check_root(root)
        how = reduction(op, tensor.dtype)
        plain = _plain(tensor)
        is_root = self._communicator.peer_id == root
        if how.op is None:
            folded = how.fold(self._all_inputs(plain, how, timeout))
            if is_root:
                plain.copy_(folded)
            return
        send = plain if how.factor is None else plain * _factor(how.factor, plain)
        recv = plain if is_root else None
        self._run("REDUCE", send, recv, timeout, how.signature, op=how.op, root_label=root, retry=self._retry)

    def reduce_scatter(self, output: Tensor, source: Tensor, op: Any, timeout: float) -> None:
        """Combines all ranks' `source`, and leaves each the part of its rank."""
        self.begun = False
        how = reduction(op, output.dtype)
        _check_types(output, source)
        out, send = _plain(output), _plain(source)
        if how.factor is not None:
            send = send * _factor(how.factor, send)
        if how.op is not None:
            self._run("REDUCE_SCATTER", send, out, timeout, how.signature, op=how.op)
            return
        size = self._communicator.world_size
        if send.numel() != size * out.numel():
            raise UsageBackendError(
                f"reduce_scatter of {size} ranks needs an input of {size * out.numel()} elements for an output of "
                f"{out.numel()}, not of {send.numel()}"
            )
        parts = torch.empty_like(send, memory_format=torch.contiguous_format)
        self._exchange(send, parts, size, how.signature, timeout)
        out.copy_(how.fold(parts.view(-1, *out.shape)))

    def _exchange(self, send: Tensor, recv: Tensor, size: int, signature: int, timeout: float) -> None:
        """An all-to-all of as many parts as the caller has made; an error on all if there are not as many ranks."""
        found = self._run("ALL_TO_ALL", send, recv, timeout, signature | size << _WORLD_AT).world_size
        if found != size:
            raise WorldChangedBackendError(f"the tensors were made for {size} ranks, and there are {found}")

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
        self._run("ALL_GATHER", torch.tensor([mine._nnz()]), counts, timeout, signature)
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
        self._run("ALL_GATHER", send, parts, timeout, signature)
        return parts

    def _all_inputs(self, plain: Tensor, how: Reduction, timeout: float) -> Tensor:
        parts = torch.empty((self._communicator.world_size, *plain.shape), dtype=plain.dtype)
        self._run("ALL_GATHER", plain, parts, timeout, how.signature)
        return parts

    # ------------------------------------------------------------------------------------------ moving, no more

    def broadcast(self, tensor: Tensor, root: str, timeout: float) -> None:
        """Brings the root's tensor to all."""
        self.begun = False
        _check_root(root)
        plain = carried(tensor)
        if self._communicator.peer_id != root:
            as_output(plain, "tensor")  # what can't be written to is an error before anyone is met
        signature = signature_of(tensor.dtype)
        self._run("BROADCAST", plain, None, timeout, signature, output=plain, root_label=root, retry=self._retry)

    def barrier(self, timeout: float) -> None:
        """Returns when all ranks are here."""
        self.begun = False
        self._run("BARRIER", None, None, timeout, retry=self._retry)

    def all_gather(self, output: Tensor, source: Tensor, timeout: float) -> None:
        """Brings all ranks' `source` to everyone's `output`, by rank."""
        self.begun = False
        _check_types(output, source)
        self._run("ALL_GATHER", carried(source), carried(output), timeout, signature_of(source.dtype))

    def all_gather_list(self, outputs: Sequence[Tensor], source: Tensor, timeout: float) -> None:
        """Brings all ranks' `source` to everyone, a tensor for each."""
        self.begun = False
        self._check_parts(outputs, source, "output")
        whole = _room(outputs)
        self.all_gather(whole, source, timeout)
        _spread(whole, outputs)

    def gather(self, outputs: Sequence[Tensor], source: Tensor, root: str, timeout: float) -> None:
        """Brings all ranks' `source` to the root, a tensor for each."""
        self.begun = False
        _check_root(root)
        given, signature = carried(source), signature_of(source.dtype)
        if self._communicator.peer_id != root:
            self._run("GATHER", given, None, timeout, signature, root_label=root)
            return
        self._check_parts(outputs, source, "output")
        whole = _room(outputs)
        self._run("GATHER", given, carried(whole), timeout, signature, root_label=root)
        _spread(whole, outputs)

    def scatter(self, output: Tensor, sources: Sequence[Tensor], root: str, timeout: float) -> None:
        """Brings the root's tensors to the ranks, one to each."""
        self.begun = False
        _check_root(root)
        send = None
        if self._communicator.peer_id == root:
            self._check_parts(sources, output, "input")
            send = carried(_joined(sources))
        self._run("SCATTER", send, carried(output), timeout, signature_of(output.dtype), root_label=root)

    def reduce_scatter_list(self, output: Tensor, sources: Sequence[Tensor], op: Any, timeout: float) -> None:
        """Combines all ranks' tensors, place by place, and leaves each rank the one of its place."""
        self.begun = False
        self._check_parts(sources, output, "input")
        self.reduce_scatter(output, _joined(sources), op, timeout)

    def all_to_all(self, output: Tensor, source: Tensor, timeout: float) -> None:
        """Exchanges equal parts."""
        self.begun = False
        _check_types(output, source)
        self._run("ALL_TO_ALL", carried(source), carried(output), timeout, signature_of(source.dtype))

    def all_to_all_split(
        self, output: Tensor, source: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], timeout: float
    ) -> None:
        """Exchanges parts whose sizes along the first dimension each rank says."""
        self.begun = False
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
        self.begun = False
        communicator = self._communicator
        size = communicator.world_size
        if len(outputs) != size or len(sources) != size:
            raise UsageBackendError(f"all_to_all of {size} ranks has {len(sources)} inputs and {len(outputs)} outputs")
        dtype = sources[0].dtype
        for tensor in (*sources, *outputs):
            _check_types(tensor, sources[0])
        given, wanted = [carried(tensor) for tensor in sources], [carried(tensor) for tensor in outputs]
        signature = _SPLITS ^ signature_of(dtype)
        mine = torch.tensor([[tensor.numel() for tensor in tensors] for tensors in (given, wanted)])
        sizes = torch.empty((size, 2, size), dtype=torch.int64)
        self._run("ALL_GATHER", mine, sizes, timeout, signature)
        _check_sizes(sizes, communicator.members)
        most = int(sizes.max())
        send = torch.empty((size, most), dtype=given[0].dtype)
        recv = torch.empty_like(send)
        for row, tensor in zip(send, given, strict=True):
            row[: tensor.numel()] = tensor.reshape(-1)
        self._exchange(send, recv, size, signature, timeout)
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


def _check_root(root: str) -> None:
    if not root:
        raise UsageBackendError("the root is no rank of the group")


def _check_types(output: Tensor, source: Tensor) -> None:
    if output.dtype != source.dtype:
        raise UsageBackendError(f"the output is of {output.dtype}, but the input of {source.dtype}")


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
    return plain if plain.dtype in CARRIED else plain.view(torch.uint8)


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
