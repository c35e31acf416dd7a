"""Everything of Ray that is used here and is not public, in one place. Tried with Ray 2.60.

* An *anchor*: an object that this process owns, with a hook that is called when its last reference, wherever it was
  passed, is gone. Ray has that for its direct transport (`ray.put(..., _tensor_transport=...)`) and nothing else.
* Waiting in an actor's event loop from `__ray_call__`, which is no coroutine itself.
* Whether a result is an error, without fetching it; and another error in the place of Ray's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any

import ray
from ray.experimental import register_tensor_transport
from ray.experimental.rdt import util as transports
from ray.experimental.rdt.rdt_manager import RDTSource
from ray.experimental.rdt.tensor_transport_manager import (
    CommunicatorMetadata,
    TensorTransportManager,
    TensorTransportMetadata,
)

TRANSPORT = "PCCL"
_PYTHON = b"PYTHON"


class _Mark:
    """What the transport takes for a tensor. It holds nothing: values are kept by `ray_pccl.driver.objects`."""


class _Transport(TensorTransportManager):
    """Moves nothing, and is told when an anchor is free."""

    on_free: Callable[[str], None] = staticmethod(lambda _object_id: None)

    def tensor_transport_backend(self) -> str:
        return TRANSPORT

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def actor_has_tensor_transport(self, _actor: Any) -> bool:
        return True

    def extract_tensor_transport_metadata(self, _object_id: str, _marks: list[Any]) -> TensorTransportMetadata:
        return TensorTransportMetadata(tensor_meta=[], tensor_device="cpu")

    def get_communicator_metadata(self, _source: Any, _target: Any, _backend: Any = None) -> CommunicatorMetadata:
        return CommunicatorMetadata()

    def recv_multiple_tensors(self, *_args: Any, **_kwargs: Any) -> list[Any]:
        raise NotImplementedError("an anchor holds nothing")

    def send_multiple_tensors(self, *_args: Any) -> None:
        raise NotImplementedError("an anchor holds nothing")

    def garbage_collect(self, object_id: str, _meta: Any, _marks: list[Any]) -> None:
        _Transport.on_free(object_id)

    def abort_transport(self, *_args: Any) -> None:
        pass


def _worker() -> Any:
    return ray._private.worker.global_worker


def register(on_free: Callable[[str], None]) -> None:
    """Has `on_free` called, in a thread of Ray's, with the id of every anchor of this process that is free."""
    _Transport.on_free = staticmethod(on_free)
    if TRANSPORT not in transports.transport_manager_info:
        before = transports.has_custom_transports
        register_tensor_transport(TRANSPORT, ["cpu"], _Transport, _Mark)
        # Else Ray would make the first call to every actor wait until the transport is known there, too.
        transports.has_custom_transports = before


def new_anchor() -> Any:
    """An ObjectRef of this process, whose end is told."""
    anchor = ray.put(_Mark(), _tensor_transport=TRANSPORT)
    manager = _worker().rdt_manager
    with manager._lock:
        # Ray would free it by a call to this actor, behind all that the actor is doing. This frees it here and now.
        known = manager._managed_rdt_metadata[anchor.hex()]
        manager._managed_rdt_metadata[anchor.hex()] = known._replace(src_actor=RDTSource.DRIVER)
    return anchor


def forget_borrowed(anchor: Any) -> None:
    """Drops what Ray notes about another's anchor, which it would keep for ever (ray#57962)."""
    manager = _worker().rdt_manager
    with manager._lock:
        manager._managed_rdt_metadata.pop(anchor.hex(), None)


def is_async_actor() -> bool:
    """Whether this process is an actor with an event loop."""
    return bool(_worker().core_worker.current_actor_is_asyncio())


def run_in_event_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine in the actor's event loop. Other calls of the actor go on meanwhile."""
    from ray._raylet import PythonFunctionDescriptor  # type: ignore[attr-defined]

    where = PythonFunctionDescriptor("ray_pccl", "collective", "")
    return _worker().core_worker.run_async_func_or_coro_in_event_loop(coroutine, where, "", is_actor_task=True)


def error_in(ref: Any) -> BaseException | None:
    """Why a ready object is an error, or None. Fetches and makes nothing of an object that is none."""
    worker = _worker()
    ((data, metadata, _),) = worker.core_worker.get_objects([ref], 0)
    if metadata is None or metadata.split(b",")[0] == _PYTHON:
        return None
    value = worker.get_serialization_context()._deserialize_object(data, metadata, ref, None)
    return value if isinstance(value, BaseException) else None


def translate_errors(translate: Callable[[str, BaseException], BaseException]) -> None:
    """Has `translate` see every error that Ray is about to raise for an object, with the object's id. Once."""
    from ray._private.serialization import SerializationContext

    original = SerializationContext._deserialize_object
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def deserialize(self: Any, data: Any, metadata: Any, ref: Any, *rest: Any) -> Any:
        value = original(self, data, metadata, ref, *rest)
        if isinstance(value, ray.exceptions.RayError) and ref is not None:
            return translate(ref.hex(), value)
        return value

    SerializationContext._deserialize_object = deserialize  # type: ignore[assignment, method-assign]
