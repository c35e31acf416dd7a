"""The master as a detached Ray actor, with its journal in Ray's internal key-value store.

The actor is the server of `master_actor.thread` and nothing else: Ray finds, places and restarts it, and hands out its
key; all talk with peers goes over the server's own connections.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import ray
from ray.experimental import internal_kv

from master_actor.journal import Journal
from master_actor.thread import MasterThread
from ray_pccl.control.endpoint import Endpoint
from ray_pccl.errors import MasterUnreachableError, SettingsError
from ray_pccl.logs import configure_from_env
from ray_pccl.metrics import EXPORT_EVERY_S, MasterMetrics
from ray_pccl.reports import MasterReport
from ray_pccl.settings import Settings
from ray_pccl.types import GroupStatus

log = logging.getLogger("ray_pccl.master")

MASTER_NAME = "ray_pccl_master"
_KV_NAMESPACE = b"ray_pccl_journal"
_RETRY_S = 0.2
_T = TypeVar("_T")


class RayStorage:
    """Journal storage in Ray's internal key-value store (the GCS): it outlives the actor, wherever it is restarted.

    While the GCS can't be reached, calls are tried again: the master decides nothing meanwhile, and peers go on.
    """

    def __init__(self, namespace: str, *, timeout_s: float = float("inf")) -> None:
        self._prefix = f"{namespace}/".encode()
        self._timeout_s = timeout_s

    def create(self, key: str, value: bytes) -> bool:
        put = internal_kv._internal_kv_put
        return not self._patiently(lambda: put(self._key(key), value, overwrite=False, namespace=_KV_NAMESPACE))

    def read(self, key: str) -> bytes | None:
        value: bytes | None = self._patiently(
            lambda: internal_kv._internal_kv_get(self._key(key), namespace=_KV_NAMESPACE)
        )
        return value

    def keys(self, prefix: str) -> list[str]:
        found = self._patiently(lambda: internal_kv._internal_kv_list(self._key(prefix), namespace=_KV_NAMESPACE))
        return [bytes(key).removeprefix(self._prefix).decode() for key in found]

    def delete(self, key: str) -> None:
        self._patiently(lambda: internal_kv._internal_kv_del(self._key(key), namespace=_KV_NAMESPACE))

    def close(self) -> None:
        pass

    def _key(self, key: str) -> bytes:
        return self._prefix + key.encode()

    def _patiently(self, call: Callable[[], _T]) -> _T:
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return call()
            except Exception as error:  # Ray raises different ones, depending on what of the GCS is away
                if time.monotonic() >= deadline:
                    raise MasterUnreachableError(f"the journal in Ray's GCS can't be reached: {error}") from error
                log.warning("the journal can't be reached, trying again: %s", error)
                time.sleep(_RETRY_S)


def erase_journal(namespace: str, *, timeout_s: float) -> None:
    """Forgets everything about the master of a namespace."""
    Journal(RayStorage(namespace, timeout_s=timeout_s)).erase()


class MasterService:
    """The actor's class. It starts serving when it is made, and again, by itself, when Ray restarts it."""

    def __init__(
        self, namespace: str, settings: Settings, dashboard_host: str = "", dashboard_port: int | None = None
    ) -> None:
        try:
            configure_from_env()
        except SettingsError as error:  # a slip in a node's environment must not cost the cluster its master
            log.warning("the log is as Ray has it: %s", error)
        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._master = MasterThread(
            host=host,
            storage=RayStorage(namespace),
            settings=settings,
            dashboard_host=dashboard_host,
            dashboard_port=dashboard_port,
        )
        try:
            self._endpoint = self._master.start()
        except BaseException:
            log.exception("the master could not start")
            os._exit(1)  # an exception here would be the end of the actor; a death, Ray makes good
        threading.Thread(target=self._exit_when_superseded, name="ray_pccl-fence", daemon=True).start()
        threading.Thread(target=self._export_metrics, name="ray_pccl-metrics", daemon=True).start()

    def endpoint(self) -> Endpoint:
        """Where peers reach the master, and the key that they must prove."""
        return self._endpoint

    def pid(self) -> int:
        """The process that the master runs in."""
        return os.getpid()

    def describe(self, prefix: str) -> list[GroupStatus]:
        """Every group, with what its store holds under keys of this prefix."""
        return self._master.describe(prefix)

    def report(self, since: int = 0) -> MasterReport:
        """All that onlookers may know, with the happenings after that number."""
        return self._master.report(since)

    def expect(self, group: str, number: int) -> None:
        """So many peers are to be waited for while the group forms."""
        self._master.expect(group, number)

    def evict(self, peer_id: str, reason: str) -> None:
        """Puts a peer out of its group."""
        self._master.evict(peer_id, reason)

    def stop(self, reason: str) -> None:
        """Ends the master for good: peers are told, and the journal is erased."""
        self._master.stop(reason)

    def _export_metrics(self) -> None:
        metrics = MasterMetrics()
        while not self._master.superseded.wait(EXPORT_EVERY_S):
            try:
                metrics.export(self._master.report(metrics.since))
            except Exception as error:  # an onlooker must not disturb; and a master that ends has no loop any more
                log.debug("metrics could not be handed to Ray: %s", error)

    def _exit_when_superseded(self) -> None:
        self._master.superseded.wait()
        # Another instance is the master now. Ray restarts only the one that it still knows.
        os._exit(1)


MasterActor: Any = ray.remote(MasterService)
"""The actor that `ray_pccl.start_master` makes."""
