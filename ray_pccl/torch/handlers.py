"""What torchrun loads: the entry points of the group ``torchrun.handlers``.

Every torchrun loads them, whatever rendezvous it uses, so nothing is imported before one of ours is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ray_pccl.control.endpoint import Endpoint
from ray_pccl.errors import SettingsError
from ray_pccl.settings import LONGEST_S, Settings
from ray_pccl.torch.addressing import MASTER_VARIABLE, read_endpoint

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

DEFAULT_TIMEOUT_S = 600.0
DEFAULT_CLOSE_TIMEOUT_S = 5.0


def pccl() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """For ``--rdzv-backend=pccl``: the agents are a group of the master's."""
    return create_handler


def pccl_dynamic() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """For ``--rdzv-backend=pccl-dynamic``: torch's own rendezvous, with its state at the master."""
    return create_dynamic_handler


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Our handler, for what torchrun was called with."""
    from ray_pccl.torch.rendezvous import PCCLRendezvousHandler

    endpoint = _endpoint(parameters)
    timeout_s = _seconds(parameters, "join_timeout", _seconds(parameters, "timeout", DEFAULT_TIMEOUT_S))
    settings = Settings.from_env()
    last_call_s = _seconds(parameters, "last_call_timeout", settings.last_call_s)
    return PCCLRendezvousHandler(
        parameters.backend,
        endpoint,
        parameters.run_id,
        parameters.min_nodes,
        parameters.max_nodes,
        local_addr=parameters.local_addr,
        join_timeout_s=timeout_s,
        close_timeout_s=_seconds(parameters, "close_timeout", DEFAULT_CLOSE_TIMEOUT_S),
        settings=replace(settings, last_call_s=last_call_s),
    )


def create_dynamic_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Torch's handler, for what torchrun was called with."""
    from ray_pccl.torch.rendezvous_backend import dynamic_handler

    return dynamic_handler(parameters, _endpoint(parameters))


def _endpoint(parameters: RendezvousParameters) -> Endpoint:
    """The master; the workers that this agent starts find the same one in their environment."""
    endpoint = read_endpoint(parameters.endpoint, str(parameters.get("key", "")))
    if endpoint is None:
        raise SettingsError(f"give the master to torchrun as --rdzv-endpoint=host:port#key, or set {MASTER_VARIABLE}")
    os.environ[MASTER_VARIABLE] = str(endpoint)
    return endpoint


def _seconds(parameters: RendezvousParameters, name: str, default: float) -> float:
    text = parameters.get(name, default)
    try:
        seconds = float(text)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 <= seconds <= LONGEST_S:
        raise SettingsError(f"--rdzv-conf={name}={text}: a number of seconds from 0 to {LONGEST_S:g}")
    return seconds
