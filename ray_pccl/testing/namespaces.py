"""Hosts of our own on one machine: network namespaces, joined by links whose rates are ours to choose.

Needs root, `ip` and `tc`; where it may not make namespaces, `NotPermitted` says why. What it made it removes, and what
an earlier run left that was killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

PREFIX = "rpccl"
BURST = "256kb"
"""What a shaper lets through at once; with less, rates near 1 Gbit/s are not reached."""
LATENCY = "50ms"
PATIENCE_S = 60.0


class NotPermitted(Exception):
    """Namespaces can't be made here; the message says why."""


def inside(namespace: str, *command: str) -> list[str]:
    """The command, to be run in a namespace."""
    return ["ip", "netns", "exec", namespace, *command]


@contextlib.contextmanager
def namespaces(*names: str) -> Iterator[list[str]]:
    """Namespaces whose names end with these; they are gone afterwards, with whoever was still in them."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        raise NotPermitted("it takes root, and the programs `ip` and `tc`")
    _sweep()
    made = [f"{PREFIX}-{os.getpid()}-{name}" for name in names]
    try:
        for namespace in made:
            run("ip", "netns", "add", namespace)
            run("ip", "-n", namespace, "link", "set", "lo", "up")
        yield made
    finally:
        for namespace in reversed(made):
            _remove(namespace)


def run(*command: str) -> None:
    """Runs a command that sets the network up; `NotPermitted` if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise NotPermitted(f"`{' '.join(command)}` failed: {done.stderr.strip()}")


def shape(namespace: str, device: str, rate: str) -> None:
    """Limits what leaves the namespace through a device, to a rate as `tc` takes it. May be called again."""
    shaper = ["root", "tbf", "rate", rate, "burst", BURST, "latency", LATENCY]
    run("tc", "-n", namespace, "qdisc", "replace", "dev", device, *shaper)


# ------------------------------------------------------------------------------------------------------------ a mesh


def mesh_address(host: int) -> str:
    """Of a host of `meshed_hosts`, in its namespace."""
    return f"10.199.78.{host + 1}"


def mesh_device(other: int) -> str:
    """The device through which a host of `meshed_hosts` reaches another."""
    return f"to{other}"


@contextlib.contextmanager
def meshed_hosts(rates_mbit: Sequence[Sequence[float]]) -> Iterator[list[str]]:
    """The names of namespaces, one per host, each pair of which has a cable of its own.

    From host i to host j it carries ``rates_mbit[i][j]`` Mbit/s. Each host has one address, whatever the way.
    """
    count = len(rates_mbit)
    with namespaces(*(f"h{host}" for host in range(count))) as hosts:
        for host, namespace in enumerate(hosts):
            run("ip", "-n", namespace, "address", "add", f"{mesh_address(host)}/32", "dev", "lo")
        for near in range(count):
            for far in range(near + 1, count):
                ends = ["type", "veth", "peer", "name", mesh_device(near), "netns", hosts[far]]
                run("ip", "-n", hosts[near], "link", "add", "name", mesh_device(far), *ends)
        for source in range(count):
            for target in range(count):
                if source != target:
                    _lay(hosts[source], source, target, rates_mbit[source][target])
        yield hosts


def _lay(namespace: str, source: int, target: int, rate_mbit: float) -> None:
    device = mesh_device(target)
    run("ip", "-n", namespace, "link", "set", device, "up")
    way = [f"{mesh_address(target)}/32", "dev", device, "src", mesh_address(source)]
    run("ip", "-n", namespace, "route", "add", *way)
    shape(namespace, device, f"{rate_mbit:g}mbit")


# ---------------------------------------------------------------------------------------------------------- in them


@contextlib.contextmanager
def master_in(namespace: str, host: str, environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """A master that listens on the host's address; its endpoint."""
    program = [sys.executable, "-m", "master_actor", "--host", host, "--port", "0", "--dashboard-host", ""]
    command = inside(namespace, *program)
    process = subprocess.Popen(  # noqa: S603
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=dict(environment or os.environ)
    )
    try:
        assert process.stdout is not None
        endpoint = process.stdout.readline().strip()
        if not endpoint:
            raise RuntimeError(f"the master in {namespace} did not start")
        yield endpoint
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


# ---------------------------------------------------------------------------------------------------------- tidying


def _remove(namespace: str) -> None:
    """Ends whoever is in the namespace, sentinels for instance, and removes it; does nothing if it is not there."""
    if not Path("/run/netns", namespace).exists():
        return
    command = ["ip", "netns", "pids", namespace]
    left = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    for pid in left.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)  # noqa: S603, S607


def _sweep() -> None:
    """Removes what a run left that was killed: the names tell its process."""
    for file in Path("/run/netns").glob(f"{PREFIX}-*-*") if Path("/run/netns").exists() else ():
        if not Path("/proc", file.name.split("-")[1]).exists():
            _remove(file.name)
