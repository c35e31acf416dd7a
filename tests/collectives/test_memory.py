"""What operations need besides the user's tensors (PSS): little out of place, one tensor more in place."""

from __future__ import annotations

import pytest

from ray_pccl.testing import PeerGroup
from tests.collectives import programs
from tests.collectives.conftest import over, together

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
MIB = 1 << 20
SIZES = pytest.mark.parametrize(("number", "nbytes"), [(1, 16 * MIB), (1, 256 * MIB), (64, 4 * MIB)])


def _in_mib(sizes: list[int]) -> list[int]:
    return [round(size / MIB) for size in sizes]


@SIZES
@over(2, 3)
def test_out_of_place_64_mib_are_enough_for_any_size(group: PeerGroup, number: int, nbytes: int) -> None:
    needed = together(group, programs.memory_beyond_tensors, "all_reduce", number, nbytes, False)
    assert max(needed) <= 64 * MIB, _in_mib(needed)


@SIZES
@over(2)
def test_in_place_one_tensor_more_is_enough(group: PeerGroup, number: int, nbytes: int) -> None:
    needed = together(group, programs.memory_beyond_tensors, "all_reduce", number, nbytes, True)
    assert max(needed) <= 64 * MIB + number * nbytes, _in_mib(needed)


@pytest.mark.parametrize("kind", ["reduce", "reduce_scatter"])
@over(2)
def test_other_reductions_need_no_more(group: PeerGroup, kind: str) -> None:
    needed = together(group, programs.memory_beyond_tensors, kind, 1, 256 * MIB, False)
    assert max(needed) <= 64 * MIB, _in_mib(needed)
