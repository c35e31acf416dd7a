"""Many all-reduces at once: PCCL's `all_reduce_multiple_with_retry`, and the loop that does the same by hand."""

from __future__ import annotations

import pytest

from ray_pccl.testing import Faults, PeerGroup, PeerStarter, eventually
from tests.collectives import seeded
from tests.collectives.calls import is_inside
from tests.collectives.conftest import TRANSPORTS, over, survivable, together


@pytest.mark.parametrize(("number", "max_in_flight"), [(40, 16), (5, 1), (64, 64), (1, 16)])
@over(2)
def test_the_recommended_function_of_the_seed_runs_unchanged(group: PeerGroup, number: int, max_in_flight: int) -> None:
    assert not any(together(group, seeded.recommended, number, max_in_flight))


@pytest.mark.parametrize(("number", "max_in_flight"), [(16, 16), (7, 16), (1, 1)])
@over(2)
def test_the_manual_loop_of_the_seed_runs_unchanged(group: PeerGroup, number: int, max_in_flight: int) -> None:
    assert not any(together(group, seeded.manual, number, max_in_flight))


@over(2)
def test_arrays_may_be_reduced_out_of_place_from_an_iterator(group: PeerGroup) -> None:
    assert not any(together(group, seeded.numpy_descriptors, 30, 8))


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_both_functions_of_the_seed_finish_with_the_survivors(
    peer_group: PeerStarter, faults: Faults, transport: str, by_hand: bool
) -> None:
    *survivors, victim = survivable(peer_group, transport)
    number = 12
    started = [
        peer.run_async(seeded.loses_a_peer, by_hand, float(2**place), number) for place, peer in enumerate(survivors)
    ]
    for peer in survivors:
        eventually(lambda peer=peer: all(peer.run(is_inside, tag) for tag in range(number)), 20, "all are in flight")
    faults.kill(victim)
    for future in started:
        assert future.result(30) == (True, [3.0] * number)


def test_alone_both_functions_of_the_seed_return(peer_group: PeerStarter) -> None:
    (peer,) = peer_group(1)
    recommended, by_hand = peer.run(seeded.alone)
    assert recommended == (True, 0, 0) and by_hand is False
