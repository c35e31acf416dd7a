"""What a process group raises: our errors, which are torch's at the same time, so that code for either catches them."""

from __future__ import annotations

import torch.distributed as dist

from ray_pccl.errors import (
    CollectiveMismatchError,
    OperationTimeoutError,
    PCCLError,
    PeerEvictedError,
    PeerLostError,
    UsageError,
    WorldChangedError,
)


class BackendError(PCCLError, dist.DistBackendError):
    """A call of the process group failed. Every other error here is raised as its own kind, too."""


class PeerLostBackendError(PeerLostError, BackendError):
    """A peer of the process group died. ``peers`` names who, ``reason`` says how it was noticed."""


class PeerEvictedBackendError(PeerEvictedError, BackendError):
    """This process was taken for dead and put out of the group."""


class MismatchBackendError(CollectiveMismatchError, BackendError):
    """Ranks called different operations; ``calls`` tells who called what. Raised on all of them."""


class TimeoutBackendError(OperationTimeoutError, BackendError):
    """Not all ranks entered the call in time; ``calls`` tells who is in which."""


class UsageBackendError(UsageError, BackendError):
    """A call that makes no sense, such as one with tensors that do not fit."""


class WorldChangedBackendError(WorldChangedError, UsageBackendError):
    """The tensors fit a world of another size: ranks have come or gone since they were made."""


_KINDS: tuple[tuple[type[PCCLError], type[BackendError]], ...] = (
    (PeerLostError, PeerLostBackendError),
    (PeerEvictedError, PeerEvictedBackendError),
    (CollectiveMismatchError, MismatchBackendError),
    (OperationTimeoutError, TimeoutBackendError),
    (WorldChangedError, WorldChangedBackendError),
    (UsageError, UsageBackendError),
)


def as_backend_error(error: PCCLError) -> BackendError:
    """The same error as torch's, too."""
    if isinstance(error, BackendError):
        return error
    kind = next((ours for cause, ours in _KINDS if isinstance(error, cause)), BackendError)
    text = f"{error}; the timeout is over" if kind is TimeoutBackendError else str(error)
    made = kind(text, **error.details)
    made.__cause__ = error
    return made
