"""Groups of real peers that these tests share: one for each number of peers and transport."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ray_pccl.settings import Settings
from ray_pccl.testing import MasterProcess, PeerGroup, PeerProcess, PeerStarter

TRANSPORTS = ("auto", "tcp")
CALM = {"heartbeat_timeout_s": 10, "stall_timeout_s": 30}
"""Nobody is taken for dead by silence, however busy the machine is."""
PATIENT = {"last_call_s": 0.0, "op_timeout_s": 10.0}
PATIENCE_S = 100.0
LAST_TAG = 2_000_000
_names = itertools.count()
_FAILED = pytest.StashKey[bool]()


def on(transport: str) -> dict[str, str]:
    """The environment of peers that use a transport. Each computes on one thread: there are more peers than cores."""
    return {"RAY_PCCL_TRANSPORT": transport, "OMP_NUM_THREADS": "1"}


def over(*sizes: int, transports: tuple[str, ...] = TRANSPORTS) -> Any:
    """Runs a test with groups of these sizes over these transports."""
    both = [(transport, size) for transport in transports for size in sizes]
    names = [f"{transport}-{size}" for transport, size in both]
    return pytest.mark.parametrize("group", both, indirect=True, ids=names)


def survivable(peer_group: PeerStarter, transport: str, size: int = 3, **more: Any) -> list[PeerProcess]:
    """A group, by rank, that may lose members, down to one unless told otherwise."""
    settings = Settings.from_env(None, **{**PATIENT, "last_call_s": 30.0})
    given = {"min_world_size": 1, "max_world_size": size, "settings": settings} | more
    return sorted(peer_group(size, environment=on(transport), **given), key=lambda peer: peer.rank)


def together(
    group: Sequence[PeerProcess], function: Callable[..., Any], *args: Any, timeout: float = PATIENCE_S
) -> list[Any]:
    """Runs a function in all living peers at once; what each returned, in the group's order."""
    living = [peer for peer in group if peer.alive]
    started = [(peer, peer.run_async(function, *args)) for peer in living]
    return [peer.result_of(answer, timeout, function.__name__) for peer, answer in started]


def check(reports: list[tuple[list[str], dict[str, str]]]) -> None:
    """No peer complains, and all hold the same bits wherever they have to."""
    complaints = [f"rank {rank}: {text}" for rank, (texts, _) in enumerate(reports) for text in texts]
    assert not complaints, "\n".join(complaints[:20])
    first = reports[0][1]
    for rank, (_, digests) in enumerate(reports):
        differing = [case for case, bits in digests.items() if bits != first[case]]
        assert digests.keys() == first.keys() and not differing, f"rank {rank} differs from rank 0 in {differing[:10]}"


class Shelf:
    """The groups, made when they are first wanted."""

    def __init__(self, starter: PeerStarter) -> None:
        self._starter = starter
        self._groups: dict[tuple[str, int], PeerGroup] = {}

    def take(self, transport: str, size: int) -> PeerGroup:
        key = (transport, size)
        if key not in self._groups:
            name = f"{transport}-{size}-{next(_names)}"
            settings = Settings.from_env(None, **PATIENT)
            group = self._starter(size, environment=on(transport), peer_group=name, settings=settings)
            group._peers.sort(key=lambda peer: peer.rank)
            self._groups[key] = group
        return self._groups[key]

    def discard(self, transport: str, size: int) -> None:
        for peer in self._groups.pop((transport, size)):
            peer.end()


@pytest.fixture(scope="package")
def shared_master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterProcess]:
    """A master for all groups that no test harms."""
    process = MasterProcess(Path(tmp_path_factory.mktemp("master")), Settings.from_env(None, **CALM))
    try:
        process.start()
        yield process
    finally:
        process.close()


@pytest.fixture(scope="package")
def shelf(shared_master: MasterProcess) -> Iterator[Shelf]:
    starter = PeerStarter(shared_master.endpoint, shared_master.ownership)
    try:
        yield Shelf(starter)
    finally:
        starter.end()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Notes which tests have failed: their groups are of no use to others."""
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report


@pytest.fixture
def group(request: pytest.FixtureRequest, shelf: Shelf) -> Iterator[PeerGroup]:
    """A group of peers, by rank, that the test must leave in working order: see `over`."""
    transport, size = request.param
    peers = shelf.take(transport, size)
    before = peers[0].epoch
    yield peers
    if request.node.stash.get(_FAILED, False):
        shelf.discard(transport, size)
        return
    try:
        peers.call("barrier", tag=LAST_TAG, timeout=10)
        assert {peer.epoch for peer in peers} == {before}, _history(peers)
    except BaseException:
        shelf.discard(transport, size)
        raise


def _history(peers: PeerGroup) -> str:
    events = [stamped.event for stamped in peers[0].events()]
    return "\n".join(f"epoch {e.epoch}: {e.change.value} {e.peer_id or ''} {e.reason}" for e in events)


@pytest.fixture
def master_settings() -> Settings:
    """Also the groups that tests do harm to are calm: a death is seen by its signal."""
    return Settings.from_env(None, **CALM)
