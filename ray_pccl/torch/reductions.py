"""Torch's reductions in terms of ours."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ray_pccl.descriptors import ReduceOp
from ray_pccl.torch.backend_errors import UsageBackendError

_Kind: Any = dist.ReduceOp.RedOpType
_NATIVE = {
    _Kind.SUM: ReduceOp.SUM,
    _Kind.AVG: ReduceOp.AVG,
    _Kind.PRODUCT: ReduceOp.PROD,
    _Kind.MIN: ReduceOp.MIN,
    _Kind.MAX: ReduceOp.MAX,
}
_OF_BOOLS = {
    _Kind.SUM: ReduceOp.MAX,
    _Kind.MAX: ReduceOp.MAX,
    _Kind.BOR: ReduceOp.MAX,
    _Kind.PRODUCT: ReduceOp.MIN,
    _Kind.MIN: ReduceOp.MIN,
    _Kind.BAND: ReduceOp.MIN,
}
"""What torch makes of truth values: a sum is whether any is true, a product whether all are."""
_BITWISE = 0x6269740000000000
_PREMULTIPLIED = 0x7072656D00000000
_TYPE = 0x7479706500000000
CARRIED = frozenset(
    {
        torch.bool,
        *(torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    }
)
"""The types that the data plane knows. Others travel as something else: complex numbers as pairs, the rest as bytes."""
_FOLDS: dict[Any, Callable[..., torch.Tensor]] = {
    _Kind.BAND: torch.bitwise_and,
    _Kind.BOR: torch.bitwise_or,
    _Kind.BXOR: torch.bitwise_xor,
}


@functools.cache
def signature_of(dtype: torch.dtype) -> int:
    """What tells a type that travels as another from that one: 0 for one that travels as it is."""
    return 0 if dtype in CARRIED else _TYPE | zlib.crc32(str(dtype).encode())


@dataclass(frozen=True, slots=True)
class Reduction:
    """How the tensors of one call are combined.

    What the data plane has no operation for, the bitwise ones, is made of an all-gather: all have all inputs then,
    and `fold` combines them, in rank order.
    """

    name: str
    op: ReduceOp | None
    """Ours; None if there is none."""
    factor: Any = None
    """What each input is multiplied with before it is summed."""
    signature: int = 0
    """Tells it from what the data plane would take for the same call."""
    folding: Callable[..., torch.Tensor] | None = None

    def fold(self, parts: torch.Tensor) -> torch.Tensor:
        """The combination of the rows."""
        assert self.folding is not None
        return functools.reduce(self.folding, parts.unbind(0))


def reduction(op: Any, dtype: torch.dtype) -> Reduction:
    """How torch's `op` combines tensors of this type; `UsageBackendError` if it does not."""
    kind = op.op if hasattr(op, "op") else op
    if kind == _Kind.PREMUL_SUM:
        return Reduction(kind.name, ReduceOp.SUM, op.factor, _PREMULTIPLIED ^ signature_of(dtype))
    return _reduction(kind, dtype)


@functools.cache
def _reduction(kind: Any, dtype: torch.dtype) -> Reduction:
    if dtype.is_complex and kind not in (_Kind.SUM, _Kind.AVG):
        raise UsageBackendError(f"{kind.name} of complex numbers is not there: SUM and AVG are")
    op = (_OF_BOOLS if dtype is torch.bool else _NATIVE).get(kind)
    if op is not None:
        return Reduction(kind.name, op, None, signature_of(dtype))
    if kind not in _FOLDS:
        raise UsageBackendError(f"ReduceOp.{kind.name} of {dtype} is not there")
    if dtype.is_floating_point:
        raise UsageBackendError(f"Cannot use ReduceOp.{kind.name} with {dtype}: it is for whole numbers")
    return Reduction(kind.name, None, None, _BITWISE | int(kind), _FOLDS[kind])
