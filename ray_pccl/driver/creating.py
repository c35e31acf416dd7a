"""Making and finding groups: from a list of actors, by name, or along with the actors themselves."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from typing import Any

import ray
from ray import cloudpickle

from ray_pccl.driver import agent, seats
from ray_pccl.driver.groups import Group, check_actors
from ray_pccl.driver.master import describe, start_master
from ray_pccl.driver.objects import StoreStats
from ray_pccl.driver.roster import session
from ray_pccl.errors import UsageError
from ray_pccl.peer.communicator import Communicator, check_backend
from ray_pccl.settings import Settings

LAST_CALL_S = 30.0
"""How long a new group waits for actors that take long to start, before it forms without them."""
_COLLECTIVE_KEYS = ("group_name", "group_rank", "world_size", "backend")
_groups: dict[tuple[str, str | None, str], Group] = {}
"""Those of this process, by session, namespace and name."""
_lock = threading.RLock()


def create_group(
    actors: Sequence[Any],
    name: str,
    *,
    min_world_size: int = 1,
    max_world_size: int | None = None,
    backend: str = "ring",
    namespace: str | None = None,
    **settings: Any,
) -> Group:
    """Joins actors to a new group: a communicator inside each of them, whatever their class is.

    Returns at once; the first collective waits until all have joined, and so does `group.wait_ready()`.

    Args:
        actors: Their handles.
        name: The group's name, for `get_group` and `get_communicator`.
        min_world_size: With fewer members than this, collectives wait for newcomers.
        max_world_size: At most this many members.
        backend: Who moves the data: "ring", ray_pccl's own data plane; or "gloo" or "nccl", torch's process groups, for
            which every actor needs torch. Membership, commit and retry are ray_pccl's with all of them.
        namespace: The Ray namespace of the master, if not the default one. It is started if there is none.
        settings: Of `ray_pccl.Settings`, such as ``op_timeout_s=60``, for the actors' communicators.
    """
    handles = check_actors(actors)
    given = Settings.from_env(**{"last_call_s": LAST_CALL_S, **settings})
    spec = seats.GroupSpec(
        check_name(name),
        secrets.token_hex(8),
        namespace,
        min_world_size,
        max_world_size,
        len(handles),
        given,
        check_backend(backend),
    )
    Communicator(name, min_world_size=min_world_size, max_world_size=max_world_size)  # whose errors are due here
    if max_world_size is not None and len(handles) > max_world_size:
        raise UsageError(f"{len(handles)} actors are more than max_world_size={max_world_size}")
    start_master(namespace=namespace)
    with _lock:
        _require_unused(name, namespace)
        group = _groups[_key(name, namespace)] = Group(spec, handles)
    group._roster.gather()
    return group


def get_group(name: str, *, namespace: str | None = None) -> Group:
    """The group of this name, from any driver or actor.

    Raises:
        UsageError: There is none, or its actors have not joined yet.
    """
    check_name(name)
    with _lock:
        known = _groups.get(_key(name, namespace))
        if known is not None and known.is_destroyed:
            known = None
        for status in describe(namespace, seats.PREFIX):
            handles = [cloudpickle.loads(text) for key, text in status.entries.items() if key.startswith(seats.HANDLES)]
            if status.group != name or seats.SPEC not in status.entries or not handles:
                continue
            spec = cloudpickle.loads(status.entries[seats.SPEC])
            if known is None or known._roster.spec.uid != spec.uid:
                known = _groups[_key(name, namespace)] = Group(spec, handles)
            elif not known.is_forming:
                known._roster.update(handles)
            return known
        if known is not None:
            return known
    raise UsageError(f"there is no group {name!r}: make it with ray_pccl.create_group(actors, {name!r})")


def group_of(actor_ids: Sequence[str], group: Group | str | None) -> Group:
    """The group that was given, or else the one that these actors are in."""
    if isinstance(group, Group):
        return group
    if group is not None:
        return get_group(group)
    with _lock:
        here = session()
        known = [each for (of, _, _), each in _groups.items() if of == here and not each.is_destroyed]
    found = [each for each in known if any(actor_id in each._roster.actors for actor_id in actor_ids)]
    if not found:
        found = [
            get_group(status.group)
            for status in describe(None, seats.PREFIX)
            if any(seats.HANDLES + actor_id in status.entries for actor_id in actor_ids)
        ]
    if len(found) == 1:
        return found[0]
    if not found:
        raise UsageError(f"actor {actor_ids[0]} is in no group: make one with ray_pccl.create_group(actors, name)")
    names = ", ".join(sorted(repr(each.name) for each in found))
    raise UsageError(f"the actors are in the groups {names}: say which one, with group=")


def only_group(group: Group | str | None) -> Group:
    """The group that was given, or else the only one that this process knows."""
    if isinstance(group, Group):
        return group
    if group is not None:
        return get_group(group)
    with _lock:
        known = [each for (of, _, _), each in _groups.items() if of == session() and not each.is_destroyed]
    if len(known) != 1:
        names = ", ".join(repr(each.name) for each in known) or "none"
        raise UsageError(f"say which group is meant: this process knows {names}")
    return known[0]


def options(actor_class: Any, *, collective: dict[str, Any], **ray_options: Any) -> CollectiveClass:
    """An actor class whose actors join a group as they are made.

    ``ray_pccl.options(Worker, collective={...}).remote()`` makes one. Ray takes no ``collective`` among its own
    options, so this is as near to ``Worker.options(collective=...)`` as one gets.

    Args:
        actor_class: A class decorated with ``@ray.remote``.
        collective: ``group_name``, ``world_size`` and, if you like, ``group_rank`` (a rank, or a list of those to
            be given out in turn) and ``backend``, as in `create_group`. The group forms when `world_size` actors have
            joined.
        ray_options: What ``Worker.options(...)`` takes, such as ``num_cpus=1``.
    """
    return CollectiveClass(actor_class, collective, ray_options)


class CollectiveClass:
    """What `options` returns: it makes actors that are in a group."""

    def __init__(self, actor_class: Any, collective: dict[str, Any], ray_options: dict[str, Any]) -> None:
        unknown = sorted(set(collective) - set(_COLLECTIVE_KEYS))
        if unknown or not {"group_name", "world_size"} <= set(collective):
            raise UsageError(
                f"collective= takes group_name and world_size, and maybe group_rank and backend: {collective!r}"
            )
        if not hasattr(actor_class, "options") or not hasattr(actor_class, "remote"):
            raise UsageError(f"{actor_class!r} is no actor class: decorate it with @ray.remote")
        self._backend = check_backend(collective.get("backend", "ring"))
        self._name = check_name(collective["group_name"])
        self._world_size = collective["world_size"]
        if isinstance(self._world_size, bool) or not isinstance(self._world_size, int) or self._world_size < 1:
            raise UsageError(f"world_size is a number from 1, not {self._world_size!r}")
        self._ranks = self._check_ranks(collective.get("group_rank"))
        self._class = actor_class.options(**ray_options) if ray_options else actor_class

    def _check_ranks(self, given: Any) -> list[int] | None:
        ranks = [given] if isinstance(given, int) else given
        if ranks is None:
            return None
        fits = isinstance(ranks, list | tuple) and all(rank in range(self._world_size) for rank in ranks)
        if not fits or not ranks or len(set(ranks)) != len(ranks):
            raise UsageError(f"group_rank is a rank below {self._world_size}, or a list of them: not {given!r}")
        return list(ranks)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Makes an actor, and has it join."""
        start_master()
        with _lock:
            group = _groups.get(_key(self._name, None))
            if group is None or group.is_destroyed or not (group.actors or group._roster.status().members):
                given = Settings.from_env(last_call_s=LAST_CALL_S)
                uid = f"declared-{self._name}"
                spec = seats.GroupSpec(self._name, uid, None, 1, None, self._world_size, given, self._backend)
                _require_unused(self._name, None)
                group = _groups[_key(self._name, None)] = Group(spec, [])
            agreed = group._roster.spec.backend
            if agreed != self._backend:
                raise UsageError(
                    f"group {self._name!r} has backend {agreed!r}, not {self._backend!r}: say the same for all"
                )
            made = len(group._roster.actors)
            if made >= self._world_size:
                raise UsageError(f"group {self._name!r} has all its {made} actors: destroy() it, or name another")
            actor = self._class.remote(*args, **kwargs)
            group._roster.enrol(actor, self._ranks[made % len(self._ranks)] if self._ranks else None)
            return actor


# ------------------------------------------------------------------------------------------- inside an actor


def get_communicator(name: str | None = None) -> Communicator:
    """Inside an actor of a group: its very communicator, for imperative use. Waits until it is a member.

    Args:
        name: The group's name; may be left out where the actor is in one group only.
    """
    return seats.local_seats.find(name).member()


def store_stats(actor: Any) -> StoreStats:
    """How many values an actor keeps for `@ray_pccl.collective` methods and collectives, and their bytes.

    Asks the actor, which answers when it comes to it.
    """
    (handle,) = check_actors([actor])
    answer: StoreStats = ray.get(handle.__ray_call__.options(name="ray_pccl.store_stats").remote(agent.stats))
    return answer


# --------------------------------------------------------------------------------------------------- checking


def check_name(name: str) -> str:
    """A group's name is a text."""
    if not isinstance(name, str) or not name:
        raise UsageError(f"a group's name is a text, not {name!r}")
    return name


def _require_unused(name: str, namespace: str | None) -> None:
    known = _groups.get(_key(name, namespace))
    for status in describe(namespace):
        if status.group == name:
            raise UsageError(
                f"there is a group {name!r} of {len(status.members)} members already: use get_group({name!r}), or "
                "destroy() it first"
            )
    if known is not None and not known.is_destroyed and known.actors:
        raise UsageError(f"there is a group {name!r} already: use get_group({name!r}), or destroy() it first")


def _key(name: str, namespace: str | None) -> tuple[str, str | None, str]:
    return session(), namespace, name
