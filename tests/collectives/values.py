"""What peers contribute, and what must come of it: made anew, and alike, in every process."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ray_pccl import ReduceOp

Array = NDArray[Any]
INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
FLOATS = ("float32", "float64")
HALVES = ("float16", "bfloat16")
BOOL = ("bool",)
WITHOUT_TORCH = (*BOOL, *INTEGERS, *FLOATS)
"""Half precision is reduced by torch, whose import takes seconds in every peer."""
LAYOUTS = ("plain", "matrix", "strided", "transposed", "reversed")
_UFUNCS = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MAX: np.maximum,
    ReduceOp.MIN: np.minimum,
}
_GAP = 99
"""What lies between the elements of a strided tensor, and has to stay there."""


def plain_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy type in which the values of a type are written down here."""
    return np.dtype(np.float32) if dtype == "bfloat16" else np.dtype(dtype)


def itemsize(dtype: str) -> int:
    """Bytes of one element."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def ops_for(dtype: str) -> list[ReduceOp]:
    """The operations that make sense."""
    if dtype == "bool":
        return [ReduceOp.MAX, ReduceOp.MIN]
    return [op for op in ReduceOp if op is not ReduceOp.AVG or dtype not in INTEGERS]


def contribution(rank: int, count: int, dtype: str, seed: int = 0) -> Array:
    """What a rank contributes. Integers are of all sizes, and wrap around; floats are small and stay exact."""
    index = np.arange(count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = (index + np.uint64(seed * 1009 + 1)) * np.uint64(0x9E3779B97F4A7C15 + 2 * rank)
    mixed >>= np.uint64(13)
    if dtype == "bool":
        return (mixed & np.uint64(3)) == 0
    if dtype in INTEGERS:
        return mixed.astype(dtype)
    return (mixed & np.uint64(7)).astype(plain_dtype(dtype)) - plain_dtype(dtype).type(4)


def reduced(arrays: Sequence[Array], op: ReduceOp, dtype: str) -> Array:
    """What a reduction of these has to give, rounded once."""
    floating = dtype not in INTEGERS and dtype != "bool"
    total = arrays[0].astype(np.float64) if floating else arrays[0].copy()
    for array in arrays[1:]:
        total = _UFUNCS[op](total, array)
    if op is ReduceOp.AVG:
        total = total / len(arrays)
    return rounded(total, dtype)


def rounded(array: Array, dtype: str) -> Array:
    """The values as their type can hold them."""
    if dtype != "bfloat16":
        return array.astype(dtype)
    import torch

    return torch.from_numpy(array.astype(np.float32)).bfloat16().float().numpy()


class Tensor:
    """A user's tensor of some library and layout."""

    def __init__(self, library: str, dtype: str, values: Array, layout: str = "plain") -> None:
        self.dtype = dtype
        self._gaps: Any = None
        flat = self._from_numpy(library, dtype, values)
        count = len(values)
        match layout:
            case "matrix" if count and count % 3 == 0:
                self.tensor = flat.reshape(3, -1)
            case "transposed" if count and count % 3 == 0:
                self.tensor = flat.reshape(-1, 3).T
            case "reversed" if library == "numpy":
                self.tensor = flat[::-1]
            case "scalar" if count == 1:
                self.tensor = flat.reshape(())
            case "strided" | "reversed":
                wide = self._from_numpy(library, dtype, np.full(2 * count, _GAP % 2 or _GAP, values.dtype))
                wide[::2] = flat
                self.tensor, self._gaps = wide[::2], wide[1::2]
            case _:
                self.tensor = flat
        if layout in ("transposed", "reversed"):
            self.set(values)

    @staticmethod
    def _from_numpy(library: str, dtype: str, values: Array) -> Any:
        if library == "numpy":
            return values.astype(dtype)
        import torch

        made = torch.from_numpy(values.copy())
        return made.to(torch.bfloat16) if dtype == "bfloat16" else made

    def set(self, values: Array) -> None:
        """Writes all elements, in the order of the shape."""
        made = self._from_numpy("numpy" if isinstance(self.tensor, np.ndarray) else "torch", self.dtype, values)
        self.tensor[...] = made.reshape(tuple(self.tensor.shape))

    def get(self) -> Array:
        """All elements, flat, in the order of the shape."""
        if isinstance(self.tensor, np.ndarray):
            return self.tensor.reshape(-1).copy()
        flat = self.tensor.reshape(-1)
        return (flat.float() if self.dtype == "bfloat16" else flat).numpy().copy()

    def kept_its_gaps(self) -> bool:
        """Whether what lies between the elements is untouched."""
        return self._gaps is None or bool((self._gaps == (_GAP % 2 or _GAP)).all())


def digest(values: Array) -> str:
    """A name for these very bits."""
    return hashlib.sha1(np.ascontiguousarray(values).tobytes()).hexdigest()[:16]
