from typing import Any

import pytest

import ray_pccl
from tests.ray.peers import call_all, end, get, start

pytestmark = pytest.mark.ray


def test_peers_on_three_nodes_are_one_group(ray_cluster: Any) -> None:
    ray_pccl.start_master()
    peers = start(3, {"num_cpus": 2, "scheduling_strategy": "SPREAD"}, peer_group="spread", min_world_size=3)

    assert len(set(get([peer.node.remote() for peer in peers]))) == 3
    assert sorted(call_all(peers, "rank")) == [0, 1, 2]
    assert call_all(peers, "store.add", "arrived", 1)
    assert call_all(peers, "store.get", "arrived", 5) == [b"3"] * 3
    call_all(peers, "update_topology")
    call_all(peers, "update_topology")
    assert len(set(call_all(peers, "epoch"))) == 1
    end(peers)
