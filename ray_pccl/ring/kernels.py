"""Arithmetic on flat arrays: how two contributions become one, for every operation and element type.

All of it runs on the calling thread alone and lets go of the interpreter's lock while it works on large arrays. Half
precision goes through torch where it can be imported, for speed, and through numpy where it can't. The bits are the
same either way, with two exceptions that IEEE 754 leaves open too: which NaN a NaN is, and whether MAX or MIN of +0
and -0 is +0 or -0.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ray_pccl.descriptors import DataType, ReduceOp
from ray_pccl.errors import UsageError

Array: TypeAlias = NDArray[Any]
Combiner: TypeAlias = Callable[[Array, Array, Array], None]
Averager: TypeAlias = Callable[[Array, int], None]

CHUNK = 32768
"""Elements of half precision worked on at once: torch keeps so few on the calling thread, and they stay in cache."""

_STORAGE: dict[DataType, np.dtype[Any]] = {
    DataType.UINT8: np.dtype(np.uint8),
    DataType.INT8: np.dtype(np.int8),
    DataType.UINT16: np.dtype(np.uint16),
    DataType.INT16: np.dtype(np.int16),
    DataType.UINT32: np.dtype(np.uint32),
    DataType.INT32: np.dtype(np.int32),
    DataType.UINT64: np.dtype(np.uint64),
    DataType.INT64: np.dtype(np.int64),
    DataType.FLOAT16: np.dtype(np.float16),
    DataType.BFLOAT16: np.dtype(np.uint16),
    DataType.FLOAT: np.dtype(np.float32),
    DataType.DOUBLE: np.dtype(np.float64),
    DataType.BOOL: np.dtype(np.bool_),
}
_UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MAX: np.maximum,
    ReduceOp.MIN: np.minimum,
}
_TORCH_FUNCTIONS = {
    ReduceOp.SUM: "add",
    ReduceOp.AVG: "add",
    ReduceOp.PROD: "mul",
    ReduceOp.MAX: "maximum",
    ReduceOp.MIN: "minimum",
}
_HALVES = {DataType.FLOAT16: "float16", DataType.BFLOAT16: "bfloat16"}
_QUIET_NAN = np.uint32(0x7FC00000)
_combiners: list[list[Combiner | None]] = [[None] * len(DataType) for _ in ReduceOp]


def storage_dtype(datatype: DataType) -> np.dtype[Any]:
    """The numpy dtype in which elements are held; numpy has no bfloat16, its bits are held as uint16."""
    return _STORAGE[datatype]


def check_reducible(op: ReduceOp, datatype: DataType) -> None:
    """Raise `UsageError`, saying what to do instead, where `op` makes no sense for `datatype`."""
    if datatype is DataType.BOOL:
        if op is not ReduceOp.MAX and op is not ReduceOp.MIN:
            raise UsageError(
                f"{op.name} of booleans is undefined: use MAX (any) or MIN (all), or convert to integers to count"
            )
    elif op is ReduceOp.AVG and not datatype.is_floating:
        raise UsageError(
            f"AVG of {datatype.name} would truncate the fractions: use SUM and divide the result by "
            "ReduceInfo.world_size, or convert to a float type"
        )


def combiner(op: ReduceOp, datatype: DataType) -> Combiner:
    """A function `combine(a, b, out)` that sets `out = a op b`, element by element; AVG adds, see `averager`.

    The arrays are flat, of one length and of the storage dtype. `out` may be `a` or `b`; the others may be read-only.
    Integers wrap around. MAX and MIN of a NaN and anything are NaN. The first call for a half precision type may
    import torch, which takes seconds. Raises `UsageError` as `check_reducible` does.
    """
    # A table by value: to hash two enum members, as functools.cache would, takes five times as long.
    return _combiners[op._value_][datatype._value_] or _make_combiner(op, datatype)


def _make_combiner(op: ReduceOp, datatype: DataType) -> Combiner:
    check_reducible(op, datatype)
    combine: Combiner
    if datatype in _HALVES and (torch := import_torch()) is not None:
        combine = functools.partial(_combine_with_torch, getattr(torch, _TORCH_FUNCTIONS[op]), datatype)
    elif datatype is DataType.BFLOAT16:
        combine = functools.partial(_combine_widened, _UFUNCS[op], datatype)
    elif datatype.is_floating:
        combine = functools.partial(_combine_floats, _UFUNCS[op])
    else:
        combine = functools.partial(_combine_integers, _UFUNCS[op])
    _combiners[op.value][datatype.value] = combine
    return combine


def _combine_integers(ufunc: np.ufunc, a: Array, b: Array, out: Array) -> None:
    ufunc(a, b, out=out)


def _combine_floats(ufunc: np.ufunc, a: Array, b: Array, out: Array) -> None:
    with np.errstate(all="ignore"):  # an overflow to infinity is a result, and no warning from a background thread
        ufunc(a, b, out=out)


def _combine_with_torch(function: Callable[..., Any], datatype: DataType, a: Array, b: Array, out: Array) -> None:
    tensors = _as_tensor(a, datatype), _as_tensor(b, datatype), _as_tensor(out, datatype)
    for first, second, result in _pieces(out.size, *tensors):
        function(first, second, out=result)


def _combine_widened(ufunc: np.ufunc, datatype: DataType, a: Array, b: Array, out: Array) -> None:
    with np.errstate(all="ignore"):
        for part in _chunks(out.size):
            size = out[part].size
            first, second = _scratch.first[:size], _scratch.second[:size]
            widen(datatype, a[part], first)
            widen(datatype, b[part], second)
            ufunc(first, second, out=first)
            narrow(datatype, first, out[part])


def averager(datatype: DataType) -> Averager:
    """A function `average(array, contributors)` that divides in place; for floats, else `UsageError`.

    Half precision is divided in single precision and rounded once.
    """
    check_reducible(ReduceOp.AVG, datatype)
    return functools.partial(_average_halves, datatype) if datatype in _HALVES else _average


def _average(array: Array, contributors: int) -> None:
    with np.errstate(all="ignore"):
        np.divide(array, array.dtype.type(contributors), out=array)


def _average_halves(datatype: DataType, array: Array, contributors: int) -> None:
    divisor = np.float32(contributors)
    with np.errstate(all="ignore"):
        for part in _chunks(array.size):
            piece = array[part]
            wide = _scratch.first[: piece.size]
            widen(datatype, piece, wide)
            np.divide(wide, divisor, out=wide)
            narrow(datatype, wide, piece)


def widen(datatype: DataType, values: Array, out: Array) -> None:
    """Convert flat half precision `values` of the storage dtype to float32 `out`, exactly."""
    if (torch := import_torch()) is not None:
        _copy_with_torch(_as_tensor(values, datatype), torch.from_numpy(out))
    elif datatype is DataType.FLOAT16:
        np.copyto(out, values)
    else:
        bits = out.view(np.uint32)
        np.copyto(bits, values)
        np.left_shift(bits, np.uint32(16), out=bits)


def narrow(datatype: DataType, values: Array, out: Array) -> None:
    """Round flat float32 `values` to half precision `out`, to nearest and ties to even; `values` are spoilt."""
    if (torch := import_torch()) is not None:
        _copy_with_torch(torch.from_numpy(values), _as_tensor(out, datatype))
    elif datatype is DataType.FLOAT16:
        with np.errstate(all="ignore"):
            np.copyto(out, values, casting="same_kind")
    else:
        bits = values.view(np.uint32)
        np.copyto(bits, _QUIET_NAN, where=np.isnan(values))  # to round some NaNs would carry over to -0
        odd = np.right_shift(bits, np.uint32(16))
        np.bitwise_and(odd, np.uint32(1), out=odd)
        np.add(bits, odd, out=bits)
        np.add(bits, np.uint32(0x7FFF), out=bits)
        np.right_shift(bits, np.uint32(16), out=bits)
        np.copyto(out, bits, casting="same_kind")


@functools.cache
def import_torch() -> Any:
    """The torch module, or None where it can't be imported. The first call imports it: that may take seconds."""
    try:
        return importlib.import_module("torch")
    except (ImportError, OSError):  # absent, or broken: a missing shared library, another architecture
        return None


def _copy_with_torch(source: Any, target: Any) -> None:
    for piece, place in _pieces(len(source), source, target):
        place.copy_(piece)


def _pieces(count: int, *tensors: Any) -> Iterator[tuple[Any, ...]]:
    """The tensors' pieces of one chunk each, side by side."""
    if count <= CHUNK:
        yield tensors
        return
    # In batches: thousands of live pieces would set off the garbage collector, which then walks all of torch.
    for start in range(0, count, 64 * CHUNK):
        yield from zip(*(tensor[start : start + 64 * CHUNK].split(CHUNK) for tensor in tensors), strict=True)


def _as_tensor(array: Array, datatype: DataType) -> Any:
    """A torch tensor of half precision on the array's own memory; who has a read-only one must not write to it."""
    torch = import_torch()
    if not array.flags.writeable:
        array = np.asarray(_WritableAlias(array))
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if datatype is DataType.BFLOAT16 else tensor


class _WritableAlias:
    """The same memory, said to be writable: torch warns of read-only arrays, even where they are only read.

    To silence the warning instead would change the filters of the whole process, under other threads' feet.
    """

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, array: Array) -> None:
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
        self.owner = array


class _Scratch(threading.local):
    """Each thread's own float32 buffers of one chunk."""

    def __init__(self) -> None:
        self.first = np.empty(CHUNK, np.float32)
        self.second = np.empty(CHUNK, np.float32)


_scratch = _Scratch()


def _chunks(count: int) -> Iterator[slice]:
    return (slice(start, start + CHUNK) for start in range(0, count, CHUNK))
