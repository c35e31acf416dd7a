"""Which nodes a cluster is to have, what of it was seen, and what is missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class Expected(msgspec.Struct, frozen=True):
    """What the file asks for."""

    head: str
    """Its address or name; empty where the provider gives it one."""
    workers: tuple[str, ...]
    """Those of the workers, where they are known beforehand."""
    least: int
    """How many workers there are to be from the start."""

    @property
    def nodes(self) -> int:
        """How many nodes there are to be, with the head."""
        return self.least + 1


class Node(msgspec.Struct, frozen=True):
    """A node that is up."""

    address: str
    is_head: bool
    cpus: float = 0
    gpus: float = 0


class Seen(msgspec.Struct, frozen=True):
    """What the head sees of its cluster."""

    nodes: tuple[Node, ...] = ()
    master: str = ""
    """Where it listens, such as ``10.0.0.1:41829``, if it answers."""
    why: str = ""
    """If the master does not answer, or Ray: what they said."""
    addresses: Mapping[str, str] = {}
    """The address of each expected worker: what the file calls it, and what the head finds under this name."""
    version: str = ""
    """Of ray_pccl there."""


def expected(config: Mapping[str, Any]) -> Expected:
    """What a good file asks for."""
    provider: Mapping[str, Any] = config["provider"]
    workers = provider.get("worker_ips")
    if workers is not None:
        least = min(config.get("min_workers", len(workers)), config.get("max_workers", len(workers)), len(workers))
        return Expected(str(provider.get("head_ip", "")), tuple(workers), least)
    kinds = config.get("available_node_types") or {}
    least = sum(kind.get("min_workers", 0) for kind in kinds.values()) if kinds else config.get("min_workers", 0)
    return Expected("", (), least)


def missing(wanted: Expected, seen: Seen) -> list[str]:
    """Who is not there yet, as one would say it; empty if nobody is missing, the master included."""
    absent: list[str] = []
    up = {node.address for node in seen.nodes}
    if not any(node.is_head for node in seen.nodes):
        absent.append(f"the head {wanted.head}".rstrip())
    workers = sum(not node.is_head for node in seen.nodes)
    if workers < wanted.least:
        names = [name for name in wanted.workers if seen.addresses.get(name, name) not in up]
        if names and len(names) == wanted.least - workers:
            absent += [f"the worker {name}" for name in names]
        elif names:  # fewer are wanted than there are
            absent.append(f"{wanted.least - workers} of the workers {', '.join(names)}")
        else:
            absent.append(f"{wanted.least - workers} of {wanted.least} workers")
    if not seen.master:
        absent.append("the master")
    return absent


def progress(wanted: Expected, seen: Seen) -> str:
    """How far the cluster is, in a line."""
    up = min(len(seen.nodes), wanted.nodes)
    return f"nodes up {up}/{wanted.nodes}, master {'yes' if seen.master else 'no'}"
