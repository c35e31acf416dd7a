"""What runs on each node: it looks at the machine, listens, and dials the others.

It travels to the nodes as code, not as a name, and imports only Python's own modules: it has to run on a node where
ray_pccl is not installed, or another version of it. So everything that it tells is a plain dict.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import platform
import resource
import secrets
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

DIAL_TIMEOUT_S = 3.0
DIALLERS = 32
TOKEN_BYTES = 16


class Probe:
    """Stays on a node for the length of an examination, and listens there."""

    def __init__(self, address: str) -> None:
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._error = ""
        self._server: socket.socket | None = None
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._server = socket.create_server((address, 0), family=family, backlog=128)
        except OSError as error:
            self._error = str(error)
            return
        threading.Thread(target=self._greet, args=(self._server,), daemon=True).start()

    def _greet(self, server: socket.socket) -> None:
        """Whoever connects is told the token, so that nobody takes another for us."""
        while True:
            try:
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(DIAL_TIMEOUT_S)
                    connection.sendall(self._token)
            except OSError:
                time.sleep(0.05)

    def look(self) -> dict[str, Any]:
        """The facts about this node."""
        port = self._server.getsockname()[1] if self._server is not None else 0
        return {**facts(), "port": port, "token": self._token.hex(), "listen_error": self._error}

    def now(self) -> float:
        """This node's clock."""
        return time.time()

    def dial(self, targets: list[tuple[str, int, str]]) -> list[str]:
        """Connects to each address and port, and reads its token; why that failed, or nothing."""
        with ThreadPoolExecutor(DIALLERS) as pool:
            return list(pool.map(lambda target: dial(*target), targets))


def dial(address: str, port: int, token: str) -> str:
    """Why nobody was reached there, or somebody else; empty if all is well. Without a token, connecting is enough."""
    try:
        with socket.create_connection((address, port), timeout=DIAL_TIMEOUT_S) as connection:
            connection.settimeout(DIAL_TIMEOUT_S)
            told = b""
            while token and len(told) < TOKEN_BYTES:
                data = connection.recv(TOKEN_BYTES - len(told))
                if not data:
                    break
                told += data
    except OSError as error:
        return str(error)
    return "" if told.hex() == token else "somebody else answers there"


def facts() -> dict[str, Any]:
    """What this machine and this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    largest_file = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return {
        "hostname": socket.gethostname(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "versions": versions(),
        "shm": disk("/dev/shm"),  # noqa: S108  (it is looked at, not written to)
        "memfd_error": memfd_error(),
        "files_soft": soft,
        "files_hard": hard,
        "largest_file": None if largest_file == resource.RLIM_INFINITY else largest_file,
        "memory": memory(),
        "proc_error": proc_error(),
    }


def versions() -> dict[str, str | None]:
    """Of what has to be the same everywhere; None for what is not there."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("ray", "ray-pccl", "numpy", "torch", "msgspec"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    # From a directory of sources it is there without having been installed.
    try:
        if importlib.util.find_spec("ray_pccl") is None:
            found["ray-pccl"] = None
        else:
            found["ray-pccl"] = str(getattr(importlib.import_module("ray_pccl"), "__version__", "unknown"))
    except Exception as error:
        found["ray-pccl"] = None
        print(f"ray_pccl can't be imported: {error}", file=sys.stderr)  # noqa: T201  (into Ray's log)
    return found


def disk(path: str) -> tuple[int, int] | None:
    """Bytes in all, and free; None if there is no such directory."""
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_frsize * status.f_blocks, status.f_frsize * status.f_bavail


def memfd_error() -> str:
    """Why memory can't be shared as our data plane does it: a file without a name, sealed against others' writes."""
    if not hasattr(os, "memfd_create"):
        return "this Python has no memfd_create"
    try:
        fd = os.memfd_create("ray_pccl-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return f"memfd_create: {error}"
    try:
        os.ftruncate(fd, 1 << 20)
        fcntl.fcntl(fd, 1033, 0x2 | 0x4 | 0x10)  # F_ADD_SEALS: SHRINK, GROW, FUTURE_WRITE
    except OSError as error:
        return f"F_SEAL_FUTURE_WRITE: {error}"
    finally:
        os.close(fd)
    return ""


def memory() -> dict[str, int | None]:
    """Bytes: of the machine, those available in it, and the container's limit and use if it has one."""
    found: dict[str, int | None] = {"total": None, "available": None, "limit": None, "used": None}
    names = {"MemTotal": "total", "MemAvailable": "available"}
    for line in read("/proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name in names:
            found[names[name]] = int(value.split()[0]) * 1024
    limits = [limit for limit in map(limit_in, cgroups()) if limit is not None]
    if limits:
        found["limit"], found["used"] = min(limits)
    return found


def cgroups() -> list[str]:
    """The directories that may hold our memory limit: our own group's and all above it, of either version."""
    found = []
    for line in read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = "/sys/fs/cgroup/memory" if controllers else "/sys/fs/cgroup"
        parts = [part for part in path.split("/") if part and part != ".."]
        found += ["/".join([base, *parts[:depth]]) for depth in range(len(parts), -1, -1)]
    return found


def limit_in(directory: str) -> tuple[int, int] | None:
    """Limit and use, if this group has a limit."""
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, used = read(f"{directory}/{limit_name}").strip(), read(f"{directory}/{used_name}").strip()
        if limit.isdigit() and int(limit) < 1 << 60:
            return int(limit), int(used) if used.isdigit() else 0
    return None


def proc_error() -> str:
    """Why the sentinel could not see processes die here: it reads ``/proc/PID/stat`` of those of its user."""
    try:
        with open("/proc/self/stat", "rb") as own, open(f"/proc/{os.getppid()}/stat", "rb") as parent:  # noqa: PTH123
            if not own.read() or not parent.read():
                return "/proc/PID/stat is empty"
    except OSError as error:
        return str(error)
    return "" if hasattr(socket, "SO_PEERCRED") else "no SO_PEERCRED: not Linux"


def read(path: str) -> str:
    """A small file's text; empty if it can't be read."""
    try:
        with open(path) as file:  # noqa: PTH123
            return file.read()
    except OSError:
        return ""
