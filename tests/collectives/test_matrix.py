"""Every collective, type, library, size and layout: the right values, the same bits on every peer."""

from __future__ import annotations

import pytest

from ray_pccl.testing import PeerGroup
from tests.collectives import programs
from tests.collectives.conftest import check, over, together
from tests.collectives.values import BOOL, FLOATS, HALVES, INTEGERS, WITHOUT_TORCH

EVERY_KIND = pytest.mark.parametrize("kind", programs.KINDS)


@EVERY_KIND
@over(2, 3, 4)
def test_small_arrays_of_every_layout_come_out_right(group: PeerGroup, kind: str) -> None:
    dtypes = WITHOUT_TORCH if len(group) == 3 else ("int8", "uint16", "float32", "float64", "bool")
    check(together(group, programs.small, kind, ("numpy",), dtypes))


@EVERY_KIND
@over(2, 3, 4)
def test_arrays_around_every_threshold_come_out_right(group: PeerGroup, kind: str) -> None:
    dtypes = ("float32", "int8", "int64") if len(group) == 3 else ("float32",)
    check(together(group, programs.large, kind, ("numpy",), dtypes))


@EVERY_KIND
@over(3)
def test_torch_tensors_and_half_precision_come_out_right(group: PeerGroup, kind: str) -> None:
    check(together(group, programs.small, kind, ("torch",), (*BOOL, *INTEGERS, *HALVES, *FLOATS)))
    check(together(group, programs.small, kind, ("numpy",), ("float16",)))
    check(together(group, programs.large, kind, ("torch",), ("bfloat16",)))


@over(2, 3)
def test_nobody_leaves_a_barrier_before_all_have_come(group: PeerGroup) -> None:
    for times in zip(*together(group, programs.barriers, 12), strict=True):
        assert max(entered for entered, _ in times) <= min(left for _, left in times)
