"""A master for a program that has none: a process that outlives the rank that starts it, and ends by itself."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys

from ray_pccl.control.endpoint import Endpoint
from ray_pccl.errors import MasterUnreachableError
from ray_pccl.ring.dialing import address_towards

LOOPBACK = "127.0.0.1"
_ELSEWHERE = "192.0.2.1"
"""An address that nobody has (RFC 5737), so that the way to it is the way out."""
START_S = 60.0
"""How long it may take to say where it listens."""
LINGER_S = 1.0
"""How long it stays when its last peer has gone."""


def start_master_process(meeting_host: str) -> Endpoint:
    """Starts a master that listens where ranks on the hosts that reach `meeting_host` reach this one.

    A thread would die with this process, and the survivors of that death could not be told of it.
    """
    command = [sys.executable, "-m", "master_actor", "--host", _own_address(meeting_host), "--port", "0"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(  # noqa: S603
        [*command, "--dashboard-host", "", "--linger", str(LINGER_S)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # what ends this process's group, such as Ctrl-C, is not to end the master
        text=True,
    )
    assert process.stdout is not None
    with process.stdout as answer:
        said, _, _ = select.select([answer], [], [], START_S)
        line = answer.readline().strip() if said else ""
    if not line:
        process.kill()
        process.wait()
        raise MasterUnreachableError(f"a master of this program's own did not start: {' '.join(command)}")
    _started.append(process)
    return Endpoint.parse(line)


def reap() -> None:
    """Forgets masters that have ended, so that none stays a zombie."""
    _started[:] = [process for process in _started if process.poll() is None]


def _own_address(meeting_host: str) -> str:
    """Where others reach this host. Its own name may mean the loopback: then, if ranks are elsewhere, the way out."""
    local, world = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    hosts = (meeting_host,) if local is None or local == world else (meeting_host, _ELSEWHERE)
    found = LOOPBACK
    for host in hosts:
        with contextlib.suppress(OSError):  # a name that is not known here, or no network at all
            found = address_towards(host, 1)
        if not found.startswith("127."):
            break
    return found


_started: list[subprocess.Popen[str]] = []
"""Those that were started here. A process that is not waited for stays a zombie until its parent ends."""
