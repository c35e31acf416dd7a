"""`optimize_topology()` and `topology()` among real peers: what they return, and who may die, hang or stay away."""

from __future__ import annotations

import signal
import time
from concurrent.futures import Future
from typing import Any

import pytest

from ray_pccl import Communicator, NoRingError, OperationTimeoutError
from ray_pccl.testing import Faults, PeerProcess, PeerProcessEndedError, eventually
from tests.topology.conftest import PATIENCE_S, Spread


def _optimize(peers: list[PeerProcess], *args: Any) -> list[Future[Any]]:
    return [peer.call_async("optimize_topology", *args) for peer in peers]


def _all_return(calls: list[Future[Any]]) -> None:
    for call in calls:
        call.result(PATIENCE_S)


def _sum(communicator: Communicator) -> tuple[float, tuple[str, ...]]:
    """What an all-reduce that goes around the ring makes of a one from everyone."""
    import numpy as np

    values = np.ones(300_000, np.float32)
    info = communicator.all_reduce(values)
    assert values.min() == values.max()
    return float(values[0]), info.contributors


def _can_go_on(peers: list[PeerProcess]) -> None:
    """All are in the same ring, and it works."""
    assert len({peer.members for peer in peers}) == 1
    sums = [call.result(PATIENCE_S) for call in [peer.run_async(_sum) for peer in peers]]
    assert sums == [(float(len(peers)), peers[0].members)] * len(peers)


def _strike_at(_: Communicator, point: str, number: int) -> None:
    """A signal hits this process when it comes to the point for the first time."""
    import os

    from ray_pccl.ring import fault_points

    def strike(name: str) -> None:
        if name == point:
            fault_points.install(None)
            os.kill(os.getpid(), number)

    fault_points.install(strike)


def _optimize_noting_progress(communicator: Communicator) -> list[Any]:
    seen: list[Any] = []
    communicator.optimize_topology(on_progress=seen.append)
    return seen


# ------------------------------------------------------------------------------------------------------ what it does


def test_all_edges_between_hosts_are_measured_once_and_the_hosts_peers_are_neighbours(spread: Spread) -> None:
    peers = spread(6, hosts="ababab")
    _all_return(_optimize(peers))
    topology = peers[0].call("topology")
    assert topology.order == peers[0].members and len(topology.matrix) == 30
    hosts = [topology.hosts[peer_id] for peer_id in topology.order]
    assert sum(near != far for near, far in zip(hosts, hosts[1:] + hosts[:1], strict=True)) == 2
    slowest = min(rate for rate in topology.matrix.values())
    assert 0 < slowest <= topology.bottleneck < float("inf") and 0 <= topology.age_s < 30
    assert {peer.epoch for peer in peers} == {2}
    _can_go_on(peers)
    before = time.monotonic()
    _all_return(_optimize(peers))  # all is known, and the ring is in order
    assert {peer.epoch for peer in peers} == {2} and time.monotonic() - before < 5
    assert peers[0].call("topology").matrix == topology.matrix


def test_progress_is_the_same_on_all_and_ends_where_it_should(spread: Spread) -> None:
    peers = spread(4)
    seen = [call.result(PATIENCE_S) for call in [peer.run_async(_optimize_noting_progress) for peer in peers]]
    assert seen[1:] == seen[:-1]
    probing = [(step.probed, step.to_probe) for step in seen[0] if step.stage == "probing"]
    assert probing == [(0, 12), (4, 12), (8, 12), (12, 12)]
    assert [step.stage for step in seen[0]][len(probing) :] in (["solving"], ["solving", "linking"])


def test_peers_of_one_host_measure_nothing(spread: Spread) -> None:
    peers = spread(3, hosts="aaa")
    steps = [call.result(PATIENCE_S) for call in [peer.run_async(_optimize_noting_progress) for peer in peers]]
    assert steps == [[], [], []]
    assert peers[0].epoch == 1 and peers[0].call("topology").bottleneck is None


# --------------------------------------------------------------------------------------------------------- who dies


@pytest.mark.parametrize(("victim", "point"), [(3, "probing"), (0, "probed"), (2, "probing"), (1, "probed")])
def test_a_peer_killed_in_mid_probe_is_left_out_and_all_others_return(spread: Spread, victim: int, point: str) -> None:
    peers = spread(4)
    peers[victim].run(_strike_at, point, signal.SIGKILL)
    calls = _optimize(peers)
    with pytest.raises(PeerProcessEndedError):
        calls[victim].result(PATIENCE_S)
    survivors = [peer for place, peer in enumerate(peers) if place != victim]
    _all_return([call for place, call in enumerate(calls) if place != victim])
    topology = survivors[0].call("topology")
    assert set(topology.order) == {peer.peer_id for peer in survivors} and len(topology.matrix) == 6
    _can_go_on(survivors)


@pytest.mark.parametrize(("victim", "point"), [(2, "probing"), (0, "probed")])
def test_a_peer_frozen_in_mid_probe_is_evicted_and_all_others_return(
    spread: Spread, faults: Faults, victim: int, point: str
) -> None:
    peers = spread(3)
    peers[victim].run(_strike_at, point, signal.SIGSTOP)
    calls = _optimize(peers)
    survivors = [peer for place, peer in enumerate(peers) if place != victim]
    _all_return([call for place, call in enumerate(calls) if place != victim])
    _can_go_on(survivors)
    faults.resume(peers[victim])
    with pytest.raises(Exception, match="evicted"):
        calls[victim].result(PATIENCE_S)


def test_the_master_killed_in_mid_probe_is_followed_by_one_that_goes_on(spread: Spread, faults: Faults) -> None:
    peers = spread(4)
    calls = _optimize(peers)
    eventually(lambda: any(peers[0].call("topology").matrix), 10, "something was measured")
    faults.kill_master()
    _all_return(calls)
    assert len(peers[0].call("topology").matrix) == 12
    _can_go_on(peers)


def test_what_was_measured_is_known_to_a_restarted_master(spread: Spread, faults: Faults) -> None:
    peers = spread(3)
    _all_return(_optimize(peers))
    before = peers[0].call("topology")
    faults.kill_master()
    eventually(lambda: peers[0].call("topology").matrix == before.matrix, 10, "the peers have told it again")
    again = peers[0].call("topology")
    assert again.age_s >= before.age_s and again.order == before.order
    steps = [call.result(PATIENCE_S) for call in [peer.run_async(_optimize_noting_progress) for peer in peers]]
    assert all(step.stage != "probing" for step in steps[0])


# ------------------------------------------------------------------------------------------------------- what fails


def test_a_member_that_never_calls_is_named_on_all_others(spread: Spread) -> None:
    peers = spread(3)
    calls = _optimize(peers[:2], 1.0)
    for call in calls:
        with pytest.raises(OperationTimeoutError) as caught:
            call.result(PATIENCE_S)
        assert caught.value.calls[peers[2].peer_id] == "no call known to the master"
    _all_return(_optimize(peers))
    _can_go_on(peers)


def _refuse_progress(communicator: Communicator) -> None:
    def refuse(step: object) -> None:
        raise ValueError("enough")

    communicator.optimize_topology(on_progress=refuse)


def test_a_callback_that_raises_takes_its_own_peer_out_of_the_call_alone(spread: Spread) -> None:
    peers = spread(3)
    calls = _optimize(peers[:2], 2.0)
    with pytest.raises(ValueError, match="enough"):
        peers[2].run(_refuse_progress)
    for call in calls:
        with pytest.raises(OperationTimeoutError):
            call.result(PATIENCE_S)
    _all_return(_optimize(peers))
    _can_go_on(peers)


def _cannot_reach(_: Communicator, label: str, *, mended: bool = False) -> None:
    """Probes of this peer to another find no way, until it is mended."""
    from ray_pccl.ring.mesh import Mesh
    from ray_pccl.topology.probing import UnreachableError

    right = getattr(Mesh._dial_probe, "right", Mesh._dial_probe)

    def dial(self: Mesh, address: str, peer_id: str) -> Any:
        if peer_id.startswith(label):
            raise UnreachableError("no route to host")
        return right(self, address, peer_id)

    dial.right = right  # type: ignore[attr-defined]
    Mesh._dial_probe = right if mended else dial  # type: ignore[method-assign]


def test_an_edge_that_cannot_connect_is_avoided(spread: Spread) -> None:
    peers = spread(4)
    peers[1].run(_cannot_reach, "p0")  # neighbours now
    _all_return(_optimize(peers))
    topology = peers[0].call("topology")
    zero, one = (peer.peer_id for peer in peers[:2])
    assert topology.matrix[one, zero] == topology.matrix[zero, one] == 0
    order = topology.order
    assert abs(order.index(zero) - order.index(one)) == 2
    _can_go_on(peers)


def _mend(communicator: Communicator, label: str) -> None:
    _cannot_reach(communicator, label, mended=True)


def test_no_ring_without_such_edges_is_an_error_on_all_that_names_them_until_it_is_mended(spread: Spread) -> None:
    peers = spread(3)
    peers[2].run(_cannot_reach, "p0")
    zero, two = peers[0].peer_id, peers[2].peer_id
    for call in _optimize(peers):
        with pytest.raises(NoRingError) as caught:
            call.result(PATIENCE_S)
        assert caught.value.edges and set(caught.value.edges) <= {(zero, two), (two, zero)}
    assert {peer.epoch for peer in peers} == {1}
    _can_go_on(peers)
    peers[2].run(_mend, "p0")
    _all_return(_optimize(peers))
    _can_go_on(peers)


def test_a_newcomer_that_has_optimized_with_the_others_votes_with_them_in_the_next_update(spread: Spread) -> None:
    peers = spread(2)
    _all_return(_optimize(peers))
    calls = [peer.call_async("update_topology", 10.0) for peer in peers]
    _all_return(calls)  # were the first one since the admission absorbed, one would wait for the other
    late = peers[0].call_async("update_topology", 0.5)
    with pytest.raises(OperationTimeoutError):
        late.result(PATIENCE_S)
