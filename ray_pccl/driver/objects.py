"""The in-memory object store: values stay in the process that made them, and their ObjectRefs carry tickets.

A value is kept under an *anchor*, an ObjectRef that this process owns and that travels inside the ticket: Ray counts
its references wherever they go, and says when the last is gone. Whoever unpickles a ticket gets the value: in the
process that made it the very same tensors, elsewhere a copy that is fetched over our own connections. As a ticket is an
ordinary small object to Ray, it may be nested, awaited, not ready yet, and go to plain tasks and actors.
"""

from __future__ import annotations

import functools
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from ray_pccl.driver import internals
from ray_pccl.driver.anchors import Anchors
from ray_pccl.driver.errors import actor_lost
from ray_pccl.driver.fetching import Counter, Holder, fetch
from ray_pccl.driver.tensors import Form, form_of
from ray_pccl.driver.trees import put_together, take_apart


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What an actor holds for others."""

    objects: int
    """Values whose ObjectRefs are alive somewhere."""
    bytes: int
    """The size of their tensors."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Where a value is, and what it is made of."""

    object_id: str
    holder: Holder
    actor_id: str
    skeleton: Any
    forms: tuple[Form, ...]


class Boxed:
    """A value that is kept, on its way out of an actor's method: it pickles as its ticket."""

    def __init__(self, ticket: Ticket, anchor: Any) -> None:
        self._ticket = ticket
        self._anchor = anchor

    def __reduce__(self) -> tuple[Callable[[Ticket, Any], Any], tuple[Ticket, Any]]:
        return unbox, (self._ticket, self._anchor)


def unbox(ticket: Ticket, anchor: Any) -> Any:
    """The value of a ticket. If its holder is gone it *returns* the error, which Ray raises then as it is."""
    store = local_store()
    if ticket.holder.token == store.token:
        return put_together(ticket.skeleton, store.tensors(ticket.object_id))
    internals.forget_borrowed(anchor)
    try:
        tensors = fetch(ticket.holder, ticket.object_id, ticket.forms)
    except OSError as error:
        return actor_lost(ticket.actor_id, f"it held the value {ticket.object_id}, which can't be had: {error}")
    return put_together(ticket.skeleton, tensors)


class ObjectStore:
    """The values that this process holds."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(16)
        """Names this process: another one of the same actor, after a restart, holds none of its values."""
        self._tensors: dict[str, list[Any]] = {}
        self._sizes: dict[str, int] = {}
        self._bytes = 0
        self._anchors = Anchors()
        self._counter: Counter | None = None
        self._lock = threading.RLock()  # a collection of garbage may free an anchor while we hold it
        internals.register(self._drop)

    def keep(self, value: Any) -> Any:
        """What a method has to return so that its value stays here; the value itself if it has no tensors."""
        skeleton, tensors = take_apart(value)
        if not tensors:
            return value
        anchor = self._anchors.take()
        forms = tuple(form_of(tensor) for tensor in tensors)
        with self._lock:
            self._tensors[anchor.hex()] = tensors
            self._sizes[anchor.hex()] = size = sum(form.nbytes for form in forms)
            self._bytes += size
            if self._counter is None:
                host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
                self._counter = Counter(self.token, host, self.tensors)
        return Boxed(Ticket(anchor.hex(), self._counter.holder, actor_id(), skeleton, forms), anchor)

    def tensors(self, object_id: str) -> list[Any]:
        """The tensors of a value, in order. `KeyError` if it is not held."""
        with self._lock:
            return self._tensors[object_id]

    def stats(self) -> StoreStats:
        """How much is held."""
        with self._lock:
            return StoreStats(len(self._sizes), self._bytes)

    def _drop(self, object_id: str) -> None:
        with self._lock:
            self._tensors.pop(object_id, None)
            self._bytes -= self._sizes.pop(object_id, 0)


@functools.cache
def actor_id() -> str:
    """The actor that this process is; empty in one that is none."""
    return ray.get_runtime_context().get_actor_id() or ""


_store: ObjectStore | None = None
_making = threading.Lock()


def local_store() -> ObjectStore:
    """This process's store."""
    global _store  # noqa: PLW0603
    with _making:
        if _store is None:
            _store = ObjectStore()
        return _store
