"""The types of `ray.util.collective.types`, with AVG."""

from __future__ import annotations

from enum import Enum
from typing import Any

from ray.util.collective import types as _rays
from ray.util.collective.types import (
    AllGatherOptions,
    AllReduceOptions,
    Backend,
    BarrierOptions,
    BroadcastOptions,
    RecvOptions,
    ReduceOptions,
    ReduceScatterOptions,
    SendOptions,
    unset_timeout_ms,
)

from ray_pccl import descriptors
from ray_pccl.errors import SettingsError
from ray_pccl.util.collective.errors import as_runtime_error

__all__ = [
    "AllGatherOptions",
    "AllReduceOptions",
    "Backend",
    "BarrierOptions",
    "BroadcastOptions",
    "RecvOptions",
    "ReduceOp",
    "ReduceOptions",
    "ReduceScatterOptions",
    "SendOptions",
    "cupy_available",
    "torch_available",
    "unset_timeout_ms",
]


def cupy_available() -> bool:
    """Whether CuPy can be imported."""
    return bool(_rays.cupy_available())  # type: ignore[no-untyped-call]


def torch_available() -> bool:
    """Whether torch can be imported."""
    return bool(_rays.torch_available())  # type: ignore[no-untyped-call]


class ReduceOp(Enum):
    """How contributions are combined: Ray's, with Ray's values, and AVG."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    AVG = 4
    """The sum divided by the number of ranks; not for integers."""


AnyReduceOp = ReduceOp | _rays.ReduceOp | descriptors.ReduceOp
"""Wherever an op is taken: ours, Ray's own, and that of `ray_pccl`."""


def as_pccl_op(op: AnyReduceOp) -> descriptors.ReduceOp:
    """The op as a communicator takes it. A `ValueError` that is a `RuntimeError`, too, if it is none."""
    if not isinstance(op, ReduceOp | _rays.ReduceOp | descriptors.ReduceOp):
        names = ", ".join(f"ReduceOp.{known.name}" for known in ReduceOp)
        raise as_runtime_error(SettingsError(f"op is one of {names}, not {op!r}"))
    return descriptors.ReduceOp["PROD" if op.name == "PRODUCT" else op.name]


def as_rays_op(op: AnyReduceOp) -> AnyReduceOp:
    """The op as a backend that was written for Ray takes it; AVG, which Ray has not, stays ours."""
    name = "PRODUCT" if op.name == "PROD" else op.name
    return _rays.ReduceOp.__members__.get(name, op)


def __getattr__(name: str) -> Any:
    """What else Ray's module has: `th` and `cp`, where torch and CuPy are installed."""
    return getattr(_rays, name)
