"""PCCL's vocabulary of reductions: what to reduce, how, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ray_pccl.errors import UsageError


class ReduceOp(Enum):
    """How contributions are combined."""

    SUM = 0
    """Their sum."""
    AVG = 1
    """The sum divided by the number of contributors; not for integers."""
    PROD = 2
    """Their product."""
    MAX = 3
    """The largest; NaN if any is."""
    MIN = 4
    """The smallest; NaN if any is."""


class DataType(Enum):
    """The type of a tensor's elements."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    UINT64 = 6
    INT64 = 7
    FLOAT16 = 8
    BFLOAT16 = 9
    FLOAT = 10
    DOUBLE = 11
    BOOL = 12
    """Only for MAX and MIN, and for collectives that reduce nothing."""

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZES[self.value]

    @property
    def is_floating(self) -> bool:
        """Whether it has fractions."""
        return self in (DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT, DataType.DOUBLE)


_ITEMSIZES = (1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8, 1)


class DistributionHint(Enum):
    """How the values are distributed, as far as the caller knows. Kept for PCCL's users; nothing depends on it."""

    NONE = 0
    NORMAL = 1
    UNIFORM = 2


class QuantizationAlgorithm(Enum):
    """How values are made smaller on their way."""

    NONE = 0
    """They travel as they are."""
    MIN_MAX = 1
    """Each block's smallest value and step, in the precision of the computation."""
    ZERO_POINT_SCALE = 2
    """Each block's scale and an integer zero point, so that zero stays exactly zero."""


@dataclass(frozen=True, slots=True)
class QuantizationOptions:
    """What travels instead of the values themselves."""

    quantized_datatype: DataType = DataType.FLOAT
    """The type of a code: UINT8, INT8, UINT16 or INT16. Without an algorithm it means nothing."""
    algorithm: QuantizationAlgorithm = QuantizationAlgorithm.NONE
    """What a code stands for."""


@dataclass(frozen=True, slots=True)
class ReduceOperandDescriptor:
    """What the caller knows of the values."""

    datatype: DataType
    """Must be the tensor's own."""
    distribution_hint: DistributionHint = DistributionHint.NONE
    """Nothing depends on it."""


@dataclass(frozen=True, slots=True)
class ReduceDescriptor:
    """One reduction of `count` elements."""

    count: int
    """Elements of the tensor."""
    op: ReduceOp
    """How to combine them."""
    tag: int
    """Pairs it with the others' reduction."""
    operand_descriptor: ReduceOperandDescriptor
    """What the elements are."""
    quantization_options: QuantizationOptions = field(default_factory=QuantizationOptions)
    """What travels instead of them."""


@dataclass(frozen=True, slots=True)
class ReduceOpDescriptor:
    """A reduction and the tensors it works on, for `Communicator.all_reduce_multiple_with_retry`."""

    send: Any
    """The input."""
    recv: Any
    """The output; the same tensor reduces in place."""
    reduce_descriptor: ReduceDescriptor
    """What to do."""

    @classmethod
    def from_torch(cls, send: Any, recv: Any, reduce_descriptor: ReduceDescriptor) -> ReduceOpDescriptor:
        """From torch tensors."""
        return cls._checked(send, recv, reduce_descriptor, "torch", "numel")

    @classmethod
    def from_numpy(cls, send: Any, recv: Any, reduce_descriptor: ReduceDescriptor) -> ReduceOpDescriptor:
        """From numpy arrays."""
        return cls._checked(send, recv, reduce_descriptor, "numpy", "size")

    @classmethod
    def from_cupy(cls, send: Any, recv: Any, reduce_descriptor: ReduceDescriptor) -> ReduceOpDescriptor:
        """From CuPy arrays."""
        return cls._checked(send, recv, reduce_descriptor, "cupy", "size")

    @classmethod
    def _checked(
        cls, send: Any, recv: Any, reduce_descriptor: ReduceDescriptor, library: str, attribute: str
    ) -> ReduceOpDescriptor:
        found = getattr(send, attribute, None)
        count = found() if callable(found) else found
        if not isinstance(count, int):
            raise UsageError(f"a {library} tensor is due, not {type(send).__name__}")
        if count != reduce_descriptor.count:
            raise UsageError(
                f"the descriptor of tag {reduce_descriptor.tag} says count={reduce_descriptor.count}, "
                f"but the {library} tensor has {count} elements"
            )
        return cls(send, recv, reduce_descriptor)


@dataclass(frozen=True, slots=True)
class ReduceInfo:
    """What an operation moved, and whose inputs are in its result."""

    tx_bytes: int
    """Bytes of tensors that this peer handed to others, through sockets or shared memory."""
    rx_bytes: int
    """Bytes of tensors that this peer took from others."""
    world_size: int
    """How many contributed."""
    contributors: Sequence[str]
    """The `peer_id` of each contributor, in rank order."""
