"""Who is in a group, as its driver sees it: actors that take part, are lost, wait to come back, or are gone.

An actor that is lost is asked to join again for as long as Ray restarts it. Once it waits at the master, the next call
admits it first.
"""

from __future__ import annotations

import enum
import functools
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError

from ray_pccl.driver import agent, internals
from ray_pccl.driver.master import START_TIMEOUT_S, describe, find_master
from ray_pccl.driver.seats import HANDLES, GroupSpec, actor_of
from ray_pccl.errors import MasterError, UsageError
from ray_pccl.types import GroupStatus

log = logging.getLogger("ray_pccl.driver")

LOOK_S = 0.02
SLOWLY_S = 0.3
BRIEFLY_S = 1.0
AGAIN_S = 1.0
"""How long to wait for an actor that was asked to join: it may have been restarted since."""


class State(enum.Enum):
    """What an actor is to its group."""

    SEATED = "seated"
    """It takes part."""
    AWAY = "away"
    """It was lost, or is new, and is asked to join."""
    WAITING = "waiting"
    """It waits at the master; the next call admits it."""
    DEAD = "dead"
    """It is gone for good."""


class Actor:
    """One actor of a group."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.id: str = handle._actor_id.hex()
        self.state = State.SEATED
        self.life = 0
        """How often it was lost: what an earlier life left behind says nothing about this one."""
        self.peer_id = ""
        """Its peer in this life, once it is known."""
        self.past: set[str] = set()
        """Its peers in earlier lives."""
        self.votes: list[Any] = []
        """Of those who were to let it in: it may not have waited any more, or not yet again, when they were counted."""
        self.first: int | None = None
        """The number of the first call that it had from here since it joined."""

    def ask(self, name: str, function: Any, *args: Any, **options: Any) -> Any:
        """Runs one of the agent's functions in the actor, under a name that Ray's task list shows."""
        return self.handle.__ray_call__.options(name=name, **options).remote(function, *args)


def session() -> str:
    """Names the Ray that this process is connected to: what another one left behind does not count."""
    if not ray.is_initialized():
        raise UsageError("Ray is not running in this process: call ray.init() first")
    context = ray.get_runtime_context()
    return f"{context.gcs_address} {context.get_worker_id()}"  # a driver's id is that of its job, in whichever cluster


class Roster:
    """The actors of one group, by id, in the order in which they were given."""

    def __init__(self, spec: GroupSpec, handles: Sequence[Any]) -> None:
        self.spec = spec
        self.lock = threading.RLock()
        self.actors = {actor.id: actor for actor in map(Actor, handles)}
        self.closed = False
        self._session = session()
        internals.in_background.start(self._keep_looking, "ray_pccl-roster")
        self.forming = False
        """Whether actors were asked to join for the first time, and not all are known to have."""

    def present(self) -> list[Actor]:
        """Those that are not gone for good."""
        with self.lock:
            return [actor for actor in self.actors.values() if actor.state is not State.DEAD]

    def status(self, timeout_s: float = START_TIMEOUT_S) -> GroupStatus:
        """What the master knows of the group."""
        for status in describe(self.spec.namespace, HANDLES, timeout_s=timeout_s):
            if status.group == self.spec.name:
                return status
        return GroupStatus(self.spec.name, 0, (), (), {})

    def update(self, handles: Sequence[Any]) -> None:
        """Takes over which actors are in the group by what its own list says, which other callers may have changed."""
        with self.lock:
            listed = {handle._actor_id.hex(): handle for handle in handles}
            for actor_id, handle in listed.items():
                known = self.actors.get(actor_id)
                if known is None or known.state is State.DEAD:
                    self.actors[actor_id] = Actor(handle)
            for actor_id in [each for each in self.actors if each not in listed]:
                if self.actors[actor_id].state is State.SEATED:
                    del self.actors[actor_id]

    # ----------------------------------------------------------------------------------------------- joining

    def enrol(self, handle: Any, rank: int | None) -> None:
        """Takes in an actor that is expected, and asks it to join."""
        with self.lock:
            actor = Actor(handle)
            self.actors[actor.id] = actor
            self.forming = True
            self._await_behind({actor.id: self._ask_to_join(actor, rank)})

    def gather(self) -> None:
        """Asks all actors to join, for the first time: the group forms when all of them have."""
        with self.lock:
            self.forming = True
            self._await_behind({actor.id: self._ask_to_join(actor) for actor in self.actors.values()})

    def _await_behind(self, asked: dict[str, Any]) -> None:
        internals.in_background.start(self._await_all, "ray_pccl-gather", asked)

    def enlist(self, actor: Actor, *, invited: bool) -> None:
        """Asks an actor to join, again and again if need be, behind the caller's back.

        `invited`: also if it was made to leave before.
        """
        actor.state = State.AWAY
        actor.life += 1
        if actor.peer_id:
            actor.past.add(actor.peer_id)
        actor.peer_id, actor.votes = "", []
        internals.in_background.start(self._bring_in, "ray_pccl-enlist", actor, invited)

    def lost(self, actor: Actor, life: int, reason: str) -> None:
        """An actor turned out to be lost, in this life of its."""
        with self.lock:
            if actor.state is State.SEATED and actor.life == life and not self.closed:
                log.info("group %s: actor %s is lost: %s", self.spec.name, actor.id, reason)
                self.put_out(actor)
                self.enlist(actor, invited=False)

    def put_out(self, actor: Actor) -> None:
        """Has the master evict an actor: it may live, and be waited for by the others, in calls that it won't get."""
        try:
            with internals.in_background():
                actor.peer_id = actor.peer_id or self._peer_of(actor)
                if actor.peer_id:
                    find_master(self.spec.namespace).evict.remote(actor.peer_id, "the driver of its group lost it")
        except (MasterError, internals.RayGoneError) as error:
            log.info("group %s: actor %s was not put out: %s", self.spec.name, actor.id, error)

    def _peer_of(self, actor: Actor) -> str:
        """The peer that an actor is by the master's word, where its own has not come yet."""
        status = self.status(BRIEFLY_S)
        peers = [peer for peer in (*status.members, *status.waiting) if actor_of(peer) == actor.id]
        return next((peer for peer in peers if peer not in actor.past), "")

    def look(self) -> None:
        """Sees who is no member any more, though nobody has called it since."""
        with self.lock:
            seated = [
                (actor, actor.life, actor.peer_id, _are_ready(actor.votes))
                for actor in self.actors.values()
                if actor.state is State.SEATED
            ]
        status = self._look_behind()
        if not status.members:
            return
        known = {*status.members, *status.waiting}
        for actor, life, peer_id, voted in seated:
            if not peer_id:
                continue
            if peer_id not in known:
                self.lost(actor, life, "it is no member any more")
            elif voted and peer_id in status.waiting:
                self.lost(actor, life, "it did not wait yet when it was to be admitted")
            elif voted:
                actor.votes = []

    def _keep_looking(self) -> None:
        while self._is_live():
            time.sleep(SLOWLY_S)
            try:
                self.look()
            except Exception as error:  # the master is away, or Ray itself
                log.info("group %s: nobody could look: %s", self.spec.name, error)

    def _seat(self, status: GroupStatus) -> None:
        """A group that has formed anew has all its members at once: no call must leave one of them out."""
        peers = {actor_of(peer): peer for peer in status.members}
        for actor in self.actors.values():
            peer = peers.get(actor.id)
            if peer is not None and peer not in actor.past and actor.state in (State.AWAY, State.WAITING):
                actor.state, actor.first, actor.peer_id = State.SEATED, None, peer

    def _ask_to_join(self, actor: Actor, rank: int | None = None, *, invited: bool = True, anew: bool = False) -> Any:
        # Also through restarts: an actor that is on its way back is to be asked when it is there.
        call = functools.partial(agent.join, invited=invited, anew=anew)
        return actor.ask(f"ray_pccl.join({self.spec.name})", call, self.spec, rank, max_task_retries=-1)

    def _await_all(self, asked: dict[str, Any]) -> None:
        """Sees who has not even begun to join, so that the others need not wait for the last call."""
        missing = 0
        peers: dict[str, str] = {}
        for actor_id, joined in asked.items():
            try:
                peers[actor_id] = self._await(joined)
            except internals.RayGoneError:
                return
            except Exception as error:  # the actor is gone
                log.info("actor %s does not join group %s: %s", actor_id, self.spec.name, error)
                missing += 1
                with self.lock:
                    if actor_id in self.actors:
                        self.actors[actor_id].state = State.DEAD
        if missing:
            try:
                with internals.in_background():
                    find_master(self.spec.namespace).expect.remote(self.spec.name, self.spec.expected - missing)
            except Exception as error:  # then they wait for the last call
                log.info("the master was not told that %d do not join %s: %s", missing, self.spec.name, error)
        self._await_formed(peers)

    def _await_formed(self, peers: dict[str, str]) -> None:
        """Sees who was late: the group has formed without it, and has to admit it."""
        while peers and self._is_live():
            try:
                status = self._look_behind()
            except Exception as error:  # the master is away, or Ray itself
                log.info("group %s: nobody could look: %s", self.spec.name, error)
                time.sleep(SLOWLY_S)
                continue
            with self.lock:
                for actor_id, peer_id in list(peers.items()):
                    actor = self.actors.get(actor_id)
                    if actor is None or actor.life:
                        del peers[actor_id]
                    elif peer_id in status.members:
                        actor.peer_id = peer_id
                        del peers[actor_id]
                    elif peer_id in status.waiting and status.members:
                        del peers[actor_id]
                        self.enlist(actor, invited=False)
            time.sleep(SLOWLY_S)

    def _is_live(self) -> bool:
        """Whether the group is, and the Ray in which it was made."""
        try:
            with internals.in_background():
                return not self.closed and session() == self._session
        except internals.RayGoneError:
            return False

    def _await(self, ref: Any) -> Any:
        """What a call returned or raised; in a thread of our own, which is not to be in Ray for long."""
        while True:
            with internals.in_background():
                if ray.wait([ref], timeout=LOOK_S, fetch_local=False)[0]:
                    return ray.get(ref)
            time.sleep(LOOK_S)

    def _look_behind(self) -> GroupStatus:
        """What the master knows of the group, for a thread of our own."""
        with internals.in_background():
            return self.status(BRIEFLY_S)

    def _bring_in(self, actor: Actor, invited: bool) -> None:
        while self._is_live() and self.actors.get(actor.id) is actor:
            try:
                with internals.in_background():
                    asked = self._ask_to_join(actor, invited=invited, anew=True)
                if self._await_room(actor, self._await(asked)):
                    return
            except ActorUnavailableError:
                time.sleep(LOOK_S)
            except (RayActorError, UsageError) as error:
                log.info("group %s: actor %s is gone for good: %s", self.spec.name, actor.id, error)
                actor.state = State.DEAD
                return
            except Exception as error:  # the master is away, or Ray itself
                log.info("group %s: actor %s is asked again: %s", self.spec.name, actor.id, error)
                time.sleep(SLOWLY_S)

    def _await_room(self, actor: Actor, peer_id: str) -> bool:
        """Waits for a while until the actor is a member; False if it has to be asked again.

        While it waits at the master, which a call ends, this looks after it: its time there may run out.
        """
        ends = time.monotonic() + AGAIN_S
        while self._is_live() and self.actors.get(actor.id) is actor:
            status = self._look_behind()
            with self.lock:
                self._seat(status)
                if actor.state is State.SEATED:
                    return True
                if peer_id in status.waiting and status.members:
                    actor.state, actor.first, actor.peer_id = State.WAITING, None, peer_id
                elif actor.state is State.WAITING or time.monotonic() >= ends:
                    actor.state, actor.peer_id = State.AWAY, ""
                    return False
            time.sleep(LOOK_S if actor.state is State.AWAY else SLOWLY_S)
        return True


def _are_ready(refs: list[Any]) -> bool:
    if not refs:
        return False
    with internals.in_background():
        return len(ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)[0]) == len(refs)
