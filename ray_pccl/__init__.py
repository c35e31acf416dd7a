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
    from ray_pccl.driver.calls import (
        allgather_refs,
        allreduce,
        allreduce_refs,
        barrier,
        broadcast_ref,
        reduce_refs,
        reducescatter_refs,
    )
    from ray_pccl.driver.collective import collective
    from ray_pccl.driver.creating import create_group, get_communicator, get_group, options, store_stats
    from ray_pccl.driver.groups import Group
    from ray_pccl.driver.master import evict, report, start_master, stop_master
    from ray_pccl.driver.objects import StoreStats
    from ray_pccl.errors import (
        AuthenticationError,
        BackendUnavailableError,
        CollectiveMismatchError,
        DelegatedBackendError,
        GroupMismatchError,
        InputFailedError,
        MasterError,
        MasterNotFoundError,
        MasterStoppedError,
        MasterUnreachableError,
        NoRingError,
        NotAMemberError,
        NotConnectedError,
        NoUpToDatePeerError,
        OperationTimeoutError,
        PCCLError,
        PeerEvictedError,
        PeerLostError,
        PlottingUnavailableError,
        ProtocolError,
        RankTakenError,
        RendezvousClosedError,
        RendezvousError,
        RendezvousTimeoutError,
        RevisionError,
        SettingsError,
        SharedStateError,
        SharedStateMismatchError,
        StepMismatchError,
        StoreError,
        StoreTimeoutError,
        TooFewPeersError,
        UsageError,
        WorldChangedError,
    )
    from ray_pccl.logs import configure_logging
    from ray_pccl.peer.communicator import Communicator
    from ray_pccl.peer.handles import Handle, Status
    from ray_pccl.peer.statistics import Latency, Statistics
    from ray_pccl.peer.store import Store
    from ray_pccl.reports import GroupReport, Happening, HappeningKind, InFlight, MasterReport, MemberReport, Sample
    from ray_pccl.ring.arena import empty, empty_like
    from ray_pccl.settings import Settings
    from ray_pccl.state.rows import SharedStateSyncStrategy
    from ray_pccl.state.sharing import SharedState, SharedStateSyncInfo
    from ray_pccl.state.tensors import TensorInfo
    from ray_pccl.topology.plot import plot_topology
    from ray_pccl.topology.progress import TopologyProgress
    from ray_pccl.topology.types import Topology
    from ray_pccl.types import Attribute, GroupStatus, Member, MembershipChange, MembershipEvent

__version__ = "0.1.0"

__all__ = [
    "Attribute",
    "AuthenticationError",
    "BackendUnavailableError",
    "CollectiveMismatchError",
    "Communicator",
    "DataType",
    "DelegatedBackendError",
    "DistributionHint",
    "Endpoint",
    "Group",
    "GroupMismatchError",
    "GroupReport",
    "GroupStatus",
    "Handle",
    "Happening",
    "HappeningKind",
    "InFlight",
    "InputFailedError",
    "Latency",
    "MasterError",
    "MasterNotFoundError",
    "MasterReport",
    "MasterStoppedError",
    "MasterUnreachableError",
    "Member",
    "MemberReport",
    "MembershipChange",
    "MembershipEvent",
    "NoRingError",
    "NoUpToDatePeerError",
    "NotAMemberError",
    "NotConnectedError",
    "OperationTimeoutError",
    "PCCLError",
    "PeerEvictedError",
    "PeerLostError",
    "PlottingUnavailableError",
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
    "RevisionError",
    "Sample",
    "Settings",
    "SettingsError",
    "SharedState",
    "SharedStateError",
    "SharedStateMismatchError",
    "SharedStateSyncInfo",
    "SharedStateSyncStrategy",
    "Statistics",
    "Status",
    "StepMismatchError",
    "Store",
    "StoreError",
    "StoreStats",
    "StoreTimeoutError",
    "TensorInfo",
    "TooFewPeersError",
    "Topology",
    "TopologyProgress",
    "UsageError",
    "WorldChangedError",
    "__version__",
    "allgather_refs",
    "allreduce",
    "allreduce_refs",
    "barrier",
    "broadcast_ref",
    "collective",
    "configure_logging",
    "create_group",
    "empty",
    "empty_like",
    "evict",
    "get_communicator",
    "get_group",
    "options",
    "plot_topology",
    "reduce_refs",
    "reducescatter_refs",
    "report",
    "start_master",
    "stop_master",
    "store_stats",
]

_HOME_OF = {
    "Attribute": "types",
    "Communicator": "peer.communicator",
    "DataType": "descriptors",
    "DistributionHint": "descriptors",
    "Endpoint": "control.endpoint",
    "Group": "driver.groups",
    "GroupReport": "reports",
    "GroupStatus": "types",
    "Handle": "peer.handles",
    "Happening": "reports",
    "HappeningKind": "reports",
    "InFlight": "reports",
    "Latency": "peer.statistics",
    "MasterReport": "reports",
    "Member": "types",
    "MemberReport": "reports",
    "MembershipChange": "types",
    "MembershipEvent": "types",
    "QuantizationAlgorithm": "descriptors",
    "QuantizationOptions": "descriptors",
    "ReduceDescriptor": "descriptors",
    "ReduceInfo": "descriptors",
    "ReduceOp": "descriptors",
    "ReduceOpDescriptor": "descriptors",
    "ReduceOperandDescriptor": "descriptors",
    "Sample": "reports",
    "Settings": "settings",
    "SharedState": "state.sharing",
    "SharedStateSyncInfo": "state.sharing",
    "SharedStateSyncStrategy": "state.rows",
    "Statistics": "peer.statistics",
    "Status": "peer.handles",
    "Store": "peer.store",
    "StoreStats": "driver.objects",
    "TensorInfo": "state.tensors",
    "Topology": "topology.types",
    "TopologyProgress": "topology.progress",
    "allgather_refs": "driver.calls",
    "allreduce": "driver.calls",
    "allreduce_refs": "driver.calls",
    "barrier": "driver.calls",
    "broadcast_ref": "driver.calls",
    "collective": "driver.collective",
    "configure_logging": "logs",
    "create_group": "driver.creating",
    "empty": "ring.arena",
    "empty_like": "ring.arena",
    "evict": "driver.master",
    "get_communicator": "driver.creating",
    "get_group": "driver.creating",
    "options": "driver.creating",
    "plot_topology": "topology.plot",
    "reduce_refs": "driver.calls",
    "reducescatter_refs": "driver.calls",
    "report": "driver.master",
    "start_master": "driver.master",
    "stop_master": "driver.master",
    "store_stats": "driver.creating",
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
