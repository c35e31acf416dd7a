"""Peers as Ray actors, for the tests of this directory."""

from __future__ import annotations

import os
from typing import Any

import ray

import ray_pccl
from ray_pccl import MembershipEvent

GET_TIMEOUT_S = 60.0


class Peer:
    """Holds one communicator; several threads, so that it can be asked while it is blocked."""

    def __init__(self, **communicator: Any) -> None:
        self.comm = ray_pccl.Communicator(**communicator)
        self.events: list[MembershipEvent] = []
        self.comm.on_membership(self.events.append)

    def call(self, name: str, *args: Any) -> Any:
        found: Any = self.comm
        for part in name.split("."):
            found = getattr(found, part)
        return found(*args) if callable(found) else found

    def told(self) -> list[MembershipEvent]:
        return list(self.events)

    def pid(self) -> int:
        return os.getpid()

    def node(self) -> str:
        node: str = ray.get_runtime_context().get_node_id()
        return node

    def master_id(self) -> str:
        assert self.comm._connection is not None
        return self.comm._connection.membership.master_id


PeerActor: Any = ray.remote(num_cpus=0, max_concurrency=4)(Peer)


def get(reference: Any, timeout: float = GET_TIMEOUT_S) -> Any:
    return ray.get(reference, timeout=timeout)


def call(peer: Any, name: str, *args: Any) -> Any:
    return get(peer.call.remote(name, *args))


def call_all(peers: list[Any], name: str, *args: Any) -> list[Any]:
    values: list[Any] = get([peer.call.remote(name, *args) for peer in peers])
    return values


def start(count: int, options: dict[str, Any] | None = None, **communicator: Any) -> list[Any]:
    """That many peers, in one group."""
    peers = [PeerActor.options(**(options or {})).remote(**communicator) for _ in range(count)]
    call_all(peers, "connect", GET_TIMEOUT_S)
    return peers


def end(peers: list[Any]) -> None:
    """Has the peers leave, and ends their actors."""
    call_all(peers, "close")
    for peer in peers:
        ray.kill(peer)
