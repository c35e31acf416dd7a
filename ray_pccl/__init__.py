"""ray_pccl: collectives for Ray that survive the death of any peer, and of the coordinator.

Importing it imports nothing else: each public name is loaded when it is first used (PEP 562), so that the parts that
need no Ray run without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_pccl.control.endpoint import Endpoint
    from ray_pccl.driver.master import start_master, stop_master
    from ray_pccl.errors import (
        AuthenticationError,
        GroupMismatchError,
        MasterError,
        MasterNotFoundError,
        MasterStoppedError,
        MasterUnreachableError,
        NotAMemberError,
        NotConnectedError,
        OperationTimeoutError,
        PCCLError,
        PeerEvictedError,
        PeerLostError,
        ProtocolError,
        RankTakenError,
        RendezvousClosedError,
        RendezvousError,
        RendezvousTimeoutError,
        SettingsError,
        StoreError,
        StoreTimeoutError,
        TooFewPeersError,
        UsageError,
    )
    from ray_pccl.peer.communicator import Communicator
    from ray_pccl.peer.store import Store
    from ray_pccl.settings import Settings
    from ray_pccl.types import Attribute, Member, MembershipChange, MembershipEvent

__version__ = "0.1.0"

_HOMES = {
    "ray_pccl.control.endpoint": ("Endpoint",),
    "ray_pccl.driver.master": ("start_master", "stop_master"),
    "ray_pccl.errors": (
        "AuthenticationError",
        "GroupMismatchError",
        "MasterError",
        "MasterNotFoundError",
        "MasterStoppedError",
        "MasterUnreachableError",
        "NotAMemberError",
        "NotConnectedError",
        "OperationTimeoutError",
        "PCCLError",
        "PeerEvictedError",
        "PeerLostError",
        "ProtocolError",
        "RankTakenError",
        "RendezvousClosedError",
        "RendezvousError",
        "RendezvousTimeoutError",
        "SettingsError",
        "StoreError",
        "StoreTimeoutError",
        "TooFewPeersError",
        "UsageError",
    ),
    "ray_pccl.peer.communicator": ("Communicator",),
    "ray_pccl.peer.store": ("Store",),
    "ray_pccl.settings": ("Settings",),
    "ray_pccl.types": ("Attribute", "Member", "MembershipChange", "MembershipEvent"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [  # noqa: PLE0604
    *_HOME_OF,
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ray_pccl' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
