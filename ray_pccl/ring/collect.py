"""Small operations: everyone shows its whole input to everyone, and each makes its own result from all of them.

The result is a pure function of the inputs in rank order, so it has the same bits on every rank, whichever way the
inputs came; and it can be made again from them after a death (R8).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from ray_pccl.descriptors import DataType, ReduceOp
from ray_pccl.ring.header import Kind
from ray_pccl.ring.kernels import combiner
from ray_pccl.ring.quantization import BLOCK
from ray_pccl.ring.segment import Bytes
from ray_pccl.ring.task import Array, Task

_NOTHING: Bytes = np.empty(0, np.uint8)


def show(task: Task, into: Bytes) -> None:
    """Writes this rank's input where the others will read it."""
    if not len(into):
        return
    assert task.send is not None
    if task.recipe.quantizer is not None:
        task.recipe.quantizer.quantize(task.send, into)
    else:
        np.copyto(into.view(task.recipe.dtype), task.send)


def collect(task: Task, rank: int, inputs: Sequence[Bytes]) -> None:
    """Makes this rank's result from what every rank has shown."""
    kind, out, count = task.recipe.header.kind, task.out, task.recipe.header.count
    if out is None or not count:
        return
    arrays: list[Array] = [shown.view(task.recipe.dtype) for shown in inputs] if task.recipe.quantizer is None else []
    match kind:
        case Kind.ALL_REDUCE | Kind.REDUCE if task.recipe.quantizer is not None:
            _sum_quantized(task, inputs, out)
        case Kind.ALL_REDUCE | Kind.REDUCE:
            reduce_arrays(task, arrays, out)
        case Kind.REDUCE_SCATTER:
            reduce_arrays(task, [array[rank * count : (rank + 1) * count] for array in arrays], out)
        case Kind.BROADCAST:
            if rank != task.recipe.header.root:
                np.copyto(out, arrays[task.recipe.header.root])
        case Kind.ALL_GATHER | Kind.GATHER:
            for place, array in enumerate(arrays):
                np.copyto(out[place * count : (place + 1) * count], array)
        case Kind.ALL_TO_ALL:
            for place, array in enumerate(arrays):
                np.copyto(out[place * count : (place + 1) * count], array[rank * count : (rank + 1) * count])
        case Kind.SCATTER:
            np.copyto(out, arrays[task.recipe.header.root][rank * count : (rank + 1) * count])


def reduce_arrays(task: Task, arrays: Sequence[Array], out: Array) -> None:
    """Combines in rank order, and divides an average."""
    combine = task.recipe.combine
    assert combine is not None
    if len(arrays) == 1:
        np.copyto(out, arrays[0])
    else:
        combine(arrays[0], arrays[1], out)
        for array in arrays[2:]:
            combine(out, array, out)
    if task.recipe.average is not None:
        task.recipe.average(out, len(arrays))


def _sum_quantized(task: Task, inputs: Sequence[Bytes], out: Array) -> None:
    packed = np.empty(len(inputs[0]), np.uint8)
    reduce_packed(task, inputs, len(out), packed, out)


def reduce_packed(task: Task, inputs: Sequence[Bytes], count: int, packed: Bytes, out: Array | None) -> None:
    """Combines what quantised inputs stand for, in rank order, and quantises the result into `packed`.

    Every rank takes just that value: it goes to `out`, too, if there is one. A few blocks at a time, so that all of it
    stays in the cache. `packed` may be one of the inputs.
    """
    quantizer, op = task.recipe.quantizer, task.recipe.header.op
    assert quantizer is not None
    total, each = _scratch.arrays(quantizer.compute_dtype)
    step = _BLOCKS * quantizer.block_bytes
    for index, start in enumerate(range(0, len(packed), step)):
        low = index * _BLOCKS * BLOCK
        some = min(count - low, _BLOCKS * BLOCK)
        part = slice(start, min(start + step, len(packed)))
        sum_ = total[:some]
        quantizer.dequantize(inputs[0][part], sum_, some)
        for shown in inputs[1:]:
            if op in (ReduceOp.SUM, ReduceOp.AVG):
                quantizer.add_dequantized(shown[part], sum_)
            else:
                wide = combiner(op, DataType.DOUBLE if total.dtype.itemsize == 8 else DataType.FLOAT)
                quantizer.dequantize(shown[part], each[:some], some)
                wide(sum_, each[:some], sum_)
        if op is ReduceOp.AVG:
            sum_ /= len(inputs)
        quantizer.quantize(sum_, packed[part])
        if out is not None:
            quantizer.store(packed[part], out[low : low + some])


class _Scratch(threading.local):
    def __init__(self) -> None:
        self._arrays: dict[int, tuple[Array, Array]] = {}

    def arrays(self, dtype: np.dtype[Any]) -> tuple[Array, Array]:
        if dtype.itemsize not in self._arrays:
            size = _BLOCKS * BLOCK
            self._arrays[dtype.itemsize] = (np.empty(size, dtype), np.empty(size, dtype))
        return self._arrays[dtype.itemsize]


_BLOCKS = 16
"""How many blocks are summed at a time."""
_scratch = _Scratch()
