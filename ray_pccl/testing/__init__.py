"""What users test their own code with: real processes, a real master, and the faults that befall them.

`plugin` is the pytest plugin, loaded by itself wherever ray_pccl is installed, with the fixtures `master`,
`peer_group`, `faults`, `ray_local` and `ray_cluster`. The other modules hold what they hand out, and need no pytest.
Nothing here is needed by, or imported from, the product; nothing here imports Ray before a fixture asks for it.
"""

from __future__ import annotations

from ray_pccl.testing.faults import Faults
from ray_pccl.testing.groups import PeerGroup, PeerStarter
from ray_pccl.testing.master import MasterProcess
from ray_pccl.testing.peer_process import StampedEvent
from ray_pccl.testing.peers import PeerProcess, PeerProcessEndedError
from ray_pccl.testing.waiting import eventually

__all__ = [
    "Faults",
    "MasterProcess",
    "PeerGroup",
    "PeerProcess",
    "PeerProcessEndedError",
    "PeerStarter",
    "StampedEvent",
    "eventually",
]
