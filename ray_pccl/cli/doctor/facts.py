"""What was seen on a cluster: the only thing that `checks` knows of it."""

from __future__ import annotations

import msgspec


class Memory(msgspec.Struct, frozen=True):
    """Bytes; None where it could not be found out."""

    total: int | None = None
    available: int | None = None
    limit: int | None = None
    """The container's; None if it has none."""
    used: int | None = None


class NodeFacts(msgspec.Struct, frozen=True):
    """One node, as it told of itself."""

    name: str
    """As people know it: its address, and its host's name."""
    address: str
    versions: dict[str, str | None]
    hostname: str = ""
    machine: str = "x86_64"
    kernel: str = ""
    shm: tuple[int, int] | None = None
    """Bytes of /dev/shm in all, and free; None if there is none."""
    object_store: int | None = None
    """Bytes that Ray wants to keep in it."""
    memfd_error: str = ""
    files_soft: int = 1 << 16
    files_hard: int = 1 << 16
    largest_file: int | None = None
    memory: Memory = Memory()
    proc_error: str = ""
    listen_error: str = ""
    clock_ahead_s: float = 0.0
    """Of the clock of the node where the doctor runs."""
    clock_error_s: float = 0.0
    """How far that figure may be off."""


class Unreached(msgspec.Struct, frozen=True):
    """A node could not connect to another."""

    source: str
    target: str
    error: str


class MasterFacts(msgspec.Struct, frozen=True):
    """The master, if there is one."""

    where: str
    largest_group: int = 0
    error: str = ""
    """Why it did not answer through Ray."""
    unreached: tuple[Unreached, ...] = ()
    """From which nodes its port can't be reached."""


class ClusterFacts(msgspec.Struct, frozen=True):
    """All that was seen."""

    nodes: tuple[NodeFacts, ...]
    silent: dict[str, str]
    """Nodes that are alive, as Ray says, but did not run the probe; and what happened instead."""
    unreached: tuple[Unreached, ...] = ()
    pairs: int = 0
    """How many pairs of nodes were tried, each in both directions."""
    master: MasterFacts | None = None
    namespace: str = ""
