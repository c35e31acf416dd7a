"""Starting, finding and stopping the master: one detached, named actor for each Ray namespace."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from master_actor.actor import MASTER_NAME, MasterActor, erase_journal
from ray_pccl.control.endpoint import Endpoint
from ray_pccl.driver import internals
from ray_pccl.errors import (
    MasterNotFoundError,
    MasterStoppedError,
    MasterUnreachableError,
    NotAMemberError,
    UsageError,
)
from ray_pccl.reports import MasterReport
from ray_pccl.settings import PREFIX, Settings
from ray_pccl.types import GroupStatus

DEFAULT_NAMESPACE = "ray_pccl"
NAMESPACE_VARIABLE = PREFIX + "NAMESPACE"
START_TIMEOUT_S = 60.0
NO_ENTRIES = "\0"
"""A prefix that no key of a store has."""
_CALL_TIMEOUT_S = 5.0
_LOOKUP_TIMEOUT_S = 1.0
"""Short, and tried again: a member has to find a master that moved before `register_grace_s` is over."""
_RETRY_S = 0.05
_T = TypeVar("_T")


def start_master(
    *,
    namespace: str | None = None,
    settings: Settings | None = None,
    dashboard_host: str = "127.0.0.1",
    dashboard_port: int | None = None,
) -> Any:
    """Starts the master, or finds the one that runs. Idempotent: call it from as many drivers as you like.

    The master is a detached actor: it outlives this driver, and Ray restarts it when it dies, with its groups as they
    were. `stop_master()` ends it.

    Args:
        namespace: The Ray namespace to keep it in; ``RAY_PCCL_NAMESPACE`` or "ray_pccl" if not given, whatever the
            namespace of the job is, so that another job finds it.
        settings: For a master that is started by this call; from ``RAY_PCCL_*`` variables if not given.
        dashboard_host: Where the live page is served, on the node that the master runs on: by default for that node
            alone. On another address, such as 0.0.0.0, it asks for a token. Empty: there is no page.
        dashboard_port: The page's port; if not given it is 48149, or any other if that is taken, and stays the same
            when the master is restarted. `report().dashboard` is the whole address.

    Returns:
        The actor's handle.
    """
    _require_ray()
    namespace = _namespace(namespace)
    settings = settings if settings is not None else Settings.from_env()
    options = {"name": MASTER_NAME, "namespace": namespace, "lifetime": "detached", "get_if_exists": True}
    actor = MasterActor.options(**options, max_restarts=-1, num_cpus=0).remote(
        namespace, settings, dashboard_host, dashboard_port
    )
    _patiently(lambda: ray.get(actor.endpoint.remote(), timeout=START_TIMEOUT_S), START_TIMEOUT_S)
    return actor


def stop_master(*, namespace: str | None = None) -> None:
    """Ends the master for good. Its peers get `MasterStoppedError`. Does nothing if there is none."""
    _require_ray()
    namespace = _namespace(namespace)
    try:
        actor = ray.get_actor(MASTER_NAME, namespace=namespace)
    except ValueError:
        return
    # A master that can't be asked any more is killed all the same. Its journal goes first: once it is dead, another
    # driver may start the next one.
    with contextlib.suppress(RayActorError, GetTimeoutError):
        ray.get(actor.stop.remote("stop_master() was called"), timeout=_CALL_TIMEOUT_S)
    erase_journal(namespace, timeout_s=_CALL_TIMEOUT_S)
    ray.kill(actor, no_restart=True)


def find_master(namespace: str | None = None) -> Any:
    """The handle of the master that runs, or `MasterNotFoundError`."""
    _require_ray()
    try:
        return ray.get_actor(MASTER_NAME, namespace=_namespace(namespace))
    except ValueError:
        raise MasterNotFoundError(
            f"there is no master in the Ray namespace {_namespace(namespace)!r}: call ray_pccl.start_master() first"
        ) from None


def describe(
    namespace: str | None = None, prefix: str = NO_ENTRIES, *, timeout_s: float = START_TIMEOUT_S
) -> list[GroupStatus]:
    """What the master knows of its groups, with the entries of their stores whose keys begin with the prefix.

    Without a master there are none.
    """
    try:
        master = find_master(namespace)
    except MasterNotFoundError:
        return []
    patience = min(timeout_s, _CALL_TIMEOUT_S)
    return _patiently(lambda: ray.get(master.describe.remote(prefix), timeout=patience), timeout_s)


def report(namespace: str | None = None, *, since: int = 0, timeout_s: float = START_TIMEOUT_S) -> MasterReport:
    """What the master tells of itself and its groups: members, rings, operations, throughput, the timeline.

    Args:
        namespace: The Ray namespace of the master, if not the default one.
        since: Only happenings after this number; all that are kept if not given.
        timeout_s: How long to wait for a master that is being restarted.

    Raises:
        MasterNotFoundError: There is none: call `start_master()` first.
        MasterUnreachableError: It did not answer in time.
    """
    master = find_master(namespace)
    patience = min(timeout_s, _CALL_TIMEOUT_S)
    answer: MasterReport = _patiently(lambda: ray.get(master.report.remote(since), timeout=patience), timeout_s)
    return answer


def evict(peer_id: str, reason: str = "", *, namespace: str | None = None) -> None:
    """Puts a peer out of its group: it gets `PeerEvictedError` with the reason, and the others go on without it.

    Raises:
        MasterNotFoundError: There is no master.
        NotAMemberError: No group has such a member, nor waits one for admission.
        MasterUnreachableError: The master did not answer in time.
    """
    known = report(namespace, timeout_s=_CALL_TIMEOUT_S)
    if not any(
        peer_id in group.waiting or any(member.peer_id == peer_id for member in group.members) for group in known.groups
    ):
        raise NotAMemberError(f"no group of this master has a peer {peer_id!r}: `ray-pccl status` lists them")
    master = find_master(namespace)
    why = reason or "an operator put it out"
    _patiently(lambda: ray.get(master.evict.remote(peer_id, why), timeout=_CALL_TIMEOUT_S), _CALL_TIMEOUT_S)


def find_endpoint(namespace: str | None = None, *, timeout_s: float = START_TIMEOUT_S) -> Endpoint:
    """Where the master listens now; waits for one that is being restarted.

    Raises:
        MasterNotFoundError: There is none: call `start_master()` first.
        MasterUnreachableError: It did not answer in time.
    """
    _require_ray()
    find_master(namespace)
    return _patiently(finder(namespace), timeout_s)


def finder(namespace: str | None) -> Callable[[], Endpoint]:
    """A function that asks Ray where the master is. It raises `MasterStoppedError` once there is none any more."""
    namespace = _namespace(namespace)

    def find() -> Endpoint:
        try:
            with internals.in_background():  # a communicator asks in a thread of its own
                return ask()
        except internals.RayGoneError as gone:
            raise UsageError(f"{gone}, so the master can't be looked up any more") from None

    def ask() -> Endpoint:
        try:
            actor = ray.get_actor(MASTER_NAME, namespace=namespace)
        except ValueError:
            # Ray restarts the actor whenever it dies, so one that is not there was stopped.
            raise MasterStoppedError(f"the master in the Ray namespace {namespace!r} was stopped") from None
        answer: Any = ray.get(actor.endpoint.remote(), timeout=_LOOKUP_TIMEOUT_S)
        assert isinstance(answer, Endpoint)
        return answer

    return find


def _patiently(call: Callable[[], _T], timeout_s: float) -> _T:
    """Calls the master, and again while Ray restarts it."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return call()
        except (RayActorError, GetTimeoutError) as error:
            if time.monotonic() >= deadline:
                raise MasterUnreachableError(
                    f"the master did not answer within {timeout_s:g} s; its log is in Ray's dashboard: {error}"
                ) from error
            time.sleep(_RETRY_S)


def _namespace(namespace: str | None) -> str:
    return namespace or os.environ.get(NAMESPACE_VARIABLE) or DEFAULT_NAMESPACE


def _require_ray() -> None:
    if not ray.is_initialized():
        raise UsageError("Ray is not running in this process: call ray.init() first, or pass master=<endpoint>")
