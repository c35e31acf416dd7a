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

from ray_pccl.driver import agent
from ray_pccl.driver.agent import GroupSpec
from ray_pccl.driver.master import describe, find_master
from ray_pccl.errors import RendezvousTimeoutError, UsageError
from ray_pccl.types import GroupStatus

log = logging.getLogger("ray_pccl.driver")

LOOK_S = 0.02


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
        self.is_new = True
        """Whether it has had no call from here since it joined."""

    def ask(self, name: str, function: Any, *args: Any, **options: Any) -> Any:
        """Runs one of the agent's functions in the actor, under a name that Ray's task list shows."""
        return self.handle.__ray_call__.options(name=name, **options).remote(function, *args)


class Roster:
    """The actors of one group, by id, in the order in which they were given."""

    def __init__(self, spec: GroupSpec, handles: Sequence[Any]) -> None:
        self.spec = spec
        self.lock = threading.RLock()
        self.actors = {actor.id: actor for actor in map(Actor, handles)}
        self.closed = False
        self.forming = False
        """Whether actors were asked to join for the first time, and not all are known to have."""

    def present(self) -> list[Actor]:
        """Those that are not gone for good."""
        with self.lock:
            return [actor for actor in self.actors.values() if actor.state is not State.DEAD]

    def status(self) -> GroupStatus:
        """What the master knows of the group."""
        for status in describe(self.spec.namespace, agent.HANDLES):
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
        threading.Thread(target=self._await_all, args=(asked,), name="ray_pccl-gather", daemon=True).start()

    def enlist(self, actor: Actor, *, invited: bool) -> None:
        """Asks an actor to join, again and again if need be, behind the caller's back.

        `invited`: also if it was made to leave before.
        """
        actor.state = State.AWAY
        actor.life += 1
        threading.Thread(target=self._bring_in, args=(actor, invited), name="ray_pccl-enlist", daemon=True).start()

    def lost(self, actor: Actor, life: int, reason: str) -> None:
        """An actor turned out to be lost, in this life of its."""
        with self.lock:
            if actor.state is State.SEATED and actor.life == life and not self.closed:
                log.info("group %s: actor %s is lost: %s", self.spec.name, actor.id, reason)
                self.enlist(actor, invited=False)

    def leave(self, actor: Actor) -> Any:
        """Asks an actor to leave, after the calls that were made so far."""
        return actor.ask(f"ray_pccl.leave({self.spec.name})", agent.leave, self.spec.name, self.spec.uid)

    def _ask_to_join(self, actor: Actor, rank: int | None = None, *, invited: bool = True) -> Any:
        # Also through restarts: an actor that is on its way back is to be asked when it is there.
        call = functools.partial(agent.join, invited=invited)
        return actor.ask(f"ray_pccl.join({self.spec.name})", call, self.spec, rank, max_task_retries=-1)

    def _await_all(self, asked: dict[str, Any]) -> None:
        """Sees who has not even begun to join, so that the others need not wait for the last call."""
        missing = 0
        for actor_id, joined in asked.items():
            try:
                ray.get(joined)
            except Exception as error:  # the actor is gone, or Ray is
                log.info("actor %s does not join group %s: %s", actor_id, self.spec.name, error)
                missing += 1
                with self.lock:
                    if actor_id in self.actors:
                        self.actors[actor_id].state = State.DEAD
        if missing:
            try:
                ray.get(find_master(self.spec.namespace).expect.remote(self.spec.name, self.spec.expected - missing))
            except Exception as error:  # then they wait for the last call
                log.info("the master was not told that %d do not join %s: %s", missing, self.spec.name, error)

    def _bring_in(self, actor: Actor, invited: bool) -> None:
        while not self.closed and self.actors.get(actor.id) is actor:
            try:
                self._await_room(actor, ray.get(self._ask_to_join(actor, invited=invited)))
                return
            except ActorUnavailableError:
                time.sleep(LOOK_S)
            except (RayActorError, UsageError) as error:
                log.info("group %s: actor %s is gone for good: %s", self.spec.name, actor.id, error)
                actor.state = State.DEAD
                return
            except Exception as error:  # the master is away, or Ray itself
                log.info("group %s: actor %s is asked again: %s", self.spec.name, actor.id, error)
                if not ray.is_initialized():
                    return
                time.sleep(LOOK_S)

    def _await_room(self, actor: Actor, peer_id: str) -> None:
        """Waits until the master knows that the actor wants in."""
        ends = time.monotonic() + self.spec.settings.join_timeout_s
        while time.monotonic() < ends and not self.closed:
            status = self.status()
            with self.lock:
                if peer_id in status.members:
                    actor.state, actor.is_new = State.SEATED, True
                    return
                if peer_id in status.waiting and status.members:
                    actor.state, actor.is_new = State.WAITING, True
                    return
            time.sleep(LOOK_S)
        raise RendezvousTimeoutError(f"the master does not know peer {peer_id}")
