"""What runs inside an actor: its places in groups, and the hidden calls that the driver's side makes.

The functions whose first parameter is `actor` are handed to `__ray_call__`, so any actor can run them; the rest is
this process's own state. An actor that was restarted is another process, which sits in no group until it is asked to.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgspec
import ray
from ray.exceptions import RayActorError

from ray_pccl.control.messages import Failure
from ray_pccl.descriptors import ReduceOp
from ray_pccl.driver import internals, reducing
from ray_pccl.driver.claims import Claim
from ray_pccl.driver.errors import ActorLostError, actor_lost
from ray_pccl.driver.lanes import Lane
from ray_pccl.driver.objects import StoreStats, actor_id, local_store
from ray_pccl.errors import (
    CollectiveMismatchError,
    NotConnectedError,
    OperationTimeoutError,
    PCCLError,
    PeerEvictedError,
    PeerLostError,
    UsageError,
)
from ray_pccl.peer.communicator import Communicator
from ray_pccl.peer.handles import Workers
from ray_pccl.settings import Settings

log = logging.getLogger("ray_pccl.driver")

PREFIX = "ray_pccl/"
OVERTAKING_S = 2.0
STRANGERS_S = 4.0
"""How long a call waits for members that its caller does not know: longer than it takes to find out that one died."""
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


class Call(msgspec.Struct, frozen=True, array_like=True):
    """One collective that a driver asks for. It travels as bytes, which Ray does not have to pickle."""

    group: str
    uid: str
    caller: int
    """Names who calls: the tag of all its operations."""
    number: int
    first: int
    """The number of the caller's first call to this actor since it joined."""
    kind: str
    claim: Claim | None = None
    kept: str = ""
    """The name of the value, where the caller knows that the actor keeps it: its ref need not come along then."""
    peer: str = ""
    """Whom the caller means: another process of the same actor does not take part."""
    admits: tuple[str, ...] = ()
    """The peers that an admission is for."""
    op: ReduceOp = ReduceOp.SUM
    retry: bool = True
    root: str = ""
    places: tuple[str, ...] = ()
    """What the ids of the members begin with, in the order in which the caller named them."""


encode_call = msgspec.msgpack.Encoder().encode
_decode_call = msgspec.msgpack.Decoder(Call).decode


class Seat:
    """This process's place in one group."""

    def __init__(self, spec: GroupSpec, rank: int | None) -> None:
        self.spec = spec
        self._rank = rank
        self.communicator = self._new_communicator()
        self._joined: Future[None] | None = None
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
        )

    def join(self) -> str:
        """Begins to join, if that is due, in a thread of its own. The id under which it does."""
        with self._lock:
            if self._joined is None or (self._joined.done() and not self._is_member()):
                if self._joined is not None:  # another peer, whose id is known from the start
                    self.communicator.close()
                    self.communicator = self._new_communicator()
                    self._lanes.clear()
                self._joined = Future()
                arguments = (self.communicator, self._joined)
                threading.Thread(target=self._connect, args=arguments, name="ray_pccl-join", daemon=True).start()
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

    def member(self) -> Communicator:
        """The communicator, once it is a member's. Raises why it is none."""
        joined = self._joined
        if joined is None:
            raise UsageError(f"this actor was never asked to join group {self.spec.name!r}")
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

    def lane(self, caller: int) -> Lane:
        """The order in which this caller's calls are made."""
        with self._lock:
            return self._lanes.setdefault(caller, Lane())


_seats: dict[str, Seat] = {}
_left: set[str] = set()
"""The groups that this actor was made to leave."""
_overtaken: dict[str, float] = {}
"""Until when the call to join a group may still come, though another call for the group is here already."""
_lock = threading.RLock()
_seated = threading.Condition(_lock)
_threads = Workers()
"""For calls of async actors: they end with the process, whatever they wait for."""


def label_of(actor_id: str) -> str:
    """What the id of an actor's peers begins with."""
    return f"actor-{actor_id}"


def actor_of(peer_id: str) -> str | None:
    """The actor of a peer, if it is one."""
    kind, _, rest = peer_id.partition("-")
    return rest.partition("-")[0] if kind == "actor" else None


def seat_in(name: str | None) -> Seat:
    """This actor's place in a group; in its only one if none is named."""
    with _lock:
        if name is None and len(_seats) == 1:
            return next(iter(_seats.values()))
        if name is not None and name in _seats:
            return _seats[name]
        mine = ", ".join(map(repr, _seats)) or "no group"
    wanted = "name one of them" if name is None else f"not in {name!r}"
    raise UsageError(f"this process is in {mine}: {wanted}; the driver adds actors with create_group() or group.add()")


# ----------------------------------------------------------------------------------------- run by `__ray_call__`


def join(actor: Any, spec: GroupSpec, rank: int | None, *, invited: bool) -> str:
    """Has this actor join a group, without waiting for it. Returns the id of its peer.

    Raises `UsageError` if it was made to leave the group, and is not `invited` anew: a caller may not know that yet.
    """
    del actor
    with _lock:
        if invited:
            _left.discard(spec.uid)
        if spec.uid in _left:
            raise UsageError(f"actor {actor_id()} was made to leave group {spec.name!r}")
        seat = _seats.get(spec.name)
        old = seat if seat is not None and seat.spec.uid != spec.uid else None
        if seat is None or old is not None:
            seat = _seats[spec.name] = Seat(spec, rank)
            _seated.notify_all()
    if old is not None:
        old.communicator.close()
    if internals.is_async_actor():
        internals.await_calls()
    return seat.join()


def leave(actor: Any, name: str, uid: str) -> None:
    """Has this actor leave a group, if it is in it."""
    del actor
    with _lock:
        _left.add(uid)
        seat = _seats.get(name)
        if seat is None or seat.spec.uid != uid:
            return
        del _seats[name]
    seat.leave()


def stats(actor: Any) -> StoreStats:
    """What this actor's store holds."""
    del actor
    return local_store().stats()


def absent(actor: Any, lost: str, reason: str) -> None:
    """The result where an actor does not take part."""
    del actor
    raise actor_lost(lost, reason)


def run(actor: Any, call: bytes, inputs: Sequence[Any]) -> Any:
    """Takes part in a collective, with the value that the call names, or that of the ref in `inputs`, if there is one.

    The ref is wrapped in a list, so that this runs also if its task failed: then the others are told at once.
    """
    del actor
    decoded = _decode_call(call)
    if internals.is_async_actor():
        return internals.run_in_event_loop(_run_async(decoded, inputs))
    _arrive(decoded)
    value, failure = None, None
    try:
        value = ray.get(inputs[0]) if inputs else _kept_for(decoded)
    except Exception as error:
        failure = error.with_traceback(None)
    try:
        return _take_part(decoded, value, failure, _anchor(decoded))
    finally:
        del value, failure, inputs  # an error that is raised holds its frames: they must not hold it, nor any ref


async def _run_async(call: Call, inputs: Sequence[Any]) -> Any:
    anchor = _anchor(call)
    await asyncio.to_thread(_arrive, call)
    value, failure = None, None
    try:
        value = await inputs[0] if inputs else _kept_for(call)
    except Exception as error:
        failure = error.with_traceback(None)
    try:
        return await asyncio.wrap_future(_start_part(call, value, failure, anchor))
    finally:
        del value, failure, inputs, anchor


def _start_part(call: Call, value: Any, failure: Exception | None, anchor: Any) -> Future[Any]:
    """Takes part behind the event loop's back."""
    result: Future[Any] = Future()
    result.set_running_or_notify_cancel()  # the others count on it: who awaits it may go, it goes on

    def take_part() -> None:
        try:
            result.set_result(_take_part(call, value, failure, anchor))
        except BaseException as error:
            result.set_exception(error.with_traceback(None))

    _threads.submit(take_part)
    return result


# -------------------------------------------------------------------------------------------------------- inside


def _seat_of(call: Call) -> Seat:
    """The seat that the caller means; `ActorLostError` in a process that is not the one it knows."""
    with _seated:
        if not call.peer and not internals.runs_calls_in_order():
            # The very first calls may overtake the one to join. It is waited for once, and not by each call anew: to a
            # process that was restarted it does not come before all calls that were meant for its predecessor are done.
            patience = _overtaken.setdefault(call.uid, time.monotonic() + OVERTAKING_S) - time.monotonic()
            _seated.wait_for(lambda: call.group in _seats or call.uid in _left, patience)
        seat = _seats.get(call.group)
    if seat is None or seat.spec.uid != call.uid or call.peer not in ("", seat.communicator.peer_id):
        raise actor_lost(actor_id(), "it was restarted, and takes part again when it has joined anew")
    return seat


def _arrive(call: Call) -> None:
    """Later calls of the same caller wait for this one from now on, however long its value takes."""
    _seat_of(call).lane(call.caller).arrive(call.number, call.first)


def _kept_for(call: Call) -> Any:
    if not call.kept:
        return None
    try:
        return local_store().value(call.kept)
    except KeyError:
        raise actor_lost(actor_id(), "it kept the value in an earlier process of its") from None


def _anchor(call: Call) -> Any:
    return internals.second_return(call.claim.address) if call.claim is not None else None


def _take_part(call: Call, value: Any, failure: Exception | None, anchor: Any) -> Any:
    try:
        result = _result_of(call, value, failure)
    finally:
        del value, failure
    try:
        return local_store().keep(result, call.claim, anchor) if call.claim is not None else result
    finally:
        del result, anchor


def _result_of(call: Call, value: Any, failure: Exception | None) -> Any:
    me = actor_id()
    seat = _seat_of(call)
    try:
        communicator = seat.member()
    except PCCLError as error:
        raise actor_lost(me, f"it could not join: {error}") from None
    try:
        member = reducing.Member(communicator, call.caller, call.number, call.places, retry=call.retry)
        strangers = [peer for peer in member.communicator.members if not peer.startswith(call.places)]
        if strangers and call.places:
            # Dead, most likely, and the caller knows it already. If not, nobody is to wait for them for long.
            member.patience_s = STRANGERS_S
        patience = seat.spec.settings.op_timeout_s
        with seat.lane(call.caller).turn(call.number, patience):
            if isinstance(failure, RayActorError) and failure.actor_id in (me, None):
                communicator.close()  # the others go on without it
                raise actor_lost(me, f"its value was lost with an earlier process of its: {failure}")
            if failure is not None:
                _refuse(member, me, failure)
                raise failure
            return _perform(call, member, value, me)
    except OperationTimeoutError as error:
        if member.patience_s is None:
            raise
        text = f"{', '.join(strangers)} are in group {call.group!r}, and were not called: use get_group() again"
        raise UsageError(f"{text} ({error})") from None
    except ActorLostError:
        raise
    except (PeerEvictedError, NotConnectedError) as error:
        raise actor_lost(me, str(error)) from None
    except PeerLostError as error:
        lost = [actor for peer in error.details.get("peers", ()) if (actor := actor_of(peer)) is not None]
        raise ActorLostError(str(error), actor_id=lost[0] if lost else "", **error.details) from None
    finally:
        del value, failure


def _perform(call: Call, member: reducing.Member, value: Any, me: str) -> Any:
    try:
        match call.kind:
            case "allreduce":
                return reducing.all_reduce(member, value, call.op, retry=call.retry)
            case "reduce":
                return reducing.reduce(member, value, call.op, call.root, retry=call.retry)
            case "broadcast":
                return reducing.broadcast(member, value, call.root)
            case "allgather":
                return reducing.all_gather(member, value, call.places, retry=call.retry)
            case "reducescatter":
                return reducing.reduce_scatter(member, value, call.op, call.places, retry=call.retry)
            case "barrier":
                return reducing.barrier(member, retry=call.retry)
            case "admit":
                return member.admit(call.admits)
            case _:
                raise UsageError(f"no such collective: {call.kind!r}")
    except Exception as error:
        if not member.failed_together and not isinstance(error, CollectiveMismatchError):
            _refuse(member, me, error)  # else the others would wait for this one
        raise


def _refuse(member: reducing.Member, me: str, error: Exception) -> None:
    """Has everyone else fail, where this actor can't take part. Its own error is another.

    If the others have failed already, and explain to each other why, it listens.
    """
    cause = str(getattr(error, "cause", None) or error).strip().splitlines() or [type(error).__name__]
    text = f"actor {me} has no value to contribute: {type(error).__name__}: {cause[-1]}"
    try:
        member.refuse(Failure("InputFailedError", text, {"actor": me}))
    except CollectiveMismatchError:
        with contextlib.suppress(PCCLError):
            member.explain(None)
    except PCCLError as refusal:
        log.info("told the others: %s", refusal)
