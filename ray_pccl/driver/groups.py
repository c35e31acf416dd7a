"""A group of actors, as a driver holds it: who is in, and the collectives that all of them are asked for.

Its *actors* are those it was given; its *members* those that the master counts now.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import ray
from ray.exceptions import PendingCallsLimitExceeded

from ray_pccl.descriptors import ReduceOp
from ray_pccl.driver import agent
from ray_pccl.driver.agent import Call, encode_call
from ray_pccl.driver.claims import local_owner
from ray_pccl.driver.roster import LOOK_S, Actor, Roster, State
from ray_pccl.driver.seats import HANDLES, GroupSpec, actor_of, label_of
from ray_pccl.driver.watching import Followed, Watch
from ray_pccl.errors import RendezvousTimeoutError, UsageError
from ray_pccl.settings import check_timeout

_GONE_S = 2.0
"""How long an actor of which no ref was given may take to be known as dead."""
_LEAVE_S = 30.0
_CALLER_BITS = 29
_watch = Watch()


class Group:
    """Actors that reduce together. Made by `ray_pccl.create_group` or `ray_pccl.get_group`."""

    def __init__(self, spec: GroupSpec, handles: Sequence[Any]) -> None:
        self._roster = Roster(spec, handles)
        self._caller = (1 << _CALLER_BITS) | secrets.randbits(_CALLER_BITS)
        self._number = 0

    def __repr__(self) -> str:
        return f"<ray_pccl group {self.name!r} of {len(self._roster.present())} actors>"

    @property
    def name(self) -> str:
        """Its name."""
        return self._roster.spec.name

    @property
    def actors(self) -> list[Any]:
        """The actors that it was given and that are not gone for good, in that order."""
        return [actor.handle for actor in self._roster.present()]

    def members(self) -> list[Any]:
        """The actors that are members now, by rank. Asks the master."""
        known = {actor.id: actor.handle for actor in self._roster.present()}
        ids = [actor_of(peer) for peer in self._roster.status().members]
        return [known[actor_id] for actor_id in ids if actor_id in known]

    @property
    def world_size(self) -> int:
        """How many members it has now. Asks the master."""
        return len(self._roster.status().members)

    # -------------------------------------------------------------------------------------- coming and going

    def add(self, actors: Sequence[Any]) -> None:
        """Has actors join. They take part from the first call on that is made when they are ready.

        Does not wait for them: `wait_ready()` does.
        """
        handles = check_actors(actors)
        with self._roster.lock:
            self._require_open()
            for handle in handles:
                known = self._roster.actors.get(handle._actor_id.hex())
                if known is not None and known.state is not State.DEAD:
                    raise UsageError(f"actor {known.id} is in group {self.name!r} already")
            for handle in handles:
                actor = self._roster.actors[handle._actor_id.hex()] = Actor(handle)
                self._roster.enlist(actor, invited=True)

    def remove(self, actors: Sequence[Any]) -> None:
        """Has actors leave, after the calls that were made so far. The others go on without them."""
        with self._roster.lock:
            self._require_open()
            leaving = [self._known(handle._actor_id.hex()) for handle in check_actors(actors)]
            for actor in leaving:
                del self._roster.actors[actor.id]
            number = self._number
            asked, full = self._ask_to_leave(leaving, number)
        self._await_left(asked, full, number)

    def wait_ready(self, timeout: float | None = None) -> None:
        """Waits until every actor is a member, admitting those that wait.

        Raises:
            RendezvousTimeoutError: Not all were members within `timeout` seconds (``join_timeout_s`` if not given).
        """
        patience = self._roster.spec.settings.join_timeout_s if timeout is None else timeout
        ends = time.monotonic() + check_timeout(patience, "wait_ready()")
        while True:
            with self._roster.lock:
                self._require_open()
                self._admit()
            status = self._roster.status()
            members = {actor_of(peer) for peer in status.members}
            listed = {key.removeprefix(HANDLES) for key in status.entries}
            missing = [actor.id for actor in self._roster.present() if actor.id not in members & listed]
            if not missing:
                self._roster.forming = False
                return
            if time.monotonic() >= ends:
                raise RendezvousTimeoutError(
                    f"group {self.name!r} was not ready within {patience:g} s: no members yet are the actors "
                    f"{', '.join(missing)}; look whether they have started, and are not busy"
                )
            time.sleep(LOOK_S)

    def destroy(self) -> None:
        """Has all actors leave, after the calls that were made so far; the actors themselves stay."""
        with self._roster.lock:
            if self._roster.closed:
                return
            self._roster.closed = True
            number = self._number
            asked, full = self._ask_to_leave(self._roster.present(), number)
            self._roster.actors.clear()  # or its handles would keep the actors alive
        self._await_left(asked, full, number)

    def _ask_to_leave(self, actors: Sequence[Actor], number: int) -> tuple[list[Any], list[Actor]]:
        """Asks actors to leave, after the calls that were made so far: the refs of it, and whose queues are full.

        The number is the next call's: that one does not come to them, and the others are not to wait for this.
        """
        asked: list[Any] = []
        full: list[Actor] = []
        for actor in actors:
            try:
                asked.append(self._ask(actor, number, "leave", []))
            except PendingCallsLimitExceeded:
                full.append(actor)
        return asked, full

    def _await_left(self, asked: list[Any], full: list[Actor], number: int) -> None:
        """Waits until actors have left. Those whose queues stay full for too long are put out by the master."""
        ends = time.monotonic() + _LEAVE_S
        while full and time.monotonic() < ends:
            time.sleep(LOOK_S)
            with self._roster.lock:
                more, full = self._ask_to_leave(full, number)
            asked += more
        for actor in full:
            self._roster.put_out(actor)
        if asked:
            ray.wait(asked, num_returns=len(asked), timeout=max(0.0, ends - time.monotonic()))

    @property
    def is_forming(self) -> bool:
        """Whether it was made here, and not all of its actors are in its list yet."""
        return self._roster.forming

    @property
    def is_destroyed(self) -> bool:
        """Whether `destroy()` was called here."""
        return self._roster.closed

    # ------------------------------------------------------------------------------------------- collectives

    def allreduce_refs(
        self, refs: Sequence[Any], op: ReduceOp = ReduceOp.SUM, *, on_loss: str = "continue"
    ) -> list[Any]:
        """See `ray_pccl.allreduce_refs`."""
        return self._over("allreduce", refs, on_loss, op=check_op(op))

    def reduce_refs(
        self, refs: Sequence[Any], root: Any = 0, op: ReduceOp = ReduceOp.SUM, *, on_loss: str = "continue"
    ) -> Any:
        """See `ray_pccl.reduce_refs`."""
        ids = self._owners(refs)
        if isinstance(root, int) and not isinstance(root, bool) and 0 <= root < len(ids):
            place = root
        elif hasattr(root, "_actor_id") and root._actor_id.hex() in ids:
            place = ids.index(root._actor_id.hex())
        else:
            raise UsageError(f"root is a place in refs, from 0 to {len(ids) - 1}, or an actor: not {root!r}")
        return self._over("reduce", refs, on_loss, op=check_op(op), root=label_of(ids[place]))[place]

    def allgather_refs(self, refs: Sequence[Any], *, on_loss: str = "continue") -> list[Any]:
        """See `ray_pccl.allgather_refs`."""
        return self._over("allgather", refs, on_loss)

    def reducescatter_refs(
        self, refs: Sequence[Any], op: ReduceOp = ReduceOp.SUM, *, on_loss: str = "continue"
    ) -> list[Any]:
        """See `ray_pccl.reducescatter_refs`."""
        return self._over("reducescatter", refs, on_loss, op=check_op(op))

    def broadcast_ref(self, ref: Any) -> list[Any]:
        """See `ray_pccl.broadcast_ref`."""
        (root,) = self._owners([ref])
        with self._roster.lock:
            inputs = [(actor, [ref] if actor.id == root else []) for actor in self._roster.present()]
            return self._submit("broadcast", inputs, root=label_of(root))

    def barrier(self, *, on_loss: str = "continue") -> list[Any]:
        """See `ray_pccl.barrier`."""
        retry = _retries(on_loss)
        with self._roster.lock:
            return self._submit("barrier", [(actor, []) for actor in self._roster.present()], retry=retry)

    def _over(self, kind: str, refs: Sequence[Any], on_loss: str, **given: Any) -> list[Any]:
        retry = _retries(on_loss)
        ids = self._owners(refs)
        while True:
            self._require_all(set(ids), kind)
            with self._roster.lock:
                if self._left_out(set(ids)):
                    continue  # it has come back at this very moment
                inputs = [(self._known(actor_id), [ref]) for actor_id, ref in zip(ids, refs, strict=True)]
                return self._submit(kind, inputs, retry=retry, **given)

    def _submit(self, kind: str, inputs: Sequence[tuple[Actor, list[Any]]], **given: Any) -> list[Any]:
        """Makes the call on all actors, and returns the refs of its results. Under the lock."""
        self._require_open()
        self._admit()
        absent = [actor for actor, _ in inputs if actor.state is not State.SEATED]
        if absent and not given.get("retry", True):
            reason = f"it is {absent[0].state.value}, and the call was not to go on without it"
            name = f"ray_pccl.{kind}({self.name})"
            asked = [actor for actor, _ in inputs]
            refused = [actor.ask(name, agent.absent, absent[0].id, reason, max_task_retries=0) for actor in asked]
            self._follow(asked, refused)
            return refused
        places = tuple(label_of(actor.id) for actor, _ in inputs)
        number, self._number = self._number, self._number + 1
        name = f"ray_pccl.{kind}({self.name})"
        results: list[Any] = []
        try:
            for actor, refs in inputs:
                if actor.state is State.SEATED:
                    results.append(self._claimed(actor, number, kind, refs, places=places, **given))
                else:
                    reason = f"it is {actor.state.value}, and takes part again when it has joined anew"
                    results.append(actor.ask(name, agent.absent, actor.id, reason, max_task_retries=0))
        except BaseException as error:  # the queue of an actor is full, or an interrupt
            self._not_called([actor for actor, _ in inputs[len(results) :]], error)
            raise
        finally:
            done = inputs[: len(results)]
            self._follow([actor for actor, _ in done], results, [refs for _, refs in done])
        return results

    def _not_called(self, actors: Sequence[Actor], error: BaseException) -> None:
        """The others are in a call already, and not to wait for these."""
        for actor in actors:
            self._roster.lost(actor, actor.life, f"it could not be called: {type(error).__name__}")

    def _claimed(self, actor: Actor, number: int, kind: str, refs: list[Any], **given: Any) -> Any:
        """Has one actor take part, and keep its result for as long as somebody holds the ref that this returns."""
        owner = local_owner()
        claim = owner.claim()
        try:
            result, anchor = self._ask(actor, number, kind, refs, claim=claim, **given)
        except BaseException:
            owner.end(claim.number, actor.id)
            raise
        owner.bind(claim, anchor, actor.id)
        return result

    def _admit(self) -> None:
        """Has all members vote to let in who waits, if someone does. Under the lock."""
        waiting = [actor for actor in self._roster.actors.values() if actor.state is State.WAITING]
        if not waiting:
            return
        seated = [actor for actor in self._roster.actors.values() if actor.state is State.SEATED]
        number, self._number = self._number, self._number + 1
        admits = tuple(each.peer_id for each in waiting)
        results: list[Any] = []
        try:
            for actor in seated:
                results.append(self._ask(actor, number, "admit", [], admits=admits))
        except BaseException as error:
            self._not_called(seated[len(results) :], error)
            raise
        finally:
            self._follow(seated[: len(results)], results)
            if results or not seated:  # else nobody votes for them
                for actor in waiting:
                    actor.state, actor.votes = State.SEATED, results

    def _ask(self, actor: Actor, number: int, kind: str, refs: list[Any], **given: Any) -> Any:
        """Has one actor take part: the ref of its result, and that of the anchor if there is a claim."""
        spec = self._roster.spec
        actor.first = number if actor.first is None else actor.first
        kept = local_owner().name_of(refs[0]) if refs else ""
        call = Call(
            spec.name, spec.uid, self._caller, number, actor.first, kind, kept=kept, peer=actor.peer_id, **given
        )
        function = agent.leave if kind == "leave" else agent.run
        part = (function, encode_call(call), *([refs] if refs and not kept else []))
        returns = 2 if "claim" in given else 1
        return actor.ask(f"ray_pccl.{kind}({self.name})", *part, num_returns=returns, max_task_retries=0)

    def _follow(self, actors: Sequence[Actor], results: Sequence[Any], held: Sequence[Any] = ()) -> None:
        """Looks after results until they are there, and holds until then what was given for them."""

        def on_loss(actor: Actor) -> Any:
            life, asked = actor.life, actor.state is State.SEATED
            return lambda reason: self._roster.lost(actor, life, reason) if asked else None

        followed = zip_longest(actors, results, held)
        _watch.follow([Followed(result, actor.id, on_loss(actor), given) for actor, result, given in followed])

    # ----------------------------------------------------------------------------------------------- inside

    def _owners(self, refs: Sequence[Any]) -> list[str]:
        self._require_open()
        ids = owners(refs)
        for actor_id in ids:
            self._known(actor_id)
        return ids

    def _known(self, actor_id: str) -> Actor:
        actor = self._roster.actors.get(actor_id)
        if actor is None:
            raise UsageError(f"actor {actor_id} is not in group {self.name!r}: group.add() it first")
        return actor

    def _require_open(self) -> None:
        if self._roster.closed:
            raise UsageError(f"group {self.name!r} was destroyed: make a new one with create_group()")

    def _left_out(self, given: set[str]) -> list[Actor]:
        with self._roster.lock:
            return [
                actor
                for actor in self._roster.actors.values()
                if actor.id not in given and actor.state in (State.SEATED, State.WAITING)
            ]

    def _require_all(self, given: set[str], kind: str) -> None:
        """A member of which no ref was given would be waited for in vain."""
        ends = time.monotonic() + _GONE_S
        while True:
            missing = self._left_out(given)
            if not missing:
                return
            status = self._roster.status()
            members = {actor_of(peer) for peer in status.members}
            here = members | {actor_of(peer) for peer in status.waiting}
            for actor in missing:
                if members and actor.id not in here:
                    self._roster.lost(actor, actor.life, "it is no member any more")
            still = [actor.id for actor in missing if not members or actor.id in here]
            if still and time.monotonic() >= ends:
                raise UsageError(
                    f"{kind} over group {self.name!r} needs a ref of each of its actors: none was given of "
                    f"{', '.join(still)}; give theirs, group.remove() them, or make a group of the others"
                )
            if still:
                time.sleep(LOOK_S)


def owners(refs: Sequence[Any]) -> list[str]:
    """The actors whose methods made these objects, by id."""
    if isinstance(refs, ray.ObjectRef) or not isinstance(refs, Sequence) or not refs:
        raise UsageError(f"refs is a list of ObjectRefs, one of each actor, not {refs!r}")
    ids: list[str] = []
    for place, ref in enumerate(refs):
        if not isinstance(ref, ray.ObjectRef):
            raise UsageError(f"refs[{place}] is a {type(ref).__qualname__}, not an ObjectRef")
        actor_id = ref.task_id().actor_id().hex()
        if actor_id.startswith("f" * 24):
            raise UsageError(
                f"refs[{place}] was made by no actor, but by a task or by ray.put() in the driver: give what methods "
                "of the group's actors returned"
            )
        if actor_id in ids:
            raise UsageError(f"refs[{ids.index(actor_id)}] and refs[{place}] are both of actor {actor_id}: give one")
        ids.append(actor_id)
    return ids


def check_actors(actors: Sequence[Any]) -> list[Any]:
    """The handles, if they are some, and each once."""
    handles = list(actors) if isinstance(actors, Sequence) else [actors]
    for handle in handles:
        if not isinstance(handle, ray.actor.ActorHandle):
            raise UsageError(f"actors is a list of actor handles; {handle!r} is none")
    if not handles or len({handle._actor_id for handle in handles}) != len(handles):
        raise UsageError("actors is a list of at least one actor, each of them once")
    return handles


def check_op(op: ReduceOp) -> ReduceOp:
    """The op, if it is one."""
    if not isinstance(op, ReduceOp):
        raise UsageError(f"op is a ray_pccl.ReduceOp, such as ReduceOp.SUM, not {op!r}")
    return op


def _retries(on_loss: str) -> bool:
    if on_loss not in ("continue", "raise"):
        raise UsageError(f"on_loss is 'continue' or 'raise', not {on_loss!r}")
    return on_loss == "continue"
