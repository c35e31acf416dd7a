"""Where a process group lives: its master, and its name there. Rank 0 decides, and torch's store tells the others."""

from __future__ import annotations

import json
import os
import secrets
import sys
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import Store

from ray_pccl.control.endpoint import Endpoint
from ray_pccl.torch.addressing import read_endpoint
from ray_pccl.torch.options import Options
from ray_pccl.torch.own_master import LOOPBACK, start_master_process

_KEY = "ray_pccl/place"
_ARRIVED, _ALL_HERE = "ray_pccl/arrived", "ray_pccl/all_here"


@dataclass(frozen=True, slots=True)
class Place:
    """The master, and a group of it."""

    master: Endpoint | None
    """None: that of the Ray this process is in, wherever Ray has it run."""
    group: str


def find_place(options: Options, store: Store, rank: int, timeout: timedelta, known: Endpoint | None) -> Place:
    """The place of a group whose ranks share `store`; `known` is the master of another group of this process."""
    if rank == 0:
        master = _find_master(options, known)
        group = options.group if options.group and options.elastic else _unique(options.group)
        store.set(_KEY, json.dumps({"master": None if master is None else str(master), "group": group}))
        return Place(master, group)
    store.wait([_KEY], timeout)
    told = json.loads(store.get(_KEY))
    return Place(None if told["master"] is None else Endpoint.parse(told["master"]), told["group"])


def meet(store: Store, size: int, timeout: timedelta) -> None:
    """Returns when all ranks are here, so that an elastic group begins with all of them, whatever its minimum is."""
    if size > 1:
        if store.add(_ARRIVED, 1) == size:
            store.set(_ALL_HERE, "yes")
        store.wait([_ALL_HERE], timeout)


def _find_master(options: Options, known: Endpoint | None) -> Endpoint | None:
    if isinstance(options.master, Endpoint):
        return options.master
    named = read_endpoint(options.master or "")
    if named is not None:
        return named
    if _has_master_in_ray(options.namespace):
        return None
    return known if known is not None else start_master_process(os.environ.get("MASTER_ADDR", LOOPBACK))


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
