"""For programs of torch: its own interfaces, on a group that survives deaths.

`backend` is ``init_process_group("pccl")`` (`process_group` and what it stands on); `training` and `diloco` are
trainings that go on while peers come and go; `store` is the group's key-value store as a `torch.distributed.Store`;
`rendezvous` and `rendezvous_backend` let torchrun find its nodes through the master (``--rdzv-backend=pccl``,
`handlers` is what torchrun loads); `delegated` has Gloo or NCCL move the data of a communicator. Only this package
imports torch, and `import ray_pccl` does not import it. Nothing here decides who is in a group: that is the master's.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ray_pccl.torch.backend import register

if TYPE_CHECKING:
    from ray_pccl.torch.diloco import DiLoCo, OuterInfo
    from ray_pccl.torch.elastic import Step, average_hook, step
    from ray_pccl.torch.options import Options
    from ray_pccl.torch.sampling import ElasticSampler
    from ray_pccl.torch.store import PCCLStore
    from ray_pccl.torch.training import ElasticTrainer, StepInfo

__all__ = [
    "DiLoCo",
    "ElasticSampler",
    "ElasticTrainer",
    "Options",
    "OuterInfo",
    "PCCLStore",
    "Step",
    "StepInfo",
    "average_hook",
    "step",
]

_WHERE = {
    "DiLoCo": "ray_pccl.torch.diloco",
    "ElasticSampler": "ray_pccl.torch.sampling",
    "ElasticTrainer": "ray_pccl.torch.training",
    "Options": "ray_pccl.torch.options",
    "OuterInfo": "ray_pccl.torch.diloco",
    "PCCLStore": "ray_pccl.torch.store",
    "Step": "ray_pccl.torch.elastic",
    "StepInfo": "ray_pccl.torch.training",
    "average_hook": "ray_pccl.torch.elastic",
    "step": "ray_pccl.torch.elastic",
}
"""Loaded when first used: torchrun, and every worker of it, imports this package."""


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


register()
