"""Small operations: everyone shows its whole input to everyone, and each makes its own result from all of them.

The result is a pure function of the inputs in rank order, so it has the same bits on every rank, whichever way the
inputs came; and it can be made again from them after a death (R8).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ray_pccl.descriptors import DataType, ReduceOp
from ray_pccl.ring.header import Kind
from ray_pccl.ring.kernels import combiner
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
    assert task.recipe.quantizer is not None
    packed = np.empty(len(inputs[0]), np.uint8)
    reduce_packed(task, inputs, len(out), packed)
    task.recipe.quantizer.store(packed, out)


def reduce_packed(task: Task, inputs: Sequence[Bytes], count: int, packed: Bytes) -> None:
    """Sums what quantised inputs stand for, in rank order, and quantises the sum: every rank takes just that value."""
    quantizer = task.recipe.quantizer
    assert quantizer is not None
    total = np.empty(count, quantizer.compute_dtype)
    quantizer.dequantize(inputs[0], total, count)
    if task.recipe.header.op in (ReduceOp.SUM, ReduceOp.AVG):
        for shown in inputs[1:]:
            quantizer.add_dequantized(shown, total)
    else:
        wide = combiner(task.recipe.header.op, DataType.DOUBLE if total.dtype.itemsize == 8 else DataType.FLOAT)
        each = np.empty_like(total)
        for shown in inputs[1:]:
            quantizer.dequantize(shown, each, count)
            wide(total, each, total)
    if task.recipe.average is not None:
        total /= len(inputs)
    quantizer.quantize(total, packed)
