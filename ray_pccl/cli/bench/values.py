"""What each peer puts into a benchmark's all-reduce, and what must come out: known in closed form."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np

from ray_pccl.descriptors import ReduceOp

Values = np.ndarray[Any, np.dtype[np.float64]]
PERIOD = 4
"""Inputs repeat after so many elements, and so does the result."""
_FACTORS = 8
"""Only so many peers put factors other than 1 into a product, so that it stays small."""


class ElementType(Enum):
    """The element types that a benchmark offers."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT32 = "int32"
    INT64 = "int64"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 2 if self in (ElementType.FLOAT16, ElementType.BFLOAT16) else int(self.value[-2:]) // 8

    @property
    def tolerance(self) -> float:
        """How far a result may be off, relatively: what rounding the inputs' sum to this type can do."""
        return {ElementType.FLOAT16: 2e-3, ElementType.BFLOAT16: 2e-2}.get(self, 0.0 if self.value[0] == "i" else 1e-6)


def pattern(rank: int, op: ReduceOp) -> Values:
    """The first elements of a peer's input; the others repeat them."""
    places = (np.arange(PERIOD) + rank) % PERIOD
    if op is ReduceOp.PROD:
        return np.where((places == 0) & (rank < _FACTORS), 2.0, 1.0)
    return np.asarray(places + 1, np.float64)


def expected(world_size: int, op: ReduceOp) -> Values:
    """The first elements of the result."""
    inputs = np.stack([pattern(rank, op) for rank in range(world_size)])
    combine: dict[ReduceOp, Callable[..., Any]] = {
        ReduceOp.SUM: inputs.sum,
        ReduceOp.AVG: inputs.mean,
        ReduceOp.PROD: inputs.prod,
        ReduceOp.MAX: inputs.max,
        ReduceOp.MIN: inputs.min,
    }
    return np.asarray(combine[op](axis=0), np.float64)


def tensor(element_type: ElementType, nbytes: int, first: Values | None = None) -> Any:
    """A tensor of this many bytes that begins with these elements and repeats them; zeros without them."""
    count = nbytes // element_type.itemsize
    values = np.zeros(PERIOD) if first is None else first
    if element_type is ElementType.BFLOAT16:  # numpy has none
        import torch

        repeats = -(-count // PERIOD)
        return torch.tensor(values).to(torch.bfloat16).repeat(repeats)[:count].clone()
    return np.resize(values.astype(element_type.value), count)


def is_right(result: Any, wanted: Values, element_type: ElementType) -> bool:
    """Whether every element is what it must be."""
    if element_type is ElementType.BFLOAT16:
        result = result.float().numpy()
    whole = len(result) // PERIOD * PERIOD
    rows, rest = result[:whole].reshape(-1, PERIOD), result[whole:]
    bound = element_type.tolerance * np.abs(wanted)
    return bool(
        (np.abs(rows - wanted) <= bound).all() and (np.abs(rest - wanted[: len(rest)]) <= bound[: len(rest)]).all()
    )
