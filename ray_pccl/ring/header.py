"""What an operation is: the same on every member, or an error on all of them."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from ray_pccl.descriptors import DataType, QuantizationAlgorithm, ReduceOp

HEADER = struct.Struct("<BBBBBBHqqq")
HEADER_BYTES = HEADER.size
NO_ROOT = -1
BACKENDS = ("ring", "gloo", "nccl")
"""Who moves the data, by the number that a header has for it: ourselves, or another library."""
_BACKEND_AT = 6


class Kind(IntEnum):
    """The collectives."""

    ALL_REDUCE = 1
    REDUCE = 2
    BROADCAST = 3
    BARRIER = 4
    ALL_GATHER = 5
    REDUCE_SCATTER = 6
    ALL_TO_ALL = 7
    GATHER = 8
    SCATTER = 9

    @property
    def follows_world(self) -> bool:
        """Whether its shape changes with the world, so that it can't be retried with fewer (R9)."""
        return self >= Kind.ALL_GATHER

    @property
    def call(self) -> str:
        """The name of the method that users call."""
        return _CALLS[self]


_CALLS = {kind: kind.name.lower() for kind in Kind}


@dataclass(frozen=True, slots=True)
class Header:
    """One operation, as every member has to state it. `root` is a rank of the epoch, or -1."""

    kind: Kind
    count: int = 0
    datatype: DataType = DataType.UINT8
    op: ReduceOp = ReduceOp.SUM
    algorithm: QuantizationAlgorithm = QuantizationAlgorithm.NONE
    quantized: DataType = DataType.UINT8
    retry: bool = True
    root: int = NO_ROOT
    signature: int = 0
    """Of what the operation is a part, where that matters: one that is not the same on all is a mismatch."""

    def pack(self) -> bytes:
        """Its bytes: equal if and only if the headers are."""
        kinds = (self.kind, self.datatype.value, self.op.value, self.algorithm.value, self.quantized.value)
        return HEADER.pack(*kinds, self.retry, 0, self.count, self.root, self.signature)

    def __str__(self) -> str:
        parts = []
        if self.kind is not Kind.BARRIER:
            parts += [f"count={self.count}", f"datatype={self.datatype.name}"]
        if self.kind in (Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER):
            parts.append(f"op={self.op.name}")
        if self.algorithm is not QuantizationAlgorithm.NONE:
            parts.append(f"quantization={self.algorithm.name} {self.quantized.name}")
        if self.root != NO_ROOT:
            parts.append(f"root={self.root}")
        if self.signature:
            parts.append(f"signature={self.signature:016x}")
        if not self.kind.follows_world:
            parts.append(f"retry={self.retry}")
        return f"{self.kind.name.lower()}({', '.join(parts)})"


def describe(packed: bytes) -> str:
    """The text of a header that another member sent; of one that makes no sense, its bytes."""
    try:
        kind, datatype, op, algorithm, quantized, retry, _, count, root, signature = HEADER.unpack(packed)
        header = Header(
            Kind(kind),
            count,
            DataType(datatype),
            ReduceOp(op),
            QuantizationAlgorithm(algorithm),
            DataType(quantized),
            bool(retry),
            root,
            signature,
        )
    except (ValueError, struct.error):
        return f"an unknown operation ({packed.hex()})"
    return str(header)


def delegated(packed: bytes, backend: int) -> bytes:
    """The same header, of a member that has another library move the data."""
    return packed[:_BACKEND_AT] + backend.to_bytes(2, "little") + packed[_BACKEND_AT + 2 :]


def backend_of(packed: bytes) -> str:
    """The backend of whoever sent this header."""
    number = int.from_bytes(packed[_BACKEND_AT : _BACKEND_AT + 2], "little")
    return BACKENDS[number] if number < len(BACKENDS) else f"number {number}"
