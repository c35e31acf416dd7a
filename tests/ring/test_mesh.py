"""What a mesh does besides links: it probes ways, serves others, and leaves a forked child nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_pccl.ring import dialing
from ray_pccl.ring.dialing import Meeting
from ray_pccl.ring.link import Link
from ray_pccl.ring.mesh import Mesh
from ray_pccl.ring.wire import Frame
from ray_pccl.testing import eventually
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


def _sockets() -> set[str]:
    """The sockets that this process holds."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(str(descriptor.readlink()))
    return {name for name in found if name.startswith("socket:")}


def _sockets_of_a_child() -> set[str]:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, "\n".join(_sockets()).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        found = set(told.read().split())
    os.waitpid(child, 0)
    return found


def test_a_child_that_is_forked_in_mid_probe_keeps_no_socket_of_it(meshes: tuple[Mesh, Mesh]) -> None:
    a, b = meshes
    quiet = _sockets()
    probing = threading.Thread(target=b.probe, args=(str(a.address), "a", Plan(4, 1.0)))
    probing.start()
    eventually(lambda: len(_sockets()) >= len(quiet) + 16, 5, "all connections of the probe are made")
    assert not _sockets_of_a_child() - quiet
    probing.join(10)


def test_a_child_that_is_forked_while_a_service_runs_keeps_no_socket_of_it(meshes: tuple[Mesh, Mesh]) -> None:
    """Neither of who asks nor of who serves; and none of a connection that has not proved itself yet."""
    a, b = meshes
    served, over = threading.Event(), threading.Event()

    def serve(_: Meeting) -> None:
        served.set()
        over.wait(10)

    a.services["wait"] = serve
    quiet = _sockets()
    with contextlib.closing(b.call_on(str(a.address), "a", "wait", 5.0).sock):
        assert served.wait(5)
        with socket.create_connection((a.address.host, a.address.port)) as stranger:
            assert stranger.recv(1)  # the other end shakes hands
            ours = f"socket:[{os.fstat(stranger.fileno()).st_ino}]"
            assert _sockets_of_a_child() - quiet == {ours}
    over.set()
