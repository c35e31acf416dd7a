"""Ray for tests: one node, or several on this machine, with nothing left behind."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ray_pccl.testing.ownership import Ownership

_OBJECT_STORE_BYTES = 100 << 20


@contextlib.contextmanager
def local_ray(num_cpus: int = 4) -> Iterator[Any]:
    """A Ray of one node, for this process alone; gives the module `ray`."""
    import ray

    with _fresh(ray) as directory:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=directory,
        )
        yield ray


@contextlib.contextmanager
def ray_nodes(count: int, num_cpus: int = 2) -> Iterator[Any]:
    """A Ray of several nodes, each a raylet on this machine; gives the `ray.cluster_utils.Cluster`, connected."""
    import ray
    from ray.cluster_utils import Cluster

    with _fresh(ray) as directory:
        arguments: dict[str, Any] = {
            "num_cpus": num_cpus,
            "object_store_memory": _OBJECT_STORE_BYTES,
            "include_dashboard": False,
        }
        # Ray writes the head's address there, and takes it for granted that an earlier Ray has made the directory.
        Path(ray._common.utils.get_default_ray_temp_dir()).mkdir(parents=True, exist_ok=True)  # type: ignore[no-untyped-call]
        cluster: Any = Cluster(initialize_head=True, head_node_args={**arguments, "temp_dir": directory})
        try:
            for _ in range(count - 1):
                cluster.add_node(**arguments)
            # Not Cluster.connect(): it would print the output of every worker.
            ray.init(address=cluster.address, log_to_driver=False)
            yield cluster
        finally:
            _stop(ray)
            cluster.shutdown()


@contextlib.contextmanager
def _fresh(ray: Any) -> Iterator[str]:
    """A directory for Ray; afterwards Ray, the master in it, the directory and all processes are gone."""
    if ray.is_initialized():
        raise RuntimeError("Ray runs in this process already: use one of ray_local and ray_cluster in a module")
    # Right under /tmp: Ray's sockets are in it, and the path of a socket has at most 107 bytes.
    directory = tempfile.mkdtemp(prefix="rp-", dir="/tmp")
    ownership = Ownership()
    try:
        with ownership.adopt():
            yield directory
    finally:
        _stop(ray)
        try:
            ownership.wait_until_gone()
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def _stop(ray: Any) -> None:
    from ray_pccl.driver.master import stop_master

    if ray.is_initialized():
        try:
            stop_master()
        finally:
            ray.shutdown()
