"""Programs that reduce in eight bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from ray_pccl import Communicator, DataType, QuantizationAlgorithm, QuantizationOptions, ReduceOp
from tests.collectives.programs import Report
from tests.collectives.values import Array, Tensor, digest, rounded

BLOCK = 4096
COUNTS = (1, 7, 4095, 4097, 60_000, 66_000, 262_144, 270_001, 1_500_003)
"""Below and above the thresholds, whose measure is what travels: about a byte for each element."""
_EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


def inputs_of(rank: int, count: int, dtype: str) -> Array:
    """Normally distributed, each block of another width."""
    random = np.random.default_rng(1000 * rank + count)
    widths = 10.0 ** random.integers(-2, 3, -(-count // BLOCK)).repeat(BLOCK)[:count]
    return rounded(random.standard_normal(count) * widths + rank, dtype).astype(np.float64)


def block_ranges(values: Array) -> Array:
    """For each element the range of its block."""
    edges = np.arange(0, len(values), BLOCK)
    ranges = np.maximum.reduceat(values, edges) - np.minimum.reduceat(values, edges)
    return ranges.repeat(BLOCK)[: len(values)]


def sums(comm: Communicator, library: str, dtype: str, algorithm: QuantizationAlgorithm, code: DataType) -> Report:
    """Sums and averages of all sizes, in place and not: off, but never by more than is promised."""
    complaints: list[str] = []
    digests: dict[str, str] = {}
    options = QuantizationOptions(code, algorithm)
    levels = 255 if code in (DataType.UINT8, DataType.INT8) else 65535
    for number, count in enumerate(COUNTS):
        op = ReduceOp.AVG if number % 3 == 2 else ReduceOp.SUM
        everyones = [inputs_of(rank, count, dtype) for rank in range(comm.world_size)]
        exact = np.sum(everyones, axis=0)
        mine: Any = Tensor(library, dtype, rounded(everyones[comm.rank], dtype).astype(_plain(dtype)))
        comm.all_reduce(mine.tensor, op=op, quantization_options=options, tag=number)
        have = mine.get().astype(np.float64) * (comm.world_size if op is ReduceOp.AVG else 1)
        ranges = np.max([block_ranges(values) for values in (*everyones, exact)], axis=0)
        largest = np.max([np.abs(values) for values in everyones], axis=0).max()
        allowed = comm.world_size * ranges / levels + 4 * comm.world_size * _EPSILON[dtype] * (largest + np.abs(exact))
        error = np.abs(have - exact)
        name = f"{dtype}[{count}] {op.name} {algorithm.name} {code.name}"
        if (error > allowed).any():
            at = int(np.argmax(error - allowed))
            complaints.append(f"{name}: off by {error[at]} at {at}, where {allowed[at]} is allowed")
        if count > 1000 and dtype in ("float32", "float64") and (error == 0).mean() > 0.5:
            complaints.append(f"{name}: not quantised at all")
        digests[name] = digest(mine.get())
    return complaints, digests


def _plain(dtype: str) -> Any:
    return np.float32 if dtype == "bfloat16" else np.dtype(dtype)


def other_ops(comm: Communicator) -> list[str]:
    """MAX, MIN and reduce to a root are quantised like sums."""
    options = QuantizationOptions(DataType.UINT8, QuantizationAlgorithm.MIN_MAX)
    found = []
    for count in (100, 300_000):
        everyones = [inputs_of(rank, count, "float32") for rank in range(comm.world_size)]
        spread = np.max([block_ranges(values) for values in everyones], axis=0)
        for op, exact in ((ReduceOp.MAX, np.max(everyones, axis=0)), (ReduceOp.MIN, np.min(everyones, axis=0))):
            out = np.zeros(count, np.float32)
            comm.all_reduce(everyones[comm.rank].astype(np.float32), out, op=op, quantization_options=options)
            if (np.abs(out - exact) > spread * 2 / 255 + 1e-3).any():
                found.append(f"{op.name} of {count} is off by {np.abs(out - exact).max()}")
    return found


def zeros(comm: Communicator, algorithm: QuantizationAlgorithm) -> list[str]:
    """Blocks of one value come back as they were; with a zero point, so do zeros among others."""
    options = QuantizationOptions(DataType.UINT8, algorithm)
    equal = np.full(300_000, 0.0 if algorithm is QuantizationAlgorithm.ZERO_POINT_SCALE else 1.1, np.float32)
    expected = equal * comm.world_size
    comm.all_reduce(equal, quantization_options=options)
    return [] if np.allclose(equal, expected, rtol=1e-6) else [f"a block of equal values became {np.unique(equal)[:3]}"]
