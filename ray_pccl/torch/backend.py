"""The backend "pccl" of `torch.distributed`. Registering it is cheap; what it takes is loaded by its first group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from ray_pccl.torch.process_group import PCCLProcessGroup

NAME = "pccl"


def register() -> None:
    """Has torch know the backend. Safe to call twice."""
    if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(given: Any, options: Any) -> PCCLProcessGroup:
    from ray_pccl.torch.process_group import create

    return create(given, options)
