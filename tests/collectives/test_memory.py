"""What operations need besides the user's tensors (PSS): little out of place, one tensor more in place."""

from __future__ import annotations

import pytest

from ray_pccl.testing import PeerStarter
from tests.collectives import programs
from tests.collectives.conftest import TRANSPORTS, survivable, together

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.parametrize("transport", TRANSPORTS)]
MIB = 1 << 20
SIZES = pytest.mark.parametrize(("number", "nbytes"), [(1, 16 * MIB), (1, 256 * MIB), (64, 4 * MIB)])


def _needed(
    peer_group: PeerStarter, transport: str, size: int, kind: str, number: int, nbytes: int, in_place: bool = False
) -> list[float]:
    """MiB that each peer of a fresh group needs: what it has used before counts as used."""
    peers = survivable(peer_group, transport, size)
    needed = together(peers, programs.memory_beyond_tensors, kind, number, nbytes, in_place)
    return [round(bytes_ / MIB, 1) for bytes_ in needed]


@SIZES
@pytest.mark.parametrize("size", [2, 3])
def test_out_of_place_64_mib_are_enough_for_any_size(
    peer_group: PeerStarter, transport: str, size: int, number: int, nbytes: int
) -> None:
    needed = _needed(peer_group, transport, size, "all_reduce", number, nbytes)
    assert max(needed) <= 64, needed


@SIZES
def test_in_place_one_tensor_more_is_enough(peer_group: PeerStarter, transport: str, number: int, nbytes: int) -> None:
    needed = _needed(peer_group, transport, 2, "all_reduce", number, nbytes, in_place=True)
    assert max(needed) <= 64 + number * nbytes / MIB, needed


@pytest.mark.parametrize("kind", ["reduce", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("size", [2, 3])
def test_other_collectives_need_no_more(peer_group: PeerStarter, transport: str, size: int, kind: str) -> None:
    needed = _needed(peer_group, transport, size, kind, 1, size * 96 * MIB)
    assert max(needed) <= 64, needed
