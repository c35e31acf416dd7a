from __future__ import annotations

import itertools
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ray_pccl.descriptors import DataType, QuantizationAlgorithm, QuantizationOptions
from ray_pccl.errors import UsageError
from ray_pccl.ring.kernels import narrow, widen
from ray_pccl.ring.quantization import BLOCK, GROUP, Quantizer, quantizer

Array = np.ndarray[Any, Any]
ALGORITHMS = [QuantizationAlgorithm.MIN_MAX, QuantizationAlgorithm.ZERO_POINT_SCALE]
CODES = [DataType.UINT8, DataType.INT8, DataType.UINT16, DataType.INT16]
SOURCES = [DataType.FLOAT, DataType.DOUBLE, DataType.FLOAT16, DataType.BFLOAT16]
EVERY = list(itertools.product(ALGORITHMS, CODES, SOURCES))


def make(
    algorithm: QuantizationAlgorithm = QuantizationAlgorithm.MIN_MAX,
    codes: DataType = DataType.UINT8,
    datatype: DataType = DataType.FLOAT,
) -> Quantizer:
    result = quantizer(QuantizationOptions(codes, algorithm), datatype)
    assert result is not None
    return result


def levels(codes: DataType) -> int:
    return 255 if codes.itemsize == 1 else 65535


def pack(q: Quantizer, values: Array) -> Array:
    packed = np.full(q.packed_size(values.size), 0xAA, np.uint8)
    q.quantize(values, packed)
    return packed


def unpack(q: Quantizer, packed: Array, count: int) -> Array:
    out = np.empty(count, q.compute_dtype)
    q.dequantize(packed, out, count)
    return out


def stored(q: Quantizer, values: Any) -> Array:
    """The values in the quantizer's storage dtype."""
    values = np.asarray(values, np.float64).astype(q.compute_dtype)
    if q.storage_dtype == q.compute_dtype:
        return values
    out = np.empty(values.size, q.storage_dtype)
    narrow(q.datatype, values, out)
    return out


def computed(q: Quantizer, values: Array) -> Array:
    if values.dtype == q.compute_dtype:
        return values
    out = np.empty(values.size, np.float32)
    widen(q.datatype, values, out)
    return out


def tolerance(q: Quantizer, block: Array, steps: int) -> float:
    """Half a step, and the computation's own rounding: units in the last place, and the smallest number there is."""
    wide = block.astype(np.longdouble)
    limits = np.finfo(q.compute_dtype)
    rounding = 4 * limits.eps * np.abs(wide).max() + 2 * np.longdouble(limits.smallest_subnormal)
    return (wide.max() - wide.min()) / steps / 2 * (1 + 4 * limits.eps * steps) + rounding


def assert_close(q: Quantizer, values: Array, result: Array, steps: int) -> None:
    for start in range(0, values.size, BLOCK):
        block = values[start : start + BLOCK]
        error = np.abs(block.astype(np.longdouble) - result[start : start + BLOCK].astype(np.longdouble)).max()
        assert error <= tolerance(q, block, steps), (start, error)


def random_values(count: int, seed: int = 0) -> Array:
    random = np.random.default_rng(seed)
    return random.standard_normal(count) * np.repeat(10.0 ** random.integers(-3, 3, -(-count // 1000)), 1000)[:count]


def block_values(width: int = 32) -> st.SearchStrategy[list[float]]:
    """Blocks meant to hurt: of one magnitude, of all, constant, tiny, huge, far from zero and close together."""
    single = st.floats(width=width, allow_nan=False, allow_infinity=False)
    largest = float(np.finfo(np.float32 if width == 32 else np.float64).max)
    smallest = float(np.finfo(np.float32 if width == 32 else np.float64).smallest_subnormal)
    edges = st.sampled_from([0.0, -0.0, 1.0, -1.0, largest, -largest, largest / 2, smallest, -smallest, 300 * smallest])
    near = st.builds(
        lambda center, offsets: [center + offset * abs(center) * 1e-6 for offset in offsets],
        st.floats(-(2.0**100), 2.0**100, width=32),
        st.lists(st.floats(-1, 1), min_size=1, max_size=20),
    )
    tiny = st.lists(st.integers(-2000, 2000).map(lambda i: i * smallest), min_size=1, max_size=20)
    constant = st.builds(lambda value, count: [value] * count, single | edges, st.integers(1, 30))
    return st.lists(single | edges, min_size=1, max_size=30) | near | tiny | constant


@pytest.mark.parametrize(("algorithm", "codes", "datatype"), EVERY)
def test_values_come_back_within_half_a_step(
    algorithm: QuantizationAlgorithm, codes: DataType, datatype: DataType
) -> None:
    q = make(algorithm, codes, datatype)
    for count in (1, 17, BLOCK, BLOCK + 1, (GROUP + 2) * BLOCK + 100):
        values = stored(q, random_values(count))
        assert_close(q, computed(q, values), unpack(q, pack(q, values), count), levels(codes))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("codes", [DataType.UINT8, DataType.INT16])
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_finite_values_come_back_further_off(
    algorithm: QuantizationAlgorithm, codes: DataType, data: st.DataObject
) -> None:
    for datatype, width in ((DataType.FLOAT, 32), (DataType.DOUBLE, 64)):
        q = make(algorithm, codes, datatype)
        values = np.array(data.draw(block_values(width)), np.float64).astype(q.compute_dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = unpack(q, pack(q, values), values.size)
        assert np.isfinite(result).all()
        assert_close(q, values, result, levels(codes))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=200, deadline=None)
@given(
    contributions=st.integers(1, 30).flatmap(
        lambda count: st.lists(
            st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=count, max_size=count), min_size=1, max_size=8
        )
    )
)
def test_a_sum_of_quantized_contributions_quantized_again_is_off_by_at_most_a_step_for_each(
    algorithm: QuantizationAlgorithm, contributions: list[list[float]]
) -> None:
    q = make(algorithm)
    arrays = [np.array(values, np.float32) for values in contributions]
    accumulator = np.zeros(arrays[0].size, np.float32)
    for array in arrays:
        q.add_dequantized(pack(q, array), accumulator)
    result = unpack(q, pack(q, accumulator), accumulator.size).astype(np.float64)
    exact = np.sum([array.astype(np.float64) for array in arrays], axis=0)
    widest = max(float(array.max()) - float(array.min()) for array in arrays)
    largest = max(float(np.abs(array).max()) for array in arrays)
    rounding = 32 * len(arrays) * (np.finfo(np.float32).eps * largest + float(np.finfo(np.float32).smallest_subnormal))
    assert np.abs(result - exact).max() <= len(arrays) * widest / 255 * (1 + 1e-2 / 255) + rounding


@settings(max_examples=300, deadline=None)
@given(values=block_values())
@example(values=[-127.5, 0.0, 127.5])
@example(values=[-1e-45, 0.0])
def test_zero_stays_exactly_zero_with_a_zero_point(values: list[float]) -> None:
    for codes in (DataType.UINT8, DataType.INT8):
        q = make(QuantizationAlgorithm.ZERO_POINT_SCALE, codes)
        array = np.array([*values, 0.0, -0.0], np.float64).astype(np.float32)
        assert unpack(q, pack(q, array), array.size)[-2:].tolist() == [0, 0]


@settings(max_examples=200, deadline=None)
@given(value=st.floats(width=32, allow_nan=False, allow_infinity=False), count=st.integers(1, 50))
def test_min_max_keeps_equal_values_exactly(value: float, count: int) -> None:
    q = make(QuantizationAlgorithm.MIN_MAX)
    values = np.full(count, value, np.float32)
    assert (unpack(q, pack(q, values), count) == values).all()


@pytest.mark.parametrize(("algorithm", "codes"), list(itertools.product(ALGORITHMS, CODES)))
def test_a_block_with_an_infinity_or_a_nan_comes_back_as_nan_in_whole_and_spares_its_neighbours(
    algorithm: QuantizationAlgorithm, codes: DataType
) -> None:
    q = make(algorithm, codes)
    clean = random_values(5 * BLOCK + 7).astype(np.float32)
    for bad in ([np.nan], [np.inf], [-np.inf], [np.inf, -np.inf], [-np.nan, np.inf]):
        values = clean.copy()
        values[BLOCK + 3 : BLOCK + 3 + len(bad)] = bad
        values[-len(bad) :] = bad
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            packed = pack(q, values)
            result = unpack(q, packed, values.size)
        spoilt = np.zeros(values.size, np.bool_)
        spoilt[BLOCK : 2 * BLOCK] = spoilt[5 * BLOCK :] = True
        np.testing.assert_array_equal(np.isnan(result), spoilt)
        np.testing.assert_array_equal(result[~spoilt], unpack(q, pack(q, clean), clean.size)[~spoilt])
        assert pack(q, values[::1]).tobytes() == packed.tobytes()


@pytest.mark.parametrize(("algorithm", "codes", "datatype"), EVERY)
def test_pieces_cut_at_blocks_have_the_bytes_of_the_whole(
    algorithm: QuantizationAlgorithm, codes: DataType, datatype: DataType
) -> None:
    q = make(algorithm, codes, datatype)
    count = (GROUP + 5) * BLOCK + 123
    values = stored(q, random_values(count))
    whole = pack(q, values)
    assert whole.size == q.packed_size(count)
    for cut in (1, 3, GROUP, GROUP + 5):
        left, right = pack(q, values[: cut * BLOCK]), pack(q, values[cut * BLOCK :])
        assert left.size == cut * q.block_bytes
        assert np.concatenate([left, right]).tobytes() == whole.tobytes()
    middle = unpack(q, whole[2 * q.block_bytes : 4 * q.block_bytes], 2 * BLOCK)
    np.testing.assert_array_equal(middle, unpack(q, whole, count)[2 * BLOCK : 4 * BLOCK])


def test_the_packed_bytes_of_today_are_those_of_tomorrow_and_of_every_machine() -> None:
    values = np.array([-1.0, -0.5, 0.1, 0.25, 1.0], np.float32)
    header = np.array([-1.0, np.float32(2) / np.float32(255)], np.float32).tobytes()
    assert pack(make(), values).tobytes() == header + bytes([0, 64, 140, 159, 255])
    signed = pack(make(codes=DataType.INT8), values)
    assert signed.tobytes() == header + np.array([-128, -64, 12, 31, 127], np.int8).tobytes()
    zero_point = pack(make(QuantizationAlgorithm.ZERO_POINT_SCALE), values)
    assert zero_point.view(np.uint8)[8:].tolist() == [0, 63, 140, 159, 254]
    assert zero_point[:8].view(np.float32).tolist() == [-127.0, np.float32(2) / np.float32(255)]


def test_the_order_of_zeros_of_both_signs_does_not_show() -> None:
    for algorithm in ALGORITHMS:
        q = make(algorithm)
        packed = {
            pack(q, np.array(zeros * 20, np.float32)).tobytes()
            for zeros in ([0.0, -0.0], [-0.0, 0.0], [0.0, 0.0], [-0.0, -0.0])
        }
        assert len(packed) == 1


@pytest.mark.parametrize(("algorithm", "codes", "datatype"), EVERY)
def test_adding_and_storing_are_dequantizing_first(
    algorithm: QuantizationAlgorithm, codes: DataType, datatype: DataType
) -> None:
    q = make(algorithm, codes, datatype)
    count = (GROUP + 1) * BLOCK + 50
    packed = pack(q, stored(q, random_values(count)))
    packed.flags.writeable = False
    plain = unpack(q, packed, count)
    accumulator = np.arange(count, dtype=q.compute_dtype)
    q.add_dequantized(packed, accumulator)
    np.testing.assert_array_equal(accumulator, np.arange(count, dtype=q.compute_dtype) + plain)
    out = np.empty(count, q.storage_dtype)
    q.store(packed, out)
    np.testing.assert_array_equal(out, stored(q, plain))


def test_sums_in_the_compute_dtype_are_packed_like_values() -> None:
    for datatype in (DataType.FLOAT16, DataType.BFLOAT16):
        q = make(datatype=datatype)
        values = stored(q, random_values(2 * BLOCK + 9))
        assert pack(q, values).tobytes() == pack(q, computed(q, values)).tobytes()


def test_bytes_at_odd_addresses_will_do() -> None:
    for codes in CODES:
        q = make(codes=codes)
        values = random_values(2 * BLOCK + 9).astype(np.float32)
        packed = np.zeros(q.packed_size(values.size) + 1, np.uint8)[1:]
        q.quantize(values, packed)
        assert packed.tobytes() == pack(q, values).tobytes()
        np.testing.assert_array_equal(unpack(q, packed, values.size), unpack(q, pack(q, values), values.size))


def test_nothing_packs_to_nothing() -> None:
    q = make()
    assert q.packed_size(0) == 0
    assert pack(q, np.empty(0, np.float32)).size == 0
    assert unpack(q, np.empty(0, np.uint8), 0).size == 0


def test_eight_bits_make_four_times_less_of_floats() -> None:
    assert make().packed_size(1 << 20) < (1 << 20) * 1.003
    assert make(codes=DataType.INT16).packed_size(1 << 20) < (2 << 20) * 1.003


def test_many_threads_may_use_one_quantizer() -> None:
    q = make(QuantizationAlgorithm.ZERO_POINT_SCALE, DataType.INT8, DataType.BFLOAT16)
    inputs = [stored(q, random_values(3 * GROUP * BLOCK + 5, seed)) for seed in range(4)]
    expected = [pack(q, values).tobytes() for values in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            results = list(pool.map(lambda values: pack(q, values).tobytes(), inputs))
            assert results == expected
            sums = [np.zeros(values.size, np.float32) for values in inputs]
            packs = [np.frombuffer(data, np.uint8) for data in expected]
            list(pool.map(q.add_dequantized, packs, sums))
            for data, total in zip(packs, sums, strict=True):
                np.testing.assert_array_equal(total, unpack(q, data, total.size))


def test_no_quantization_is_none_and_equal_options_share_a_quantizer() -> None:
    assert quantizer(QuantizationOptions(), DataType.INT32) is None
    assert make() is make()


@pytest.mark.parametrize("datatype", [d for d in DataType if not d.is_floating])
def test_integers_are_not_quantized(datatype: DataType) -> None:
    with pytest.raises(UsageError, match=rf"{datatype.name} values can't be quantized.*exactly"):
        make(datatype=datatype)


@pytest.mark.parametrize("codes", [d for d in DataType if d not in CODES])
def test_other_code_types_are_refused(codes: DataType) -> None:
    with pytest.raises(UsageError, match=rf"quantized_datatype is {codes.name}.*UINT8, INT8, UINT16 or INT16"):
        make(codes=codes)
