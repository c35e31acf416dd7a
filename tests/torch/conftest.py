"""A master and a process that has imported torch, for all tests of process groups."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ray_pccl.testing.master import MasterProcess
from tests.torch.zygote import Zygote


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Runs functions on ranks of a process group, under one master for all tests."""
    master = MasterProcess(tmp_path_factory.mktemp("zygote"))
    try:
        master.start()
        ranks = Zygote({"RAY_PCCL_MASTER": str(master.endpoint), "OMP_NUM_THREADS": "1"})
        try:
            yield ranks
        finally:
            ranks.close()
    finally:
        master.close()
