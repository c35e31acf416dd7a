"""What runs inside an actor: the hidden calls that the driver's side makes.

The functions whose first parameter is `actor` are handed to `__ray_call__`, so any actor can run them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from concurrent.futures import Future
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
from ray_pccl.driver.seats import GroupSpec, Seat, actor_of, local_seats
from ray_pccl.errors import (
    CollectiveMismatchError,
    NotConnectedError,
    OperationTimeoutError,
    PCCLError,
    PeerEvictedError,
    PeerLostError,
    UsageError,
)
from ray_pccl.peer.handles import Workers

log = logging.getLogger("ray_pccl.driver")

STRANGERS_S = 4.0
"""How long a call waits for members that its caller does not know: longer than it takes to find out that one died."""


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


_threads = Workers()
"""For calls of async actors: they end with the process, whatever they wait for."""


# ----------------------------------------------------------------------------------------- run by `__ray_call__`


def join(actor: Any, spec: GroupSpec, rank: int | None, *, invited: bool, anew: bool) -> str:
    """Has this actor join a group, without waiting for it. Returns the id of its peer. `anew`: see `Seat.join`.

    Raises `UsageError` if it was made to leave the group, and is not `invited` anew: a caller may not know that yet.
    """
    del actor
    seat = local_seats.take(spec, rank, invited=invited)
    if internals.is_async_actor():
        internals.await_calls()
    return seat.join(anew=anew)


def leave(actor: Any, call: bytes) -> Any:
    """Has this actor leave a group, if it is in it, after the caller's earlier calls."""
    del actor
    decoded = _decode_call(call)
    if internals.is_async_actor():
        return internals.run_in_event_loop(asyncio.to_thread(_leave, decoded))
    return _leave(decoded)


def _leave(call: Call) -> None:
    try:
        seat = local_seats.meant(call.group, call.uid, peer="")
    except ActorLostError:
        seat = None  # it never came in, or is another process now
    with contextlib.ExitStack() as turn:
        if seat is not None:
            with contextlib.suppress(ActorLostError):  # nothing is before it any more
                lane = seat.lane(call.caller, peer="")
                lane.arrive(call.number, call.first)
                turn.enter_context(lane.turn(call.number, seat.spec.settings.op_timeout_s))
        local_seats.leave(call.group, call.uid)


def stats(actor: Any) -> StoreStats:
    """What this actor's store holds."""
    del actor
    return local_store().stats()


def absent(actor: Any, lost: str, reason: str) -> None:
    """The result where an actor does not take part."""
    del actor
    raise actor_lost(lost, reason)


def run(actor: Any, call: bytes, inputs: Sequence[Any] = ()) -> Any:
    """Takes part in a collective, with the value that the call names, or that of the ref in `inputs`, if there is one.

    The ref is wrapped in a list, so that this runs also if its task failed: then the others are told at once.
    """
    del actor
    decoded = _decode_call(call)
    if internals.is_async_actor():
        return internals.run_in_event_loop(_run_async(decoded, inputs))
    lane = _arrive(decoded)
    value, failure = None, None
    try:
        value = ray.get(inputs[0]) if inputs else _kept_for(decoded)
    except Exception as error:
        failure = error.with_traceback(None)
    try:
        return _take_part(decoded, lane, value, failure, _anchor(decoded))
    finally:
        del value, failure, inputs  # an error that is raised holds its frames: they must not hold it, nor any ref


async def _run_async(call: Call, inputs: Sequence[Any]) -> Any:
    anchor = _anchor(call)
    lane, value, failure = None, None, None
    try:
        lane = await asyncio.to_thread(_arrive, call)
        try:
            value = await inputs[0] if inputs else _kept_for(call)
        except Exception as error:
            failure = error.with_traceback(None)
    except asyncio.CancelledError:  # the others are told, and the calls behind this one get their turn
        _start_part(call, lane, None, UsageError("the call was cancelled"), None)
        raise
    try:
        return await asyncio.wrap_future(_start_part(call, lane, value, failure, anchor))
    finally:
        del value, failure, inputs, anchor


def _start_part(call: Call, lane: Lane | None, value: Any, failure: Exception | None, anchor: Any) -> Future[Any]:
    """Takes part behind the event loop's back. Without a lane it has not even arrived."""
    result: Future[Any] = Future()
    result.set_running_or_notify_cancel()  # the others count on it: who awaits it may go, it goes on

    def take_part() -> None:
        try:
            result.set_result(_take_part(call, lane or _arrive(call), value, failure, anchor))
        except BaseException as error:
            result.set_exception(error.with_traceback(None))

    _threads.submit(take_part)
    return result


# -------------------------------------------------------------------------------------------------------- inside


def _seat_of(call: Call) -> Seat:
    return local_seats.meant(call.group, call.uid, call.peer)


def _arrive(call: Call) -> Lane:
    """Later calls of the same caller wait for this one from now on, however long its value takes."""
    lane = _seat_of(call).lane(call.caller, call.peer)
    lane.arrive(call.number, call.first)
    return lane


def _kept_for(call: Call) -> Any:
    if not call.kept:
        return None
    try:
        return local_store().value(call.kept)
    except KeyError:
        raise actor_lost(actor_id(), "it kept the value in an earlier process of its") from None


def _anchor(call: Call) -> Any:
    return internals.second_return(call.claim.address) if call.claim is not None else None


def _take_part(call: Call, lane: Lane, value: Any, failure: Exception | None, anchor: Any) -> Any:
    try:
        result = _result_of(call, lane, value, failure)
    finally:
        lane.depart(call.number)  # it may not have come to its turn
        del value, failure
    try:
        return local_store().keep(result, call.claim, anchor) if call.claim is not None else result
    finally:
        del result, anchor


def _result_of(call: Call, lane: Lane, value: Any, failure: Exception | None) -> Any:
    me = actor_id()
    seat = _seat_of(call)
    try:
        communicator = seat.member(call.peer)
    except ActorLostError:
        raise
    except PCCLError as error:
        raise actor_lost(me, f"it could not join: {error}") from None
    try:
        member = reducing.Member(communicator, call.caller, call.number, call.places, retry=call.retry)
        strangers = [peer for peer in member.communicator.members if not peer.startswith(call.places)]
        if strangers and call.places:
            # Dead, most likely, and the caller knows it already. If not, nobody is to wait for them for long.
            member.patience_s = STRANGERS_S
        patience = seat.spec.settings.op_timeout_s
        with lane.turn(call.number, patience):
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
