"""The in-memory object store: values stay in the process that made them, and their ObjectRefs carry tickets.

Whoever unpickles a ticket gets the value: in the process that made it the very same tensors, elsewhere a copy that is
fetched over our own connections. As a ticket is an ordinary small object to Ray, it may be nested, awaited, not ready
yet, and go to plain tasks and actors. `claims` says how long a value is kept.
"""

from __future__ import annotations

import functools
import logging
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray import cloudpickle

from ray_pccl.driver import internals
from ray_pccl.driver.claims import KEPT, NOT_KEPT, Claim, Duty
from ray_pccl.driver.desk import Contact, local_desk
from ray_pccl.driver.errors import actor_lost
from ray_pccl.driver.fetching import fetch, serve
from ray_pccl.driver.tensors import Form, form_of
from ray_pccl.driver.trees import Slot, put_together, take_apart
from ray_pccl.peer.statistics import Recorder

log = logging.getLogger("ray_pccl.objects")


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

    name: str
    holder: Contact
    actor_id: str
    skeleton: Any
    forms: tuple[Form, ...]


class Boxed:
    """A value that is kept, on its way out of an actor's method: it pickles as its ticket."""

    def __init__(self, ticket: Ticket, anchor: Any) -> None:
        self._ticket = ticket
        self._anchor = anchor

    def __reduce__(self) -> tuple[Callable[[bytes, Any], Any], tuple[bytes, Any]]:
        # As bytes: Ray's own pickler looks at every object in turn, which takes longer than a small collective.
        dumps = pickle.dumps if _is_plain(self._ticket.skeleton) else cloudpickle.dumps
        return unbox, (dumps(self._ticket), self._anchor)


def _is_plain(skeleton: Any) -> bool:
    """Whether it has nothing in it that only Ray's pickler takes along, such as classes of a script."""
    if type(skeleton) in (list, tuple):
        return all(map(_is_plain, skeleton))
    if type(skeleton) is dict:
        return all(map(_is_plain, skeleton)) and all(map(_is_plain, skeleton.values()))
    return type(skeleton) in (Slot, str, int, float, bool, bytes, type(None))


def unbox(text: bytes, anchor: Any) -> Any:
    """The value of a ticket. If its holder is gone it *returns* the error, which Ray raises then as it is."""
    del anchor  # it has come along only so that Ray counts it
    ticket: Ticket = cloudpickle.loads(text)
    if ticket.holder.token == local_desk().contact.token:
        try:
            return local_store().value(ticket.name)
        except KeyError:
            return actor_lost(ticket.actor_id, "it held a value, which was freed")
    try:
        tensors = fetch(ticket.holder, ticket.name, ticket.forms)
    except OSError as error:
        return actor_lost(ticket.actor_id, f"it held a value, which can't be had: {error}")
    return put_together(ticket.skeleton, tensors)


class ObjectStore:
    """The values that this process holds."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[Any, list[Any]]] = {}
        """Skeletons and tensors, by name."""
        self._sizes: dict[str, int] = {}
        self._bytes = 0
        self._duties: dict[str, Duty] = {}
        self._dialing = threading.Lock()
        self._lock = threading.RLock()
        serve(self.tensors)

    def keep(self, value: Any, claim: Claim, anchor: Any) -> tuple[Any, bytes]:
        """What a method has to return so that its value stays here for as long as it is claimed: two objects.

        The first is the value itself if it has no tensors, or if its owner can't be reached. The second is the anchor,
        of which this is the contents: whether the value is kept.
        """
        skeleton, tensors = take_apart(value)
        if not tensors:
            return value, NOT_KEPT
        forms = tuple(form_of(tensor) for tensor in tensors)
        try:
            duty = self._duty(claim.owner)
        except OSError as error:
            log.warning("a value goes through Ray's object store, since its owner can't be reached: %s", error)
            return value, NOT_KEPT
        name = str(claim)
        with self._lock:
            self._drop(claim)  # of an earlier attempt at the same task
            self._values[name] = skeleton, tensors
            self._sizes[name] = size = sum(form.nbytes for form in forms)
            self._bytes += size
        if not duty.keep(claim.number):
            self._drop(claim)
        return Boxed(Ticket(name, local_desk().contact, actor_id(), skeleton, forms), anchor), KEPT

    def value(self, name: str) -> Any:
        """A value, of the very tensors that are held. `KeyError` if it is not."""
        with self._lock:
            skeleton, tensors = self._values[name]
        return put_together(skeleton, tensors)

    def tensors(self, name: str) -> list[Any]:
        """The tensors of a value, in order. `KeyError` if it is not held."""
        with self._lock:
            return self._values[name][1]

    def stats(self) -> StoreStats:
        """How much is held."""
        with self._lock:
            return StoreStats(len(self._sizes), self._bytes)

    def _duty(self, owner: Contact) -> Duty:
        with self._dialing:  # not the other lock: an owner may be slow to answer
            duty = self._duties.get(owner.token)
            if duty is None or duty.over:
                self._duties = {token: each for token, each in self._duties.items() if not each.over}
                duty = self._duties[owner.token] = Duty(owner, actor_id(), self._drop)
            return duty

    def _drop(self, claim: Claim) -> None:
        with self._lock:
            self._values.pop(str(claim), None)
            self._bytes -= self._sizes.pop(str(claim), 0)


def keep_for(claim: Claim, value: Any) -> tuple[Any, bytes]:
    """Keeps what the present task is about to return. See `ObjectStore.keep`."""
    return local_store().keep(value, claim, internals.second_return(claim.address))


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
            _store = store = ObjectStore()
            Recorder.store_bytes = staticmethod(lambda: store.stats().bytes)
        return _store
