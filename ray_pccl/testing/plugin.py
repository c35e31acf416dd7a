"""The pytest plugin: fixtures for groups of real peers, the faults that befall them, and a Ray to run them in.

Loaded into every pytest run where ray_pccl is installed, so importing it must stay cheap: no Ray, torch or numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_pccl.control.endpoint import Endpoint
from ray_pccl.settings import Settings
from ray_pccl.testing.faults import Faults
from ray_pccl.testing.groups import PeerStarter
from ray_pccl.testing.master import MasterProcess

CLUSTER_NODES = 3


@pytest.fixture
def master_settings() -> Settings:
    """The settings of `master`, the environment's by default. Override it in a test module to have others."""
    return Settings.from_env()


@pytest.fixture
def master_process(tmp_path_factory: pytest.TempPathFactory, master_settings: Settings) -> Iterator[MasterProcess]:
    """The process behind `master`: its pid, its log. At the end, no process of the test is left, or the test fails."""
    process = MasterProcess(Path(tmp_path_factory.mktemp("master")), master_settings)
    try:
        process.start()
        yield process
    finally:
        process.close()


@pytest.fixture
def master(master_process: MasterProcess) -> Endpoint:
    """The endpoint of a master in a process of its own, with a journal, so that `faults` can kill and restart it."""
    return master_process.endpoint


@pytest.fixture
def peer_group(master_process: MasterProcess) -> Iterator[PeerStarter]:
    """Makes groups of real peers, each a process of its own: a `PeerStarter`.

    ``peers = peer_group(3)`` returns when three peers have formed a group.
    """
    starter = PeerStarter(master_process.endpoint, master_process.ownership)
    try:
        yield starter
    finally:
        starter.end()


@pytest.fixture
def faults(master_process: MasterProcess, peer_group: PeerStarter) -> Faults:
    """Kills, freezes and cuts off peers and the master. See `Faults`."""
    return Faults(master_process, peer_group)


@pytest.fixture(scope="module")
def ray_local() -> Iterator[Any]:
    """The module `ray`, initialised with one local node of four CPUs for a whole test module, and shut down after it.

    A master that the tests started is stopped. Everything that Ray started is gone afterwards, or the last test fails.
    """
    from ray_pccl.testing.cluster import local_ray

    with local_ray() as ray:
        yield ray


@pytest.fixture
def ray_cluster(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A connected `ray.cluster_utils.Cluster` of three nodes on this machine, two CPUs each.

    ``@pytest.mark.parametrize("ray_cluster", [2], indirect=True)`` gives another number of nodes.
    """
    from ray_pccl.testing.cluster import ray_nodes

    with ray_nodes(getattr(request, "param", CLUSTER_NODES)) as cluster:
        yield cluster
