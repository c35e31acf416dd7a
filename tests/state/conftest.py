"""Groups of real peers that hold a state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from ray_pccl.settings import Settings
from ray_pccl.testing import PeerGroup, PeerProcess, PeerStarter, eventually
from tests.state.programs import Content, Outcome, hold, sync

OVER_BOTH = pytest.mark.parametrize("transport", ["auto", "tcp"])
PATIENCE_S = 60.0
Crowd = Callable[..., list[PeerProcess]]


@pytest.fixture
def transport() -> str:
    return "auto"


@pytest.fixture
def master_settings() -> Settings:
    """A death is seen by its signal, a stop after a while; nobody is taken for dead because the machine is busy."""
    return Settings.from_env(None, heartbeat_timeout_s=4, stall_timeout_s=60)


class Crew:
    """A group, by rank, to which more may be added."""

    def __init__(self, group: PeerGroup) -> None:
        self._group = group
        self.peers = sorted(group, key=lambda peer: peer.rank)

    def admit(self, count: int = 1) -> list[PeerProcess]:
        """Lets newcomers in: all members vote. By rank, which need not be the order in which they came."""
        members = [peer for peer in self.peers if peer.alive]
        added = self._group.add(count)
        eventually(lambda: members[0].call("num_waiting") == count, PATIENCE_S, "the newcomers wait")
        for vote in [peer.call_async("update_topology") for peer in members]:
            vote.result(PATIENCE_S)
        for peer in added:
            peer.joined.result(PATIENCE_S)
        added.sort(key=lambda peer: peer.rank)
        self.peers += added
        return added


@pytest.fixture
def crew(peer_group: PeerStarter, transport: str) -> Callable[..., Crew]:
    def make(size: int = 3, **more: Any) -> Crew:
        settings = Settings.from_env(None, last_call_s=30.0, op_timeout_s=20.0, join_timeout_s=30.0)
        given = {"min_world_size": 1, "expected_world_size": size, "settings": settings} | more
        environment = {"RAY_PCCL_TRANSPORT": transport, "OMP_NUM_THREADS": "1"}
        return Crew(peer_group(size, environment=environment, **given))

    return make


def give(peers: Sequence[PeerProcess], contents: Sequence[Content]) -> list[str]:
    """Has each peer hold a state; their digests."""
    return [peer.run(hold, content) for peer, content in zip(peers, contents, strict=True)]


def start_sync(peers: Sequence[PeerProcess], strategies: Sequence[str] = (), step: int = 0) -> list[Future[Outcome]]:
    names = strategies or ["ENFORCE_POPULAR"] * len(peers)
    return [peer.run_async(sync, name, step) for peer, name in zip(peers, names, strict=True)]


def all_sync(peers: Sequence[PeerProcess], strategies: Sequence[str] = (), step: int = 0) -> list[Outcome]:
    """Has all peers synchronise; what came of it."""
    return [future.result(PATIENCE_S) for future in start_sync(peers, strategies, step)]


def agree(outcomes: Sequence[Outcome]) -> str:
    """All succeeded, and hold the same; its digest."""
    assert not [outcome for outcome in outcomes if outcome.error], outcomes
    assert len({(outcome.after, outcome.revision) for outcome in outcomes}) == 1, outcomes
    return outcomes[0].after


def all_failed(outcomes: Sequence[Outcome], error: str) -> None:
    """All raised this, and hold what they held."""
    assert [outcome.error for outcome in outcomes] == [error] * len(outcomes), outcomes
    assert all(outcome.after == outcome.before for outcome in outcomes)
