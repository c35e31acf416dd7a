"""Which host this is, as far as one sentinel can see; and where its sentinel is to be found."""

from __future__ import annotations

import hashlib
import os
import socket
from functools import cache
from pathlib import Path


def supports_sentinel() -> bool:
    """Whether processes can be watched here: Linux's ``/proc`` and abstract Unix sockets."""
    return Path("/proc/self/stat").exists() and hasattr(socket, "SO_PEERCRED")


@cache
def host_id() -> str:
    """A name that all processes share that one sentinel can watch: same boot, namespaces and user."""
    parts = [str(os.getuid())]
    for source in ("/proc/sys/kernel/random/boot_id",):
        try:
            parts.append(Path(source).read_text().strip())
        except OSError:
            parts.append("")
    for namespace in ("net", "pid"):
        try:
            parts.append(str(Path(f"/proc/self/ns/{namespace}").stat().st_ino))
        except OSError:
            parts.append("")
    return f"{socket.gethostname()}-{hashlib.blake2b('/'.join(parts).encode(), digest_size=4).hexdigest()}"


def sentinel_address(master_id: str) -> str:
    """The abstract Unix socket of the sentinel that reports to this master: it has no file, so none is left behind."""
    return f"\0ray_pccl/{master_id}/{host_id()}"
