"""Where a process group lives: its master, and its name there. Rank 0 decides, and torch's store tells the others."""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import Store

from ray_pccl.control.endpoint import Endpoint
from ray_pccl.torch.addressing import read_endpoint
from ray_pccl.torch.backend_errors import BackendError, TimeoutBackendError, UsageBackendError
from ray_pccl.torch.options import Options
from ray_pccl.torch.own_master import LOOPBACK, start_master_process

_LIVES, _PLACE, _ARRIVED, _MET = (f"ray_pccl/{name}" for name in ("lives", "place", "arrived", "met"))
_ANSWER_S = 2.0
"""How long a master that is known already may take to be reached."""


@dataclass(frozen=True, slots=True)
class Place:
    """The master, and a group of it."""

    master: Endpoint | None
    """None: that of the Ray this process is in, wherever Ray has it run."""
    group: str
    life: int
    """How many groups this store has served: what the former ones left in it means nothing to this one."""


def find_place(
    options: Options, store: Store, rank: int, size: int, timeout: timedelta, known: Endpoint | None
) -> Place:
    """The place of a group whose ranks share `store`; `known` is the master of another group of this process.

    A rank whose options differ from rank 0's, and one that finds no master, raises on all: see `meet`.
    """
    life = store.add(f"{_LIVES}/{rank}", 1)
    mine = _told_by(options, size)
    if rank == 0:
        try:
            master = _find_master(options, known)
        except BaseException as error:
            _complain(store, f"{_PLACE}/{life}", f"rank 0 has no master: {type(error).__name__}: {error}")
            raise
        group = options.group if options.group and options.elastic else _unique(options.group)
        place = {"master": None if master is None else str(master), "group": group, "options": mine}
        store.set(f"{_PLACE}/{life}", json.dumps(place))
        return Place(master, group, life)
    try:
        store.wait([f"{_PLACE}/{life}"], timeout)
    except RuntimeError as error:
        raise TimeoutBackendError(f"rank 0 has not come within {timeout}: {error}", calls={}) from error
    told = json.loads(store.get(f"{_PLACE}/{life}"))
    if "complaint" in told:
        raise BackendError(told["complaint"])
    if told["options"] != mine:
        text = f"rank {rank} has {mine}, but rank 0 has {told['options']}: give all ranks the same"
        _complain(store, f"{_MET}/{life}", text)
        raise UsageBackendError(text)
    return Place(None if told["master"] is None else Endpoint.parse(told["master"]), told["group"], life)


def _complain(store: Store, key: str, text: str) -> None:
    """Tells all who wait for the key that there will be no group."""
    store.set(key, json.dumps({"complaint": text}))


def meet(store: Store, life: int, size: int, timeout: timedelta) -> None:
    """Returns when all ranks are here, so that an elastic group begins with all of them, whatever its minimum is.

    Raises `UsageBackendError` if one of them has said that it can't.
    """
    if size == 1:
        return
    met = f"{_MET}/{life}"
    if store.add(f"{_ARRIVED}/{life}", 1) == size:
        store.set(met, "{}")
    try:
        store.wait([met], timeout)
    except RuntimeError as error:
        arrived = store.add(f"{_ARRIVED}/{life}", 0)
        text = f"only {arrived} of {size} ranks have come within {timeout}: {error}"
        raise TimeoutBackendError(text, calls={}) from error
    complaint = json.loads(store.get(met)).get("complaint")
    if complaint is not None:
        raise UsageBackendError(complaint)


def _told_by(options: Options, size: int) -> str:
    """What all ranks have to say alike."""
    limits = (options.min_world_size, options.max_world_size) if options.elastic else None
    return f"world_size={size}, elastic={options.elastic}" + (
        f", min_world_size={limits[0]}, max_world_size={limits[1]}" if limits else ""
    )


def _find_master(options: Options, known: Endpoint | None) -> Endpoint | None:
    if isinstance(options.master, Endpoint):
        return options.master
    named = read_endpoint(options.master or "")
    if named is not None:
        return named
    if _has_master_in_ray(options.namespace):
        return None
    if known is not None and _answers(known):
        return known
    return start_master_process(os.environ.get("MASTER_ADDR", LOOPBACK))


def _answers(master: Endpoint) -> bool:
    """Whether someone is there: one that was started for another group is not restarted by anyone if it dies."""
    try:
        socket.create_connection((master.host, master.port), _ANSWER_S).close()
    except OSError:
        return False
    return True


def _has_master_in_ray(namespace: str | None) -> bool:
    ray = sys.modules.get("ray")  # where nobody imported it, this process is in no Ray
    if ray is None or not ray.is_initialized():
        return False
    from ray_pccl.driver.master import find_endpoint
    from ray_pccl.errors import MasterNotFoundError

    try:
        find_endpoint(namespace)
    except MasterNotFoundError:
        return False
    return True


def _unique(name: str | None) -> str:
    return f"{name or 'torch'}/{secrets.token_hex(8)}"
