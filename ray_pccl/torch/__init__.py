"""For programs of torch: its own interfaces, on a group that survives deaths.

`store` is the group's key-value store as a `torch.distributed.Store`; `rendezvous` and `rendezvous_backend` let
torchrun find its nodes through the master (``--rdzv-backend=pccl``, `handlers` is what torchrun loads). Only this
package imports torch, and `import ray_pccl` does not import it. Nothing here decides who is in a group: that is the
master's.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_pccl.torch.store import PCCLStore

__all__ = ["PCCLStore"]

_WHERE = {"PCCLStore": "ray_pccl.torch.store"}
"""Loaded when first used: torchrun, and every worker of it, imports this package."""


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
