"""Torch's reductions in terms of ours."""

from __future__ import annotations

import functools
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
_FOLDS: dict[Any, Callable[..., torch.Tensor]] = {
    _Kind.BAND: torch.bitwise_and,
    _Kind.BOR: torch.bitwise_or,
    _Kind.BXOR: torch.bitwise_xor,
}


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
    """Tells the folds from one another."""
    folding: Callable[..., torch.Tensor] | None = None

    def fold(self, parts: torch.Tensor) -> torch.Tensor:
        """The combination of the rows."""
        assert self.folding is not None
        return functools.reduce(self.folding, parts.unbind(0))


def reduction(op: Any, dtype: torch.dtype) -> Reduction:
    """How torch's `op` combines tensors of this type; `UsageBackendError` if it does not."""
    kind = op.op if hasattr(op, "op") else op
    if kind == _Kind.PREMUL_SUM:
        return Reduction(kind.name, ReduceOp.SUM, op.factor)
    return _reduction(kind, dtype)


@functools.cache
def _reduction(kind: Any, dtype: torch.dtype) -> Reduction:
    if dtype.is_complex and kind not in (_Kind.SUM, _Kind.AVG):
        raise UsageBackendError(f"{kind.name} of complex numbers is not there: SUM and AVG are")
    op = (_OF_BOOLS if dtype is torch.bool else _NATIVE).get(kind)
    if op is not None:
        return Reduction(kind.name, op)
    if kind not in _FOLDS:
        raise UsageBackendError(f"ReduceOp.{kind.name} of {dtype} is not there")
    if dtype.is_floating_point:
        raise UsageBackendError(f"Cannot use ReduceOp.{kind.name} with {dtype}: it is for whole numbers")
    return Reduction(kind.name, None, None, int(kind), _FOLDS[kind])
