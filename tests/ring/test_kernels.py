from __future__ import annotations

import itertools
import mmap
import subprocess
import sys
import threading
import time
import timeit
import warnings
from typing import Any

import numpy as np
import pytest

from ray_pccl.descriptors import DataType, ReduceOp
from ray_pccl.errors import UsageError
from ray_pccl.ring import kernels
from ray_pccl.ring.kernels import averager, check_reducible, combiner, narrow, storage_dtype, widen

INTEGERS = [d for d in DataType if not d.is_floating and d is not DataType.BOOL]
HALVES = [DataType.FLOAT16, DataType.BFLOAT16]
OPERATORS = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MAX: np.maximum,
    ReduceOp.MIN: np.minimum,
}
SPECIAL_BITS = [0, 0x8000, 1, 0x8001, 0x3FF, 0x400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7C01, 0x7DFF, 0x7E00, 0xFE00]
SPECIAL_BITS += [0x7F80, 0xFF80, 0x7F81, 0x7FFF, 0xFFFF, 0x7FC0, 0xFFC0, 0x7F7F, 0xFF7F, 0x80, 0x3C00, 0xBC00, 0x3F80]


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "import_torch", lambda: None)
    monkeypatch.setattr(kernels, "_combiners", [[None] * len(DataType) for _ in ReduceOp])


def halves(datatype: DataType, values: Any) -> np.ndarray[Any, Any]:
    """Values in half precision, by an independent way: numpy's for float16, truncation of exact ones for bfloat16."""
    wide = np.asarray(values, np.float32)
    if datatype is DataType.FLOAT16:
        return wide.astype(np.float16)
    bits = wide.view(np.uint32)
    assert not (bits & 0xFFFF).any(), "not representable in bfloat16"
    return (bits >> 16).astype(np.uint16)


def wide(datatype: DataType, stored: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if datatype is DataType.FLOAT16:
        return stored.astype(np.float32)
    return (stored.astype(np.uint32) << 16).view(np.float32)


def sample_pairs(datatype: DataType) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    random = np.random.default_rng(7).integers(0, 65536, 400)
    bits = np.concatenate([SPECIAL_BITS, random]).astype(np.uint16)
    first, second = (grid.ravel() for grid in np.meshgrid(bits, bits))
    return first.view(storage_dtype(datatype)), second.view(storage_dtype(datatype))


def rounded_to_bfloat16(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Of the two neighbours in bfloat16 the nearer one, or the even one: computed in double precision."""
    low = value.view(np.uint32) >> 16
    below, above = ((b << 16).astype(np.uint32).view(np.float32).astype(np.float64) for b in (low, low + 1))
    above = np.where(np.isinf(above) & np.isfinite(below), np.copysign(2.0**128, below), above)
    exact = value.astype(np.float64)
    nearer = np.abs(exact - below) < np.abs(above - exact)
    tie = np.abs(exact - below) == np.abs(above - exact)
    return np.where(nearer | (tie & (low % 2 == 0)) | np.isinf(value), low, low + 1).astype(np.uint16)


def test_elements_are_held_in_the_dtype_of_their_size() -> None:
    for datatype in DataType:
        assert storage_dtype(datatype).itemsize == datatype.itemsize
    assert storage_dtype(DataType.BFLOAT16) == np.uint16
    assert storage_dtype(DataType.BOOL) == np.bool_
    assert storage_dtype(DataType.INT8) == np.int8


@pytest.mark.parametrize("datatype", [*INTEGERS, DataType.FLOAT, DataType.DOUBLE])
def test_every_operation_is_numpys(datatype: DataType) -> None:
    random = np.random.default_rng(1)
    a, b = (random.integers(0, 100, 1000).astype(storage_dtype(datatype)) for _ in range(2))
    for op, operator in OPERATORS.items():
        if op is ReduceOp.AVG and not datatype.is_floating:
            continue
        out = np.zeros_like(a)
        combiner(op, datatype)(a, b, out)
        np.testing.assert_array_equal(out, operator(a, b))


@pytest.mark.parametrize("datatype", [DataType.INT32, DataType.FLOAT, *HALVES])
def test_the_result_may_replace_either_input(datatype: DataType) -> None:
    if datatype in HALVES:
        a, b = halves(datatype, np.arange(100)), halves(datatype, np.arange(100)[::-1])
    else:
        a, b = np.arange(100, dtype=storage_dtype(datatype)), np.arange(100, dtype=storage_dtype(datatype))[::-1].copy()
    expected = np.empty_like(a)
    combine = combiner(ReduceOp.SUM, datatype)
    combine(a, b, expected)
    left, right = a.copy(), b.copy()
    combine(left, b, left)
    combine(a, right, right)
    np.testing.assert_array_equal(left, expected)
    np.testing.assert_array_equal(right, expected)


def test_booleans_have_any_and_all() -> None:
    a, b, out = np.array([0, 0, 1, 1], np.bool_), np.array([0, 1, 0, 1], np.bool_), np.empty(4, np.bool_)
    combiner(ReduceOp.MAX, DataType.BOOL)(a, b, out)
    assert out.tolist() == [False, True, True, True]
    combiner(ReduceOp.MIN, DataType.BOOL)(a, b, out)
    assert out.tolist() == [False, False, False, True]


@pytest.mark.parametrize("datatype", HALVES)
@pytest.mark.parametrize("op", ReduceOp)
def test_half_precision_is_single_precision_rounded_once(op: ReduceOp, datatype: DataType) -> None:
    a, b = sample_pairs(datatype)
    out = np.empty_like(a)
    combiner(op, datatype)(a, b, out)
    with np.errstate(all="ignore"):
        exact = OPERATORS[op](wide(datatype, a), wide(datatype, b))
        nan = np.isnan(exact)
        expected = exact.astype(np.float16) if datatype is DataType.FLOAT16 else rounded_to_bfloat16(exact)
    np.testing.assert_array_equal(np.isnan(wide(datatype, out)), nan)
    bits, expected_bits = out[~nan].view(np.uint16), expected[~nan].view(np.uint16)
    if op in (ReduceOp.MAX, ReduceOp.MIN):  # the sign of a zero is open there
        bits, expected_bits = np.where(bits == 0x8000, 0, bits), np.where(expected_bits == 0x8000, 0, expected_bits)
    np.testing.assert_array_equal(bits, expected_bits)


@pytest.mark.parametrize("datatype", HALVES)
@pytest.mark.parametrize("op", ReduceOp)
def test_the_bits_are_the_same_with_torch_and_without(
    op: ReduceOp, datatype: DataType, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("torch", reason="compares torch with numpy")
    a, b = sample_pairs(datatype)
    with_torch, without = np.empty_like(a), np.empty_like(a)
    combine = combiner(op, datatype)
    assert combine.func is kernels._combine_with_torch  # type: ignore[attr-defined]
    combine(a, b, with_torch)
    request.getfixturevalue("without_torch")
    combine = combiner(op, datatype)
    assert combine.func is not kernels._combine_with_torch  # type: ignore[attr-defined]
    combine(a, b, without)
    nan = np.isnan(wide(datatype, with_torch))
    np.testing.assert_array_equal(np.isnan(wide(datatype, without)), nan)
    bits = [result[~nan].view(np.uint16) for result in (with_torch, without)]
    if op in (ReduceOp.MAX, ReduceOp.MIN):
        bits = [np.where(b == 0x8000, 0, b) for b in bits]
    np.testing.assert_array_equal(*bits)


@pytest.mark.parametrize("datatype", HALVES)
def test_bfloat16_and_float16_agree_with_ml_dtypes(datatype: DataType) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is a second opinion on bfloat16")
    dtype = np.float16 if datatype is DataType.FLOAT16 else ml_dtypes.bfloat16
    a, b = sample_pairs(datatype)
    out = np.empty_like(a)
    combiner(ReduceOp.SUM, datatype)(a, b, out)
    with np.errstate(all="ignore"):
        expected = a.view(dtype) + b.view(dtype)
    nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(out.view(np.uint16)[~nan], expected.view(np.uint16)[~nan])


@pytest.mark.parametrize("torch_there", [True, False])
@pytest.mark.parametrize("datatype", [DataType.FLOAT, DataType.DOUBLE, *HALVES])
def test_a_nan_on_either_side_wins_every_maximum_and_minimum(
    datatype: DataType, torch_there: bool, request: pytest.FixtureRequest
) -> None:
    if not torch_there:
        request.getfixturevalue("without_torch")
    pairs = [(np.nan, 1.0), (1.0, np.nan), (-np.nan, np.inf), (-np.inf, np.nan), (2.0, 1.0)] * 40
    if datatype in HALVES:
        a, b = (halves(datatype, [pair[side] for pair in pairs]) for side in (0, 1))
    else:
        a, b = (np.array([pair[side] for pair in pairs], storage_dtype(datatype)) for side in (0, 1))
    for op in (ReduceOp.MAX, ReduceOp.MIN):
        out = np.empty_like(a)
        combiner(op, datatype)(a, b, out)
        result = wide(datatype, out) if datatype in HALVES else out
        assert np.isnan(result).tolist() == [True, True, True, True, False] * 40


@pytest.mark.parametrize("datatype", [DataType.FLOAT, *HALVES])
def test_inputs_in_read_only_memory_are_read_without_a_warning_and_without_a_copy(datatype: DataType) -> None:
    dtype = storage_dtype(datatype)
    count = 3 * kernels.CHUNK + 5
    memory = mmap.mmap(-1, count * dtype.itemsize)
    one = halves(datatype, [1.0]) if datatype in HALVES else np.ones(1, dtype)
    np.frombuffer(memory, dtype)[:] = one
    a = np.frombuffer(memoryview(memory).toreadonly(), dtype)
    assert not a.flags.writeable
    out = a.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        combiner(ReduceOp.SUM, datatype)(a, a, out)
        combiner(ReduceOp.SUM, datatype)(out, a, out)
    three = halves(datatype, [3.0]) if datatype in HALVES else np.full(1, 3, dtype)
    assert (out == three).all()
    assert (a == one).all()
    assert not a.flags.writeable


@pytest.mark.parametrize("torch_there", [True, False])
@pytest.mark.parametrize("datatype", HALVES)
@pytest.mark.parametrize("count", [0, 1, kernels.CHUNK, kernels.CHUNK + 1, 64 * kernels.CHUNK + 3])
def test_half_precision_arrays_of_any_length_are_combined_to_the_end(
    datatype: DataType, count: int, torch_there: bool, request: pytest.FixtureRequest
) -> None:
    if not torch_there:
        request.getfixturevalue("without_torch")
    numbers = (np.arange(count) % 100).astype(np.float32)
    a, out = halves(datatype, numbers), np.zeros(count, storage_dtype(datatype))
    combiner(ReduceOp.SUM, datatype)(a, a, out)
    np.testing.assert_array_equal(wide(datatype, out), 2 * numbers)
    averager(datatype)(out, 4)
    np.testing.assert_array_equal(wide(datatype, out), numbers / 2)


@pytest.mark.parametrize("torch_there", [True, False])
@pytest.mark.parametrize("datatype", HALVES)
def test_widening_is_exact_and_narrowing_undoes_it(
    datatype: DataType, torch_there: bool, request: pytest.FixtureRequest
) -> None:
    if not torch_there:
        request.getfixturevalue("without_torch")
    every = np.arange(65536, dtype=np.uint32).astype(np.uint16).view(storage_dtype(datatype))
    single, back = np.empty(65536, np.float32), np.empty_like(every)
    widen(datatype, every, single)
    nan = np.isnan(single)
    np.testing.assert_array_equal(single, wide(datatype, every))
    narrow(datatype, single, back)
    np.testing.assert_array_equal(back.view(np.uint16)[~nan], every.view(np.uint16)[~nan])
    assert np.isnan(wide(datatype, back)[nan]).all()


def test_a_nan_whose_bits_would_round_to_zero_stays_a_nan(without_torch: None) -> None:
    values = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    out = np.zeros(3, np.uint16)
    narrow(DataType.BFLOAT16, values, out)
    assert np.isnan(wide(DataType.BFLOAT16, out)).all()


@pytest.mark.parametrize("datatype", [DataType.FLOAT, DataType.DOUBLE])
def test_an_average_is_divided_in_place(datatype: DataType) -> None:
    array = np.array([3.0, 1.0, -7.5], storage_dtype(datatype))
    expected = array / array.dtype.type(3)
    averager(datatype)(array, 3)
    np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("datatype", HALVES)
def test_averages_of_half_precision_have_the_same_bits_with_torch_and_without(
    datatype: DataType, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("torch", reason="compares torch with numpy")
    finite = [
        i for i in range(65536) if not np.isnan(wide(datatype, np.array([i], np.uint16).view(storage_dtype(datatype))))
    ]
    with_torch = np.array(finite, np.uint16).view(storage_dtype(datatype))
    without = with_torch.copy()
    averager(datatype)(with_torch, 3)
    request.getfixturevalue("without_torch")
    averager(datatype)(without, 3)
    np.testing.assert_array_equal(with_torch.view(np.uint16), without.view(np.uint16))


@pytest.mark.parametrize("datatype", INTEGERS)
def test_an_average_of_integers_is_refused_with_a_way_out(datatype: DataType) -> None:
    for attempt in (lambda: check_reducible(ReduceOp.AVG, datatype), lambda: averager(datatype)):
        with pytest.raises(UsageError, match=r"truncate.*SUM.*divide"):
            attempt()
    with pytest.raises(UsageError, match=datatype.name):
        combiner(ReduceOp.AVG, datatype)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PROD])
def test_arithmetic_on_booleans_is_refused_with_a_way_out(op: ReduceOp) -> None:
    with pytest.raises(UsageError, match=r"booleans.*MAX.*MIN"):
        check_reducible(op, DataType.BOOL)


def test_everything_else_is_reducible() -> None:
    for op, datatype in itertools.product(ReduceOp, DataType):
        if datatype.is_floating or (datatype in INTEGERS and op is not ReduceOp.AVG):
            check_reducible(op, datatype)


def test_an_overflow_gives_infinity_and_no_warning() -> None:
    for datatype, largest in ((DataType.FLOAT, np.finfo(np.float32).max), (DataType.FLOAT16, 65504)):
        a = np.full(3, largest, storage_dtype(datatype))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            combiner(ReduceOp.SUM, datatype)(a, a, a)
        assert np.isinf(a).all()


def test_a_lookup_costs_next_to_nothing() -> None:
    combiner(ReduceOp.SUM, DataType.FLOAT)
    best = min(timeit.repeat(lambda: combiner(ReduceOp.SUM, DataType.FLOAT), number=10_000, repeat=5)) / 10_000
    assert best < 1e-6  # 0.1 us when measured; a slow machine may take longer
    assert combiner(ReduceOp.SUM, DataType.FLOAT) is combiner(ReduceOp.SUM, DataType.FLOAT)


@pytest.mark.parametrize("datatype", [DataType.FLOAT, DataType.BFLOAT16])
def test_other_threads_run_while_large_arrays_are_combined(datatype: DataType) -> None:
    a = np.zeros(1 << 24, storage_dtype(datatype))
    combine = combiner(ReduceOp.SUM, datatype)
    combine(a, a, a)
    done = threading.Event()
    pauses: list[float] = []

    def watch() -> None:
        last = time.perf_counter()
        while not done.is_set():
            now = time.perf_counter()
            pauses.append(now - last)
            last = now

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    for _ in range(5):
        combine(a, a, a)
    took = time.perf_counter() - started
    done.set()
    watcher.join()
    # Had the lock been held, the watcher would have got a turn between the calls alone: six or so.
    assert len(pauses) > 100, (len(pauses), took)


def test_torch_is_not_imported_before_it_is_needed() -> None:
    program = (
        "import sys, numpy as np; from ray_pccl.ring.kernels import *; from ray_pccl.ring import tensors, quantization;"
        "a = np.ones(3, np.float32); combiner(ReduceOp.SUM, DataType.FLOAT)(a, a, a); tensors.as_input(a);"
        "assert not {'torch', 'cupy', 'ml_dtypes'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
