"""Groups of real peers that believe to be on hosts of their own, so that there is something to measure between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ray_pccl import Communicator, Settings
from ray_pccl.testing import PeerProcess, PeerStarter

Spread = Callable[..., list[PeerProcess]]
PATIENCE_S = 40.0


def _be_on(_: Communicator, host: str) -> None:
    """The peer takes its host for another one from now on."""
    from ray_pccl.peer import communicator

    communicator.host_id = lambda: host


@pytest.fixture
def master_settings() -> Settings:
    return Settings.from_env(None, probe_ms=100, heartbeat_timeout_s=3)


@pytest.fixture
def spread(peer_group: PeerStarter) -> Spread:
    """Makes a group of peers `p0`, `p1`, ..., each on a host of its own; of two, the later one dials.

    They run without a sentinel: there is one for the real host, and it would speak for one of theirs alone.
    """

    def make(size: int, hosts: str | None = None, **more: Any) -> list[PeerProcess]:
        given = {"last_call_s": 30.0, "op_timeout_s": PATIENCE_S, "sentinel": False} | more
        limits = {"min_world_size": 1, "max_world_size": size}
        group = peer_group(0, settings=Settings.from_env(None, **given), **limits)
        for place in range(size):
            (peer,) = group.add(connect=False, label=f"p{place}", rank=place)
            peer.run(_be_on, f"host-{hosts[place] if hosts else place}")
            peer.connect()
        for peer in group:
            peer.joined.result(PATIENCE_S)
        return list(group)

    return make
