"""One call of the user, made into a task for the epoch in which it is tried."""

from __future__ import annotations

from typing import Any

import numpy as np

from ray_pccl.control.messages import Failure
from ray_pccl.descriptors import (
    DataType,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceOp,
    ReduceOperandDescriptor,
)
from ray_pccl.errors import UsageError
from ray_pccl.ring.header import NO_ROOT, Header, Kind
from ray_pccl.ring.kernels import check_reducible
from ray_pccl.ring.quantization import quantizer
from ray_pccl.ring.segment import TAG_MASK
from ray_pccl.ring.task import Array, Epoch, Recipe, RefusedError, Task
from ray_pccl.ring.tensors import Operand, as_output, overlaps

_TIMES_RECV = (Kind.ALL_GATHER, Kind.GATHER)
_TIMES_SEND = (Kind.REDUCE_SCATTER, Kind.SCATTER)
_NEEDS_SEND = (Kind.REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL, Kind.GATHER)
_NEEDS_RECV = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL, Kind.SCATTER)
_REDUCING = (Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER)
_ROOTED = (Kind.REDUCE, Kind.BROADCAST, Kind.GATHER, Kind.SCATTER)
_PLAIN = QuantizationOptions()
FIRST_RESERVED_TAG = TAG_MASK - 16
SHARED_STATE_TAG = FIRST_RESERVED_TAG
_KEPT_RECIPES = 1024
_recipes: dict[tuple[Any, ...], tuple[Recipe, QuantizationOptions]] = {}
"""Those of the last calls: most programs make the same ones again and again."""


class Request:
    """What the user asked for. It outlives epochs: the root is a peer, resolved once (R9).

    With a `refusal` it fails on every member, for this peer has nothing to take part with. With a `root_label` the root
    is the member whose id begins with it; if there is none any more, everyone gets `PeerLostError`. Only the
    library's own requests have a `reserved` tag.
    """

    def __init__(
        self,
        kind: Kind,
        send: Operand | None,
        recv: Operand | None,
        *,
        tag: int,
        op: ReduceOp = ReduceOp.SUM,
        root: int = NO_ROOT,
        root_label: str = "",
        retry: bool = False,
        quantization: QuantizationOptions | None = None,
        operand: ReduceOperandDescriptor | None = None,
        output: Any = None,
        signature: int = 0,
        refusal: Failure | None = None,
        floor: int = 0,
        reserved: bool = False,
    ) -> None:
        self.kind = kind
        self.send = send
        self.recv = recv
        self.tag = tag if reserved else check_tag(tag)
        self.retry = retry and not kind.follows_world
        self._op = op
        self._root = root
        self._root_label = root_label
        self._signature = signature
        self._refusal = refusal
        self.floor = floor
        self.root_id = ""
        self._given = send
        self._output = output
        """The tensor that becomes the output where the root, once it is known, calls for one."""
        self._options = _PLAIN if quantization is None else quantization
        known = send if send is not None else recv
        self._datatype = known.datatype if known is not None else None
        self._result: Array | None = None
        self.began = 0.0
        """When it was called, by the monotonic clock."""
        self._check(operand)

    @property
    def nbytes(self) -> int:
        """The size of its output, or of its input where this peer gets none."""
        operand = self.recv if self.recv is not None else self.send
        return 0 if operand is None else operand.count * operand.datatype.itemsize

    def describe(self) -> str:
        """In words, such as ``all_reduce SUM of 1048576 FLOAT``."""
        operand = self.send if self.send is not None else self.recv
        op = f" {self._op.name}" if self.kind in _REDUCING else ""
        return self.kind.call + ("" if operand is None else f"{op} of {operand.count} {operand.datatype.name}")

    def _check(self, operand: ReduceOperandDescriptor | None) -> None:
        send, recv, datatype = self.send, self.recv, self._datatype
        name = self.kind.name.lower()
        if send is None and self.kind in _NEEDS_SEND:
            raise UsageError(f"{name}() needs a tensor to send, on every peer")
        if recv is None and self.kind in _NEEDS_RECV:
            raise UsageError(f"{name}() needs a tensor to receive into, on every peer")
        root = self._root
        is_rank = isinstance(root, int) and not isinstance(root, bool) and root >= 0
        if self.kind in _ROOTED and not is_rank and not self._root_label:
            raise UsageError(f"root is a rank from 0, not {root!r}")
        if datatype is None:
            if self.kind is not Kind.BARRIER:
                raise UsageError(f"{name}() needs a tensor")
            return
        if self.kind in _REDUCING:
            if not isinstance(self._op, ReduceOp):
                raise UsageError(f"op is a ReduceOp, such as ReduceOp.SUM, not {self._op!r}")
            check_reducible(self._op, datatype)
            if self._options.algorithm is not QuantizationAlgorithm.NONE:
                if self.kind is Kind.REDUCE_SCATTER:
                    raise UsageError("reduce_scatter does not quantise: use all_reduce")
                quantizer(self._options, datatype)
        if operand is not None and operand.datatype is not datatype:
            raise UsageError(f"the operand_descriptor says {operand.datatype.name}, but the tensor is {datatype.name}")
        if send is not None and recv is not None:
            if send.datatype is not recv.datatype:
                raise UsageError(f"send is {send.datatype.name}, but recv is {recv.datatype.name}")
            if self.kind in (Kind.ALL_REDUCE, Kind.REDUCE, Kind.ALL_TO_ALL) and send.count != recv.count:
                raise UsageError(f"send has {send.count} elements, but recv has {recv.count}")

    def settle_root(self, epoch: Epoch) -> None:
        """Finds out which peer the root is."""
        rank, label = self._root, self._root_label
        if label:
            rank = next((place for place, peer in enumerate(epoch.members) if peer.startswith(label)), NO_ROOT)
            if rank == NO_ROOT:
                gone = f"the root {label} is no member any more"
                self._refusal = Failure("PeerLostError", gone, {"peers": [label], "reason": gone})
        if rank == NO_ROOT:
            return
        if rank >= epoch.size:
            raise UsageError(f"root is a rank from 0 to {epoch.size - 1}, not {self._root!r}")
        self.root_id = epoch.members[rank]
        is_root = rank == epoch.rank
        if self.kind is Kind.BROADCAST:
            self.send = self._given if is_root else None
            self.recv = None if is_root else as_output(self._output)
        elif self.kind is Kind.REDUCE and is_root and self.recv is None:
            self.recv = as_output(self._output)

    def task(self, epoch: Epoch) -> Task:
        """The task in this epoch. `RefusedError` for tensors that do not fit the world: everyone is told."""
        if self._refusal is not None:
            raise RefusedError(self._refusal)
        root = epoch.members.index(self.root_id) if self.root_id else NO_ROOT
        is_root = root == epoch.rank
        count = self._count(epoch, is_root=is_root)
        recipe = self._recipe(count, root)
        sends = self.kind is not Kind.BROADCAST or is_root
        keeps = self.kind not in (Kind.REDUCE, Kind.GATHER) or is_root
        keeps = keeps and not (self.kind is Kind.BROADCAST and is_root)
        send = self.send.array if self.send is not None and sends else None
        return Task(recipe, send, self._out() if keeps else None)

    def _recipe(self, count: int, root: int) -> Recipe:
        datatype, options = self._datatype, self._options
        key = (self.kind, count, id(datatype), id(self._op), id(options), self.retry, root, self._signature)
        known = _recipes.get(key)
        if known is not None:
            return known[0]
        none = options.algorithm is QuantizationAlgorithm.NONE
        header = Header(
            self.kind,
            count,
            DataType.UINT8 if datatype is None else datatype,
            op=self._op,
            algorithm=options.algorithm,
            quantized=DataType.UINT8 if none else options.quantized_datatype,
            retry=self.retry,
            root=root,
            signature=self._signature,
        )
        recipe = Recipe(header)
        if len(_recipes) >= _KEPT_RECIPES:
            _recipes.clear()
        _recipes[key] = (recipe, options)  # which keeps its id from being given to another
        return recipe

    def _count(self, epoch: Epoch, *, is_root: bool) -> int:
        send, recv, kind, size = self.send, self.recv, self.kind, epoch.size
        if kind is Kind.BARRIER:
            return 0
        if kind in _TIMES_RECV and (is_root or kind is Kind.ALL_GATHER):
            if send is not None and (recv is None or recv.count != size * send.count):
                raise self._unfit(epoch, "recv", recv, size * send.count)
        elif kind in _TIMES_SEND and (is_root or kind is Kind.REDUCE_SCATTER):
            if recv is not None and (send is None or send.count != size * recv.count):
                raise self._unfit(epoch, "send", send, size * recv.count)
        elif kind is Kind.ALL_TO_ALL:
            assert send is not None
            if send.count % size:
                raise self._unfit(epoch, "send", send, -(-send.count // size) * size)
            return send.count // size
        elif kind is Kind.REDUCE and is_root and recv is None:
            raise self._unfit(epoch, "recv", None, send.count if send is not None else 0)
        if kind in _TIMES_SEND:
            assert recv is not None
            return recv.count
        known = send if send is not None else recv
        assert known is not None
        return known.count

    def _unfit(self, epoch: Epoch, what: str, operand: Operand | None, due: int) -> RefusedError:
        has = "none" if operand is None else f"{operand.count} elements"
        text = (
            f"{self.kind.name.lower()} of {epoch.size} peers needs {what} of {due} elements on peer "
            f"{epoch.members[epoch.rank]} (rank {epoch.rank}), which has {has}"
        )
        return RefusedError(Failure("WorldChangedError", text))

    def _out(self) -> Array | None:
        recv = self.recv
        if recv is None:
            return None
        if self.send is None or recv.staged or self.kind is Kind.BROADCAST or not overlaps(self.send, recv):
            return recv.array
        if self._result is None:
            self._result = np.empty_like(recv.array)
        return self._result

    def finish(self, *, keeps: bool) -> None:
        """The operation has committed: brings the result to the user's tensor."""
        if self.recv is not None and keeps:
            if self._result is not None:
                np.copyto(self.recv.array, self._result)
            self.recv.store()

    def alone(self) -> None:
        """The result in a world of one."""
        send, recv = self.send, self.recv
        if send is not None and recv is not None and self.kind is not Kind.BROADCAST:
            np.copyto(recv.array, send.array)
            recv.store()


def check_tag(tag: int) -> int:
    """A tag is a number that fits the board, below those that the library keeps for itself."""
    if isinstance(tag, bool) or not isinstance(tag, int) or not 0 <= tag < FIRST_RESERVED_TAG:
        raise UsageError(f"a tag is a whole number from 0 to {FIRST_RESERVED_TAG - 1}, not {tag!r}")
    return tag
