"""Values made smaller on their way: blocks of 4096 floats become one code of 8 or 16 bits each, plus two numbers.

Both algorithms lay a grid of equal steps over a block's range, from its smallest value to its largest, and send for
each value the number of the nearest grid point:

- MIN_MAX: the grid begins at the smallest value. `value = low + code * step`
- ZERO_POINT_SCALE: the grid's points are the multiples of the step, so that zero stays exactly zero; the zero point is
  the code of zero, whether or not any value has it. `value = (code - zero) * step`

What comes back is off by at most half a step, `range / levels / 2` with 255 or 65535 levels, plus the rounding of the
computation itself (a few units in the last place of the block's largest value). MIN_MAX keeps a block of equal values
as it is. A block that holds an infinity or a NaN comes back as NaN in whole: codes can't tell which value it was, and
who looks for overflows has to find them.

Every block is packed on its own, out of single IEEE operations: the bits depend on nothing but the block, be it the
machine, the library's vector width or how an array was cut (at multiples of `BLOCK`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ray_pccl.descriptors import DataType, QuantizationAlgorithm, QuantizationOptions
from ray_pccl.errors import UsageError
from ray_pccl.ring.kernels import narrow, storage_dtype, widen

Array: TypeAlias = NDArray[Any]

BLOCK = 4096
"""Elements of a block. Arrays may be split at multiples of it and packed in pieces."""
GROUP = 32
"""Blocks worked on at once: enough to pay for the calls into numpy, few enough to stay in cache."""

_CODES: dict[DataType, np.dtype[Any]] = {
    DataType.UINT8: np.dtype(np.uint8),
    DataType.INT8: np.dtype(np.uint8),
    DataType.UINT16: np.dtype(np.uint16),
    DataType.INT16: np.dtype(np.uint16),
}
_SIGNED = (DataType.INT8, DataType.INT16)
_HALVES = (DataType.FLOAT16, DataType.BFLOAT16)


def quantizer(options: QuantizationOptions, datatype: DataType) -> Quantizer | None:
    """The quantizer for values of `datatype`, None for none. Raises `UsageError` for what can't be quantized."""
    if options.algorithm is QuantizationAlgorithm.NONE:
        return None
    return _quantizer(options.algorithm, options.quantized_datatype, datatype)


@functools.cache
def _quantizer(algorithm: QuantizationAlgorithm, quantized: DataType, datatype: DataType) -> Quantizer:
    if not datatype.is_floating:
        raise UsageError(
            f"{datatype.name} values can't be quantized: integers are meant to arrive exactly. "
            "Leave quantization_options out, or pass FLOAT, DOUBLE, FLOAT16 or BFLOAT16"
        )
    if quantized not in _CODES:
        raise UsageError(
            f"quantized_datatype is {quantized.name}: codes are UINT8, INT8, UINT16 or INT16, the smaller, the coarser"
        )
    cls = _MinMax if algorithm is QuantizationAlgorithm.MIN_MAX else _ZeroPointScale
    return cls(quantized, datatype)


class Quantizer:
    """Packs arrays of one datatype. Many threads may use it at once; it lets go of the interpreter's lock.

    A block is packed as its two numbers and then its codes, `block_bytes` for a whole one; only the last may be
    shorter. Codes of signed types have their top bit flipped.
    """

    def __init__(self, quantized: DataType, datatype: DataType) -> None:
        self.datatype = datatype
        self.storage_dtype = storage_dtype(datatype)
        self.compute_dtype: np.dtype[Any] = np.dtype(np.float64 if datatype is DataType.DOUBLE else np.float32)
        """The type of sums: float64 for DOUBLE, else float32."""
        self._code_dtype = _CODES[quantized]
        self._levels = 2 ** (8 * self._code_dtype.itemsize) - 1
        self._flip = self._code_dtype.type((self._levels + 1) // 2) if quantized in _SIGNED else None
        self.block_bytes = self._bytes(BLOCK)
        """Bytes of a whole packed block: blocks i to j of an array are its packed bytes from i * this to j * this."""
        self._scratch = _Scratch(self.compute_dtype, self._code_dtype)
        limits = np.finfo(self.compute_dtype)
        self._resolution = 2 * limits.eps
        self._small = 256 * limits.tiny
        self._large = limits.max / 8
        self._largest = limits.max

    def packed_size(self, count: int) -> int:
        """Bytes of `count` packed elements."""
        blocks, rest = divmod(count, BLOCK)
        return blocks * self.block_bytes + (self._bytes(rest) if rest else 0)

    def quantize(self, values: Array, packed: Array) -> None:
        """Pack flat `values`, of the storage dtype or the compute dtype, into all of the bytes `packed`."""
        with np.errstate(all="ignore"):
            for part, records in self._groups(packed, values.size):
                self._pack(self._wide(values[part]).reshape(len(records), -1), records)

    def dequantize(self, packed: Array, out: Array, count: int) -> None:
        """Unpack `count` elements into the beginning of `out`, an array of the compute dtype."""
        with np.errstate(all="ignore"):
            for part, records in self._groups(packed, count):
                self._unpack(records, out[part].reshape(len(records), -1))

    def add_dequantized(self, packed: Array, accumulator: Array) -> None:
        """Add all that is packed to `accumulator`, an array of the compute dtype and of as many elements."""
        with np.errstate(all="ignore"):
            for part, records in self._groups(packed, accumulator.size):
                target = accumulator[part]
                addend = self._scratch.values[: target.size]
                self._unpack(records, addend.reshape(len(records), -1))
                np.add(target, addend, out=target)

    def store(self, packed: Array, out: Array) -> None:
        """Unpack into all of `out`, an array of the storage dtype: half types are rounded to nearest, ties to even."""
        if self.datatype not in _HALVES:
            self.dequantize(packed, out, out.size)
            return
        with np.errstate(all="ignore"):
            for part, records in self._groups(packed, out.size):
                target = out[part]
                values = self._scratch.values[: target.size]
                self._unpack(records, values.reshape(len(records), -1))
                narrow(self.datatype, values, target)

    def _groups(self, packed: Array, count: int) -> Iterator[tuple[slice, Array]]:
        """Pieces of equally long blocks that fit the scratch: where their elements are, and their packed records."""
        assert packed.size >= self.packed_size(count), f"{packed.size} bytes for {count} packed elements"
        blocks, rest = divmod(count, BLOCK)
        whole = packed[: blocks * self.block_bytes].view(self._record(BLOCK))
        for first in range(0, blocks, GROUP):
            records = whole[first : first + GROUP]
            yield slice(first * BLOCK, (first + len(records)) * BLOCK), records
        if rest:
            start = blocks * self.block_bytes
            yield slice(blocks * BLOCK, count), packed[start : start + self._bytes(rest)].view(self._record(rest))

    def _record(self, count: int) -> np.dtype[Any]:
        return _record(self.compute_dtype, self._code_dtype, count)

    def _bytes(self, count: int) -> int:
        return 2 * self.compute_dtype.itemsize + count * self._code_dtype.itemsize

    def _wide(self, values: Array) -> Array:
        if values.dtype == self.compute_dtype:
            return values
        wide = self._scratch.wide[: values.size]
        widen(self.datatype, values, wide)
        return wide

    def _pack(self, values: Array, records: Array) -> None:
        low = np.minimum.reduce(values, axis=1, keepdims=True)
        high = np.maximum.reduce(values, axis=1, keepdims=True)
        np.add(low, 0, out=low)  # which of -0 and +0 is the smaller one differs between machines: take +0
        np.add(high, 0, out=high)
        codes = self._scratch.values[: values.size].reshape(values.shape)
        base, step = self._encode(values, low, high, codes)
        largest = np.maximum(np.abs(low), np.abs(high))
        if not (largest <= self._large).all():
            for index in np.flatnonzero(~(largest <= self._large)):  # NaNs too
                block = slice(index, index + 1)
                if np.isfinite(largest[index, 0]):
                    base[block], step[block] = self._encode_huge(values[block], low[block], high[block], codes[block])
                else:
                    base[block], step[block], codes[block] = np.nan, 0, 0
        records["base"], records["step"] = base[:, 0], step[:, 0]
        packed = records["codes"]
        np.copyto(packed, codes, casting="unsafe")
        if self._flip is not None:
            np.bitwise_xor(packed, self._flip, out=packed)

    def _unpack(self, records: Array, out: Array) -> None:
        codes = records["codes"]
        if self._flip is not None:
            codes = np.bitwise_xor(codes, self._flip, out=self._scratch.codes[: codes.size].reshape(codes.shape))
        np.copyto(out, codes)
        base, step = records["base"][:, np.newaxis], records["step"][:, np.newaxis]
        self._decode(out, base, step)
        ends = np.empty((len(records), 2), self.compute_dtype)
        ends[:, 0], ends[:, 1] = 0, self._levels
        self._decode(ends, base, step)
        huge = np.abs(ends) > self._large
        if huge.any():
            for index in np.flatnonzero(huge.any(axis=1)):
                np.copyto(out[index], codes[index])
                self._decode_huge(out[index], base[index], step[index])

    def _encode(self, values: Array, low: Array, high: Array, codes: Array) -> tuple[Array, Array]:
        """Set the codes, whole numbers still held as floats; returns each block's base and step."""
        raise NotImplementedError

    def _decode(self, codes: Array, base: Array, step: Array) -> None:
        """Turn codes, held as floats, into values, in place."""
        raise NotImplementedError

    def _encode_huge(self, values: Array, low: Array, high: Array, codes: Array) -> tuple[Array, Array]:
        """As `_encode`, for a block whose range may overflow: in quarters, which is exact for numbers of that size."""
        quarter = self.compute_dtype.type(0.25)
        base, step = self._encode(values * quarter, low * quarter, high * quarter, codes)
        return base * self._base_unit(4), step * 4

    def _decode_huge(self, codes: Array, base: Array, step: Array) -> None:
        """As `_decode`, for one block near the largest number there is: beyond it, values stay at it."""
        self._decode(codes, base * self._base_unit(0.25), step * self.compute_dtype.type(0.25))
        np.multiply(codes, 4, out=codes)
        np.clip(codes, -self._largest, self._largest, out=codes)

    def _base_unit(self, factor: float) -> float:
        """By what the base changes where all values change by `factor`."""
        raise NotImplementedError

    def _normal(self, step: Array, size: Array) -> Array:
        """The step where it is a normal number; one that was rounded to fewer bits is rounded up, to cover `size`."""
        np.copyto(step, np.nextafter(step, self._largest), where=(step < self._small) & (size > 0))
        return step


class _MinMax(Quantizer):
    """`value = base + code * step`, the base being the smallest value."""

    def _encode(self, values: Array, low: Array, high: Array, codes: Array) -> tuple[Array, Array]:
        spread = high - low
        step = self._normal(spread / self._levels, spread)
        np.subtract(values, low, out=codes)
        np.divide(codes, np.where(step == 0, 1, step), out=codes)  # 0 / 0 is a NaN, whose code is up to the machine
        np.rint(codes, out=codes)
        return low, step

    def _decode(self, codes: Array, base: Array, step: Array) -> None:
        np.multiply(codes, step, out=codes)
        np.add(codes, base, out=codes)

    def _base_unit(self, factor: float) -> float:
        return factor


class _ZeroPointScale(Quantizer):
    """`value = (base + code) * step`, the base being a whole number: the zero point, negative.

    It has to be one that the compute dtype can hold. In a block far from zero, with values close together, the step is
    therefore no finer than two units in the last place of the largest value.
    """

    def _encode(self, values: Array, low: Array, high: Array, codes: Array) -> tuple[Array, Array]:
        largest = np.maximum(np.abs(low), np.abs(high))
        step = np.maximum((high - low) / self._levels, largest * self._resolution)
        step = self._normal(step, largest)
        divisor = np.where(step == 0, 1, step)
        base = np.rint(low / divisor)
        np.divide(values, divisor, out=codes)
        np.rint(codes, out=codes)
        np.subtract(codes, base, out=codes)
        if (np.rint(high / divisor) - base > self._levels).any():  # both ends lay half way between two grid points
            np.minimum(codes, self._levels, out=codes)
        return base, step

    def _decode(self, codes: Array, base: Array, step: Array) -> None:
        np.add(codes, base, out=codes)
        np.multiply(codes, step, out=codes)

    def _base_unit(self, factor: float) -> float:
        return 1


class _Scratch(threading.local):
    """Each thread's own buffers of one group of blocks."""

    def __init__(self, compute_dtype: np.dtype[Any], code_dtype: np.dtype[Any]) -> None:
        self.values = np.empty(GROUP * BLOCK, compute_dtype)
        self.wide = np.empty(GROUP * BLOCK, compute_dtype)
        self.codes = np.empty(GROUP * BLOCK, code_dtype)


@functools.lru_cache(maxsize=256)
def _record(compute_dtype: np.dtype[Any], code_dtype: np.dtype[Any], count: int) -> np.dtype[Any]:
    return np.dtype([("base", compute_dtype), ("step", compute_dtype), ("codes", code_dtype, (count,))])
