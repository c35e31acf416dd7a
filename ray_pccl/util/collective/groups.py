"""The collective groups of this process, by name, and the declarations in which a driver announced groups."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any, NamedTuple, TypeAlias

import ray
from ray.exceptions import RayActorError
from ray.util.collective import util as _rays
from ray.util.collective.backend_registry import _global_registry

from ray_pccl.util.collective.backend import BACKEND_NAME, PCCLGroup

log = logging.getLogger("ray_pccl.util.collective")

DEFAULT_TIMEOUT_MS = 30000
SERVED = frozenset({"NCCL", "GLOO", "TORCH_GLOO", BACKEND_NAME})
"""The backends whose work our data plane does: Ray's, and our own. Others are the user's, and do it themselves."""


Group: TypeAlias = Any
"""A `BaseGroup`, whose methods Ray has not typed."""


class Declaration(NamedTuple):
    """What is known of a group before this process is in it."""

    world_size: int
    rank: int
    backend: str
    timeout_ms: int


class Groups:
    """The groups that this process is in. May be used from several threads.

    While one is being initialised, others can be used; only calls that need the same one wait for it.
    """

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self._turns: dict[str, threading.Lock] = {}

    def get(self, name: str) -> Group | None:
        """The group, if this process is in it."""
        return self._groups.get(name)

    def create(self, name: str, wanted: Declaration) -> None:
        """Initialises a group: waits for all its ranks."""
        with self._turn(name):
            if name in self._groups:
                raise RuntimeError(
                    f"Trying to initialize a group a second time: this process is in {name!r} already. Call "
                    f"destroy_collective_group({name!r}) first"
                )
            _check_rank(wanted)
            self._groups[name] = _make(name, wanted)

    def get_or_create(self, name: str) -> Group:
        """The group; one that was declared, and is used for the first time, is initialised."""
        group = self._groups.get(name)
        if group is not None:
            return group
        with self._turn(name):
            if name not in self._groups:
                self._groups[name] = _make(name, _declared(name))
            return self._groups[name]

    def destroy(self, name: str) -> None:
        """Leaves the group, and withdraws its declaration."""
        with self._turn(name):
            group = self._groups.pop(name, None)
            if group is None:
                log.warning("The group %r does not exist.", name)
                return
            group.destroy_group()
            _withdraw(name)

    def _turn(self, name: str) -> threading.Lock:
        return self._turns.setdefault(name, threading.Lock())


def is_known(backend: str) -> bool:
    """Whether there is a backend of this name."""
    return backend.upper() in SERVED or _global_registry.is_registered(backend)


def is_available(backend: str) -> bool:
    """Whether a backend can be used."""
    return backend.upper() in SERVED or _global_registry.check(backend)


def declare(name: str, actor_ids: list[Any], ranks: list[int], world_size: int, backend: str, timeout_ms: int) -> None:
    """Announces a group to its actors. Raises `RuntimeError` if one of that name is announced already."""
    actor: Any = _rays.Info
    try:
        info = actor.options(name=_info_name(name), lifetime="detached", num_cpus=0).remote()
    except ValueError as taken:
        raise twice(name) from taken
    ray.get(info.set_info.remote(actor_ids, world_size, ranks, backend, timeout_ms))


def is_declared(name: str) -> bool:
    """Whether a group of that name is announced in this Ray namespace."""
    try:
        ray.get_actor(_info_name(name))
    except ValueError:
        return False
    return True


def twice(name: str) -> RuntimeError:
    """The error for a group that is declared again."""
    return RuntimeError(
        f"Trying to initialize a group twice: {name!r} was declared before. It ends when one of its actors calls "
        f"destroy_collective_group({name!r})"
    )


def _info_name(name: str) -> str:
    return f"info_{name}"  # as Ray's


def _declared(name: str) -> Declaration:
    """This process's part in a group that was declared, by a driver or in the environment."""
    try:
        info: Any = ray.get(ray.get_actor(_info_name(name)).get_info.remote())
        ids, world_size, ranks, backend, timeout_ms = info
        me = ray._private.worker.global_worker.core_worker.get_actor_id()
        return Declaration(world_size, ranks[ids.index(me)], backend, timeout_ms)
    except (ValueError, RayActorError) as missing:
        if os.environ.get("collective_group_name") != name:  # noqa: SIM112  (Ray's name)
            raise RuntimeError(
                f"The collective group {name!r} is not initialized in the process: call init_collective_group() here, "
                "or create_collective_group() with this actor in the driver"
            ) from missing
    return Declaration(
        int(os.environ["collective_world_size"]),  # noqa: SIM112
        int(os.environ["collective_rank"]),  # noqa: SIM112
        os.environ["collective_backend"],  # noqa: SIM112
        int(os.environ.get("collective_gloo_timeout", DEFAULT_TIMEOUT_MS)),  # noqa: SIM112
    )


def _withdraw(name: str) -> None:
    try:
        ray.kill(ray.get_actor(_info_name(name)))
    except ValueError:
        return


def _check_rank(wanted: Declaration) -> None:
    """`AssertionError` for what makes no sense, as in Ray."""
    if wanted.world_size <= 0:
        raise AssertionError(f"world_size is 1 or more, not {wanted.world_size}")
    if not 0 <= wanted.rank < wanted.world_size:
        raise AssertionError(f"rank is from 0 to below world_size={wanted.world_size}, not {wanted.rank}")


def _make(name: str, wanted: Declaration) -> Group:
    backend = wanted.backend.upper()
    if backend in SERVED:
        return PCCLGroup(wanted.world_size, wanted.rank, name, wanted.timeout_ms)
    cls = _global_registry.get(backend)  # ValueError, as in Ray, if there is none
    if not cls.check_backend_availability():
        raise RuntimeError(f"Backend {backend} is not available. Please check the installation.")
    return cls(wanted.world_size, wanted.rank, name)
