from pathlib import Path

import pytest

import ray_pccl
from ray_pccl.testing import eventually
from ray_pccl.testing.cluster import local_ray
from tests.ray.peers import get, start

pytestmark = pytest.mark.ray


def sentinel_sockets(master_id: str) -> list[str]:
    return [line for line in Path("/proc/net/unix").read_text().splitlines() if f"@ray_pccl/{master_id}/" in line]


def shared_memory() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir() if "pccl" in entry.name}


def test_nothing_is_left_when_ray_is_gone_though_nobody_said_goodbye() -> None:
    shared_before = shared_memory()
    with local_ray(num_cpus=1) as ray:
        ray_pccl.start_master()
        peers = start(2, peer_group="g", min_world_size=2)
        master_id = get(peers[0].master_id.remote())
        sentinel_is_there = bool(eventually(lambda: sentinel_sockets(master_id)))
        session = Path(ray._private.worker._global_node.get_session_dir_path())

    assert sentinel_is_there
    assert not sentinel_sockets(master_id)
    assert shared_memory() <= shared_before
    assert not session.parent.exists()
