"""What a mesh does besides links: it probes ways, serves others, and leaves a forked child nothing."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from ray_pccl.ring import dialing
from ray_pccl.ring.link import Link
from ray_pccl.ring.mesh import Mesh
from ray_pccl.ring.wire import Frame
from ray_pccl.topology.probing import Direction, Plan

BRIEFLY = Plan(2, 0.1)


class Owner:
    """Takes what a mesh tells, and does nothing."""

    def control(self, link: Link, frame: Frame, body: bytes) -> None: ...

    def destination(self, link: Link, frame: Frame) -> memoryview | None: ...

    def data(self, link: Link, frame: Frame, body: memoryview | None) -> None: ...

    def met(self, link: Link, fds: list[int]) -> None: ...

    def parted(self, link: Link, error: Exception) -> None: ...

    def missed(self, peer_id: str) -> None: ...

    def tick(self, now: float) -> None: ...

    def over(self) -> None: ...


@pytest.fixture
def meshes() -> Iterator[tuple[Mesh, Mesh]]:
    both = Mesh(Owner(), "a", bytes(32), "127.0.0.1", "tcp", []), Mesh(Owner(), "b", bytes(32), "127.0.0.1", "tcp", [])
    for mesh in both:
        mesh.start()
    yield both
    for mesh in both:
        mesh.close()


def test_a_probe_measures_both_directions(meshes: tuple[Mesh, Mesh]) -> None:
    a, b = meshes
    rates = b.probe(str(a.address), "a", BRIEFLY)
    assert rates[Direction.THERE] and rates[Direction.BACK]


def test_a_listener_that_is_gone_makes_an_edge_useless(meshes: tuple[Mesh, Mesh]) -> None:
    a, b = meshes
    a.close()
    assert b.probe(str(a.address), "a", BRIEFLY) == {Direction.THERE: 0.0, Direction.BACK: 0.0}


@pytest.mark.parametrize(
    ("error", "rate"),
    [
        (TimeoutError("timed out"), 0.0),
        (OSError(errno.ECONNREFUSED, ""), 0.0),
        (OSError(errno.EHOSTUNREACH, ""), 0.0),
        (OSError(errno.ENETUNREACH, ""), 0.0),
        (OSError(errno.EPERM, ""), 0.0),
        (OSError(errno.EACCES, ""), 0.0),
        (OSError(errno.EMFILE, ""), None),
        (OSError(errno.ENFILE, ""), None),
        (OSError(errno.ENOBUFS, ""), None),
        (OSError(errno.EADDRNOTAVAIL, ""), None),
    ],
    ids=lambda value: errno.errorcode.get(value.errno, "timeout") if isinstance(value, OSError) else str(value),
)
def test_only_what_the_network_says_makes_an_edge_useless_and_this_sides_own_trouble_leaves_it_unknown(
    meshes: tuple[Mesh, Mesh], monkeypatch: pytest.MonkeyPatch, error: OSError, rate: float | None
) -> None:
    def fails(*_: object) -> None:
        raise error

    a, b = meshes
    monkeypatch.setattr(dialing, "connect", fails)
    assert b.probe(str(a.address), "a", BRIEFLY) == {Direction.THERE: rate, Direction.BACK: rate}
