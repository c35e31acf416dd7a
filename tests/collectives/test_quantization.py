"""Eight bits on their way: really applied, within bounds, the same bits on every peer and over every transport."""

from __future__ import annotations

import pytest

from ray_pccl import DataType, QuantizationAlgorithm
from ray_pccl.testing import PeerGroup
from tests.collectives import quantized
from tests.collectives.conftest import Shelf, check, over, together

ALGORITHMS = [QuantizationAlgorithm.MIN_MAX, QuantizationAlgorithm.ZERO_POINT_SCALE]
BOTH = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.name)


@BOTH
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@over(2, 3)
def test_sums_are_off_by_no_more_than_is_promised(
    group: PeerGroup, dtype: str, algorithm: QuantizationAlgorithm
) -> None:
    check(together(group, quantized.sums, "numpy", dtype, algorithm, DataType.UINT8))


@BOTH
@pytest.mark.parametrize("code", [DataType.INT8, DataType.UINT16], ids=lambda code: code.name)
@over(2)
def test_other_codes_keep_their_bounds(group: PeerGroup, code: DataType, algorithm: QuantizationAlgorithm) -> None:
    check(together(group, quantized.sums, "numpy", "float32", algorithm, code))


@BOTH
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@over(3)
def test_half_precision_is_quantised_too(group: PeerGroup, dtype: str, algorithm: QuantizationAlgorithm) -> None:
    check(together(group, quantized.sums, "torch", dtype, algorithm, DataType.UINT8))


@BOTH
@pytest.mark.parametrize("size", [2, 3])
def test_every_transport_gives_the_same_bits(shelf: Shelf, size: int, algorithm: QuantizationAlgorithm) -> None:
    digests = []
    for transport in ("auto", "tcp"):
        reports = together(shelf.take(transport, size), quantized.sums, "numpy", "float32", algorithm, DataType.UINT8)
        digests += [report[1] for report in reports]
    assert all(one == digests[0] for one in digests)


@over(3)
def test_other_ops_are_quantised_within_their_bounds(group: PeerGroup) -> None:
    assert not any(together(group, quantized.other_ops))


@BOTH
@over(2)
def test_blocks_of_equal_values_stay_as_they_are(group: PeerGroup, algorithm: QuantizationAlgorithm) -> None:
    assert not any(together(group, quantized.zeros, algorithm))
