"""ray_pccl: collectives for Ray that survive the death of any peer, and of the coordinator.

Importing it imports nothing else: each public name is loaded when it is first used (PEP 562), so that the parts that
need no Ray run without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_pccl.control.endpoint import Endpoint
    from ray_pccl.descriptors import (
        DataType,
        DistributionHint,
        QuantizationAlgorithm,
        QuantizationOptions,
        ReduceDescriptor,
        ReduceInfo,
        ReduceOp,
        ReduceOpDescriptor,
        ReduceOperandDescriptor,
    )
    from ray_pccl.driver.master import start_master, stop_master
    from ray_pccl.errors import (
        AuthenticationError,
        CollectiveMismatchError,
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
    from ray_pccl.peer.handles import Handle, Status
    from ray_pccl.peer.store import Store
    from ray_pccl.ring.arena import empty, empty_like
    from ray_pccl.settings import Settings
    from ray_pccl.types import Attribute, Member, MembershipChange, MembershipEvent

__version__ = "0.1.0"

__all__ = [
    "Attribute",
    "AuthenticationError",
    "CollectiveMismatchError",
    "Communicator",
    "DataType",
    "DistributionHint",
    "Endpoint",
    "GroupMismatchError",
    "Handle",
    "MasterError",
    "MasterNotFoundError",
    "MasterStoppedError",
    "MasterUnreachableError",
    "Member",
    "MembershipChange",
    "MembershipEvent",
    "NotAMemberError",
    "NotConnectedError",
    "OperationTimeoutError",
    "PCCLError",
    "PeerEvictedError",
    "PeerLostError",
    "ProtocolError",
    "QuantizationAlgorithm",
    "QuantizationOptions",
    "RankTakenError",
    "ReduceDescriptor",
    "ReduceInfo",
    "ReduceOp",
    "ReduceOpDescriptor",
    "ReduceOperandDescriptor",
    "RendezvousClosedError",
    "RendezvousError",
    "RendezvousTimeoutError",
    "Settings",
    "SettingsError",
    "Status",
    "Store",
    "StoreError",
    "StoreTimeoutError",
    "TooFewPeersError",
    "UsageError",
    "__version__",
    "empty",
    "empty_like",
    "start_master",
    "stop_master",
]

_HOME_OF = {
    "Attribute": "types",
    "Communicator": "peer.communicator",
    "DataType": "descriptors",
    "DistributionHint": "descriptors",
    "Endpoint": "control.endpoint",
    "Handle": "peer.handles",
    "Member": "types",
    "MembershipChange": "types",
    "MembershipEvent": "types",
    "QuantizationAlgorithm": "descriptors",
    "QuantizationOptions": "descriptors",
    "ReduceDescriptor": "descriptors",
    "ReduceInfo": "descriptors",
    "ReduceOp": "descriptors",
    "ReduceOpDescriptor": "descriptors",
    "ReduceOperandDescriptor": "descriptors",
    "Settings": "settings",
    "Status": "peer.handles",
    "Store": "peer.store",
    "empty": "ring.arena",
    "empty_like": "ring.arena",
    "start_master": "driver.master",
    "stop_master": "driver.master",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ray_pccl' has no attribute {name!r}")
    home = import_module(f"ray_pccl.{_HOME_OF.get(name, 'errors')}")
    value = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
