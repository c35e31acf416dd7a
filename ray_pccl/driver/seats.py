"""This process's places in groups, where it is an actor.

An actor that was restarted is another process, which sits in no group until it is asked to.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

import ray

from ray_pccl.driver import internals
from ray_pccl.driver.errors import actor_lost
from ray_pccl.driver.lanes import Lane
from ray_pccl.driver.objects import actor_id
from ray_pccl.errors import PCCLError, UsageError
from ray_pccl.peer.communicator import Communicator
from ray_pccl.settings import Settings

log = logging.getLogger("ray_pccl.driver")

OVERTAKING_S = 2.0
PREFIX = "ray_pccl/"
SPEC, HANDLES = PREFIX + "spec", PREFIX + "actor/"
"""Where the group's key-value store keeps what `get_group` needs: what the group is, and its actors' handles."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """What all actors of a group have to know to join it."""

    name: str
    uid: str
    """Two groups of one name, one after the other, are two groups."""
    namespace: str | None
    min_world_size: int
    max_world_size: int | None
    expected: int
    settings: Settings
    backend: str = "ring"


class Seat:
    """This process's place in one group."""

    def __init__(self, spec: GroupSpec, rank: int | None) -> None:
        self.spec = spec
        self._rank = rank
        self.communicator = self._new_communicator()
        self._joined: Future[None] | None = None
        self._anew: Future[None] = Future()
        """Done when a caller has asked it to join once more, and will know its peer from then on."""
        self._lanes: dict[int, Lane] = {}
        self._lock = threading.Lock()

    def _new_communicator(self) -> Communicator:
        spec = self.spec
        return Communicator(
            spec.name,
            min_world_size=spec.min_world_size,
            max_world_size=spec.max_world_size,
            rank=self._rank,
            settings=spec.settings,
            namespace=spec.namespace,
            label=label_of(actor_id()),
            expected_world_size=spec.expected,
            backend=spec.backend,
        )

    def join(self, *, anew: bool = False) -> str:
        """Begins to join, if that is due, in a thread of its own. The id under which it does.

        `anew`: the caller has found that the actor is no member. What it asked before, not knowing which peer it asks,
        was meant for an earlier one, and is not to wait until somebody lets this one in.
        """
        with self._lock:
            if self._joined is None or (self._joined.done() and not self._is_member()):
                if self._joined is not None:  # another peer, whose id is known from the start
                    self.communicator.close()
                    self.communicator = self._new_communicator()
                    self._lanes.clear()
                self._joined = Future()
                arguments = (self.communicator, self._joined)
                threading.Thread(target=self._connect, args=arguments, name="ray_pccl-join", daemon=True).start()
            if anew and not self._joined.done() and not self._anew.done():
                self._anew.set_result(None)
                self._lanes.clear()  # nor do later calls wait for those
            return self.communicator.peer_id

    def _is_member(self) -> bool:
        try:
            return self.communicator.world_size > 0
        except PCCLError:
            return False

    def _connect(self, communicator: Communicator, joined: Future[None]) -> None:
        try:
            communicator.connect()
            joined.set_result(None)
        except BaseException as error:
            joined.set_exception(error)
            return
        try:
            handle = ray.get_runtime_context().current_actor
            communicator.store.set(SPEC, pickle.dumps(self.spec))
            communicator.store.set(HANDLES + actor_id(), pickle.dumps(handle))
        except PCCLError as error:
            log.warning("the group does not know the handle of this actor: %s", error)

    def member(self, peer: str | None = None) -> Communicator:
        """The communicator, once it is a member's. Raises why it is none.

        For a caller that does not know which peer it means (``""``): `ActorLostError` if it turns out not to be this.
        """
        joined = self._joined
        if joined is None:
            raise UsageError(f"this actor was never asked to join group {self.spec.name!r}")
        if peer == "" and not joined.done():
            wait((joined, self._anew), return_when=FIRST_COMPLETED)
            self.require(peer)
        joined.result()
        return self.communicator

    def leave(self) -> None:
        """Leaves the group, and its list of actors."""
        try:
            if self._is_member():
                self.communicator.store.delete(HANDLES + actor_id())
        except PCCLError as error:
            log.info("group %s still lists this actor: %s", self.spec.name, error)
        self.communicator.close()

    def lane(self, caller: int, peer: str) -> Lane:
        """The order in which this caller's calls to this peer are made. `ActorLostError` if it is another by now."""
        with self._lock:
            self.require(peer)
            return self._lanes.setdefault(caller, Lane())

    def require(self, peer: str) -> None:
        """Raises `ActorLostError` unless this is the peer that a caller means; it may not know which that is."""
        is_in = self._joined is not None and self._joined.done()
        if peer != self.communicator.peer_id and (peer or (self._anew.done() and not is_in)):
            raise actor_lost(actor_id(), "it was lost, and takes part again when it has joined anew")


class Seats:
    """All places of this process, by the names of their groups."""

    def __init__(self) -> None:
        self._seats: dict[str, Seat] = {}
        self._left: set[str] = set()
        """The groups that this actor was made to leave."""
        self._overtaken: dict[str, float] = {}
        """Until when the call to join a group may still come, though another call for the group is here already."""
        self._changed = threading.Condition()

    def __contains__(self, name: str) -> bool:
        return name in self._seats

    def take(self, spec: GroupSpec, rank: int | None, *, invited: bool) -> Seat:
        """The place in a group, which an earlier group of the same name loses.

        Raises `UsageError` if this actor was made to leave the group, and is not `invited` anew.
        """
        with self._changed:
            if invited:
                self._left.discard(spec.uid)
            if spec.uid in self._left:
                raise UsageError(f"actor {actor_id()} was made to leave group {spec.name!r}")
            seat = self._seats.get(spec.name)
            if seat is not None and seat.spec.uid == spec.uid:
                return seat
            new = self._seats[spec.name] = Seat(spec, rank)
            self._changed.notify_all()
        if seat is not None:
            seat.communicator.close()
        return new

    def leave(self, name: str, uid: str) -> None:
        """Gives the place in a group up, if there is one; the actor does not join this group any more."""
        with self._changed:
            self._left.add(uid)
            seat = self._seats.get(name)
            if seat is None or seat.spec.uid != uid:
                return
            del self._seats[name]
        seat.leave()

    def find(self, name: str | None) -> Seat:
        """The place in a group; in the only one if none is named."""
        with self._changed:
            if name is None and len(self._seats) == 1:
                return next(iter(self._seats.values()))
            if name is not None and name in self._seats:
                return self._seats[name]
            mine = ", ".join(map(repr, self._seats)) or "no group"
        wanted = "name one of them" if name is None else f"not in {name!r}"
        raise UsageError(
            f"this process is in {mine}: {wanted}; the driver adds actors with create_group() or group.add()"
        )

    def meant(self, name: str, uid: str, peer: str) -> Seat:
        """The place that a caller means, and the peer in it, if it knows that. `ActorLostError` in another process."""
        with self._changed:
            if not peer and not internals.runs_calls_in_order():
                # The very first calls may overtake the one to join. It is waited for once, and not by each call anew:
                # to a process that was restarted it does not come before all calls for its predecessor are done.
                patience = self._overtaken.setdefault(uid, time.monotonic() + OVERTAKING_S) - time.monotonic()
                self._changed.wait_for(lambda: name in self._seats or uid in self._left, patience)
            seat, has_left = self._seats.get(name), uid in self._left
        if has_left:
            raise actor_lost(actor_id(), f"it has left group {name!r}")
        if seat is None or seat.spec.uid != uid:
            raise actor_lost(actor_id(), "it was restarted, and takes part again when it has joined anew")
        seat.require(peer)
        return seat


local_seats = Seats()
"""Those of this process."""


def label_of(actor_id: str) -> str:
    """What the id of an actor's peers begins with."""
    return f"actor-{actor_id}"


def actor_of(peer_id: str) -> str | None:
    """The actor of a peer, if it is one."""
    kind, _, rest = peer_id.partition("-")
    return rest.partition("-")[0] if kind == "actor" else None
