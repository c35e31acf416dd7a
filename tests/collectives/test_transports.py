"""`RAY_PCCL_TRANSPORT`: which way bytes take."""

from __future__ import annotations

import pytest

from ray_pccl import SettingsError
from ray_pccl.testing import PeerProcess, PeerStarter
from tests.collectives import programs
from tests.collectives.conftest import check, on, over, together


def _uses_memory(peer: PeerProcess) -> bool:
    return bool(peer.run(lambda comm: comm._running._plane._host is not None))


@over(2)
def test_peers_of_one_host_share_memory_unless_told_otherwise(request: pytest.FixtureRequest, group: list) -> None:
    check(together(group, programs.meet, "numpy", "float32"))
    told = request.node.callspec.params["group"][0]
    assert [_uses_memory(peer) for peer in group] == [told == "auto"] * 2


def test_shm_may_be_asked_for(peer_group: PeerStarter) -> None:
    peers = peer_group(2, environment=on("shm"))
    check(together(peers, programs.meet, "numpy", "float32"))
    assert all(_uses_memory(peer) for peer in peers)


def test_one_that_asks_for_tcp_has_the_whole_group_use_links(peer_group: PeerStarter) -> None:
    groups = [
        peer_group(1, environment=on(transport), connect=False, min_world_size=3)
        for transport in ("auto", "tcp", "auto")
    ]
    peers = [group[0] for group in groups]
    for peer in peers:
        peer.connect()
    for peer in peers:
        peer.result_of(peer.joined, 20, "connect()")
    peers.sort(key=lambda peer: peer.rank)
    for kind in ("all_reduce", "broadcast", "all_to_all"):
        check(together(peers, programs.large, kind, ("numpy",), ("float32",)))
    assert not any(_uses_memory(peer) for peer in peers)


def test_another_transport_is_refused_by_connect(peer_group: PeerStarter) -> None:
    (peer,) = peer_group(1, environment=on("pigeon"), connect=False)
    with pytest.raises(SettingsError, match=r"RAY_PCCL_TRANSPORT='pigeon'.*auto, shm, tcp"):
        peer.call("connect")
