"""Collectives over nests of tensors, in one member of a group: all leaves or none, with the same contributors.

Small leaves of one type share a buffer. Every operation carries a signature of the whole nest, so that members whose
nests differ get an error at the first one; only then do they show each other what they have, to say where.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from ray import cloudpickle

from ray_pccl.control.messages import Failure, VoteKind
from ray_pccl.descriptors import DataType, ReduceInfo, ReduceOp
from ray_pccl.driver.memory import results
from ray_pccl.driver.tensors import Bytes, Form, bytes_of, form_of
from ray_pccl.driver.trees import Slot, is_tensor, paths, put_together, structure, take_apart
from ray_pccl.errors import CollectiveMismatchError, PCCLError, PeerLostError, UsageError, WorldChangedError
from ray_pccl.peer.communicator import Communicator
from ray_pccl.peer.requests import Request
from ray_pccl.ring.header import Kind
from ray_pccl.ring.tensors import Operand, as_input, as_output

SHARED_BYTES = 1 << 18
"""Leaves up to this size share a buffer."""
OPERATIONS_A_CALL = 1 << 12
_SIGNATURE_BITS = 62


Description = tuple[list[tuple[str, str]], list[tuple[str, str]]]


class Member:
    """A communicator in one call: the tag of its caller, and the number of the call.

    Every operation carries the call's number: members that take part in different calls get a mismatch. Each call's
    operations are numbered from a number of its own on, so that no call has to suffer for what befell another.
    """

    def __init__(
        self, communicator: Communicator, tag: int, call: int | None = None, places: Sequence[str] = (), *, retry: bool
    ) -> None:
        self.communicator = communicator
        self._tag = tag
        self._call = call
        self._due = () if retry else tuple(places)
        """Whose contributions must be in every operation."""
        self.patience_s: float | None = None
        """How long to wait for all to enter; ``op_timeout_s`` if None."""
        self.failed_together = False
        """Whether the last operation failed: then it did so on everyone, or this peer is none any more."""

    def run(self, kind: Kind, send: Operand | None, recv: Operand | None, **given: Any) -> ReduceInfo:
        """One operation."""
        self.failed_together = False
        if self._call is not None:
            given["signature"] = _mixed(given.get("signature", 0), self._call)
            given["floor"] = self._call * OPERATIONS_A_CALL
        request = Request(kind, send, recv, tag=self._tag, **given)
        operations = self.communicator._operations()
        try:
            info = operations.run(request, self.patience_s)
            missing = [place for place in self._due if not any(peer.startswith(place) for peer in info.contributors)]
            if missing:
                raise PeerLostError(f"{', '.join(missing)} did not take part", peers=missing, reason="it was lost")
            return info
        except BaseException:
            self.failed_together = True
            raise

    def admit(self, only: tuple[str, ...]) -> None:
        """Lets these peers in, if they wait: all members vote for it at this point of their calls.

        Who is in already was not asked to vote, and the vote would never end: if any is, there is none. The others wait
        on, and are named again with a later call.
        """
        self.failed_together = True  # who does not vote is waited for, and named
        if not set(only).isdisjoint(self.communicator.members):
            return
        self.communicator._vote(VoteKind.UPDATE_TOPOLOGY, self.communicator._settings.op_timeout_s, only)

    def refuse(self, failure: Failure) -> None:
        """Fails the operation that the others are in, with this error on everyone."""
        self.run(Kind.BARRIER, None, None, refusal=failure)

    def all_gather(self, mine: Bytes) -> dict[str, Bytes]:
        """Everyone's bytes, by id, in the order of ranks; the same number on all.

        Raises `WorldChangedError`, on all, where members are of two minds about the world.
        """
        world = self.communicator.world_size
        theirs = np.empty(world * len(mine), np.uint8)
        info = self.run(Kind.ALL_GATHER, as_input(mine), as_output(theirs))
        return dict(zip(info.contributors, theirs.reshape(world, len(mine)), strict=True))

    def explain(self, description: Description | None) -> dict[str, Any]:
        """After a mismatch: shows what this member has, and what all others have. Everyone does so."""
        return self.all_gather_objects(description)

    def all_gather_objects(self, mine: Any) -> dict[str, Any]:
        """Everyone's object, by id."""
        text: bytes = cloudpickle.dumps(mine)  # type: ignore[no-untyped-call]
        sizes = {
            peer: int(size.view(np.int64)[0])
            for peer, size in self.all_gather(np.array([len(text)], np.int64).view(np.uint8)).items()
        }
        padded = np.frombuffer(text.ljust(max(sizes.values()), b"\0"), np.uint8)
        every = self.all_gather(padded)
        if every.keys() != sizes.keys():
            raise WorldChangedError("members have come or gone in between")
        return {peer: cloudpickle.loads(every[peer][:size].tobytes()) for peer, size in sizes.items()}


def is_reducible(value: Any) -> bool:
    """Whether it is a tensor or a number."""
    return is_tensor(value) or isinstance(value, int | float | np.generic)


class Nest:
    """A value to be reduced: its leaves as tensors, and how to make a result of the same kind."""

    def __init__(self, value: Any, about: str) -> None:
        self.skeleton, self._leaves = take_apart(value, is_reducible)
        for path, leaf in paths(self.skeleton):
            if type(leaf) is not Slot and leaf is not None:
                raise UsageError(
                    f"{path or 'the value'} is a {type(leaf).__qualname__}, which can't be reduced: tensors and "
                    "numbers can, in dicts, lists, tuples and dataclasses"
                )
        self.tensors = [leaf if is_tensor(leaf) else _as_array(leaf) for leaf in self._leaves]
        self.places = [path for path, leaf in paths(self.skeleton) if type(leaf) is Slot]
        self._lines = list(structure(self.skeleton))
        self.forms = [form_of(tensor) for tensor in self.tensors]
        text = "\n".join([about, *self._lines, *map(_shape_of, self.forms)])
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        self.signature = int.from_bytes(digest, "little") >> (64 - _SIGNATURE_BITS)

    def description(self) -> Description:
        """The structure, and every leaf: what members compare to find where they differ."""
        tensors = zip(self.places, self.forms, strict=True)
        leaves = [(f"leaf {path}" if path else "the value", _shape_of(form)) for path, form in tensors]
        return [("the structure", line) for line in self._lines], leaves

    def result(self, tensors: Sequence[Any]) -> Any:
        """A nest like this one, of other tensors: numbers become numbers again."""
        leaves = [
            tensor if is_tensor(leaf) else tensor[()] if isinstance(leaf, np.generic) else type(leaf)(tensor)
            for leaf, tensor in zip(self._leaves, tensors, strict=True)
        ]
        return put_together(self.skeleton, leaves)

    def buckets(self) -> list[list[int]]:
        """Which tensors travel together: small ones of one type; the same on all who have the same nest."""
        small: dict[DataType, list[int]] = defaultdict(list)
        alone = []
        for index, form in enumerate(self.forms):
            if form.nbytes > SHARED_BYTES:
                alone.append([index])
            else:
                small[as_input(self.tensors[index]).datatype].append(index)
        shared = [
            indices[first : first + SHARED_BYTES // 64]
            for indices in small.values()
            for first in range(0, len(indices), SHARED_BYTES // 64)
        ]
        return alone + shared


def all_reduce(member: Member, value: Any, op: ReduceOp, *, retry: bool) -> Any:
    """The value reduced with everyone's; a new nest."""
    return _reduce(member, value, Kind.ALL_REDUCE, f"all_reduce {op.name}", op=op, retry=retry)


def reduce(member: Member, value: Any, op: ReduceOp, root: str, *, retry: bool) -> Any:
    """The reduced value at the root, the member whose id begins with this; None elsewhere."""
    result = _reduce(member, value, Kind.REDUCE, f"reduce {op.name} {root}", op=op, root_label=root, retry=retry)
    return result if member.communicator.peer_id.startswith(root) else None


def _reduce(member: Member, value: Any, kind: Kind, about: str, **given: Any) -> Any:
    nest = Nest(value, about)
    buckets = nest.buckets() or [[]]
    outs = [form.over(results.empty(form.nbytes)) for form in nest.forms]
    try:
        while True:
            infos = [_reduce_bucket(member, nest, bucket, outs, kind, given) for bucket in buckets]
            if all(info.contributors == infos[0].contributors for info in infos):
                return nest.result(outs)
            # Someone died in between. Everyone sees the same contributors, and reduces all of it again.
    except CollectiveMismatchError as mismatch:
        raise _explained(member, nest, mismatch) from None


def _reduce_bucket(
    member: Member, nest: Nest, bucket: list[int], outs: list[Any], kind: Kind, given: dict[str, Any]
) -> ReduceInfo:
    if len(bucket) == 1:
        send, recv = as_input(nest.tensors[bucket[0]]), as_output(outs[bucket[0]])
        return member.run(kind, send, recv, signature=nest.signature, **given)
    inputs = [as_input(nest.tensors[index]) for index in bucket]
    outputs = [as_output(outs[index]) for index in bucket]
    datatype = inputs[0].datatype if inputs else DataType.FLOAT
    packed = np.concatenate([operand.array for operand in inputs]) if inputs else np.empty(0, np.float32)
    whole = Operand(packed, packed, datatype, packed.shape)
    result = np.empty_like(packed)
    info = member.run(kind, whole, Operand(result, result, datatype, result.shape), signature=nest.signature, **given)
    start = 0
    for output in outputs:
        np.copyto(output.array, result[start : start + output.count])
        output.store()
        start += output.count
    return info


def reduce_scatter(member: Member, value: Any, op: ReduceOp, places: Sequence[str], *, retry: bool) -> Any:
    """This member's part of the reduced value: leaves are cut along their first axis, a part for each of `places`.

    A place is what a member's id begins with. The parts of who died are dropped, those of the others stay theirs.
    """
    nest = Nest(value, f"reduce_scatter {op.name} {len(places)}")
    for path, form in zip(nest.places, nest.forms, strict=True):
        if not form.shape or form.shape[0] % len(places):
            raise UsageError(
                f"{path or 'the value'} is {_shape_of(form)}: its first axis can't be cut into {len(places)} equal "
                "parts, one for each actor"
            )

    def attempt() -> Any:
        members = list(member.all_gather(np.zeros(1, np.uint8)))
        order = [_place_of(peer, places) for peer in members]
        mine = []
        for tensor, form in zip(nest.tensors, nest.forms, strict=True):
            part = _part(form, len(places))
            out = part.over(results.empty(part.nbytes))
            parts = as_input(tensor).array.reshape(len(places), -1)
            whole = parts if order == list(range(len(places))) else parts[order]
            datatype = as_input(tensor).datatype
            send = Operand(whole, whole.reshape(-1), datatype, whole.shape)
            info = member.run(Kind.REDUCE_SCATTER, send, as_output(out), op=op, signature=nest.signature)
            if list(info.contributors) != members:
                raise WorldChangedError("members have come or gone in between")
            mine.append(out)
        return nest.result(mine)

    try:
        return _in_one_world(attempt, retry=retry)
    except CollectiveMismatchError as mismatch:
        raise _explained(member, nest, mismatch) from None


def all_gather(member: Member, value: Any, places: Sequence[str], *, retry: bool) -> list[Any]:
    """Everyone's value, in the order of `places`, of those who are there."""
    skeleton, tensors = take_apart(value)
    forms = [form_of(tensor) for tensor in tensors]

    def attempt() -> list[Any]:
        metas = member.all_gather_objects((skeleton, forms))
        row = np.zeros(max(sum(form.room for form in theirs) for _, theirs in metas.values()), np.uint8)
        start = 0
        for tensor, form in zip(tensors, forms, strict=True):
            np.copyto(row[start : start + form.nbytes], bytes_of(tensor))
            start += form.room
        rows = member.all_gather(row)
        if rows.keys() != metas.keys():
            raise WorldChangedError("members have come or gone in between")
        order = sorted(rows, key=lambda peer: _place_of(peer, places))
        return [_restored(metas[peer], rows[peer]) for peer in order]

    gathered: list[Any] = _in_one_world(attempt, retry=retry)
    return gathered


def broadcast(member: Member, value: Any, root: str) -> Any:
    """The root's value, on everyone; at the root itself, what it gave."""
    is_root = member.communicator.peer_id.startswith(root)
    skeleton, tensors = take_apart(value) if is_root else (None, [])
    what = (skeleton, [form_of(tensor) for tensor in tensors])
    meta: bytes = cloudpickle.dumps(what) if is_root else b""  # type: ignore[no-untyped-call]
    size = np.array([len(meta)], np.int64)
    _broadcast(member, size, root)
    text = np.frombuffer(meta, np.uint8).copy() if is_root else np.empty(int(size[0]), np.uint8)
    _broadcast(member, text, root)
    if is_root:
        for tensor in tensors:
            _broadcast(member, bytes_of(tensor), root)
        return value
    skeleton, forms = cloudpickle.loads(text.tobytes())
    received = []
    for form in forms:
        memory = results.empty(form.nbytes)
        _broadcast(member, memory, root)
        received.append(form.over(memory))
    return put_together(skeleton, received)


def barrier(member: Member, *, retry: bool) -> None:
    """Returns when everyone has called it."""
    member.run(Kind.BARRIER, None, None, retry=retry)


# -------------------------------------------------------------------------------------------------------- inside


def _mixed(signature: int, call: int) -> int:
    text = f"{signature} {call}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> (64 - _SIGNATURE_BITS)


def _broadcast(member: Member, memory: Any, root: str) -> None:
    member.run(Kind.BROADCAST, as_input(memory), None, output=memory, root_label=root, retry=True)


def _in_one_world(attempt: Callable[[], Any], *, retry: bool) -> Any:
    """What the attempt returns, begun anew while the world changes under it: for everyone alike."""
    while True:
        try:
            return attempt()
        except WorldChangedError:
            continue
        except PeerLostError:
            if not retry:
                raise


def _explained(member: Member, nest: Nest, mismatch: CollectiveMismatchError) -> PCCLError:
    """The mismatch, with the leaf in which members differ: everyone is here, and shows what it has."""
    try:
        descriptions = member.explain(nest.description())
    except PCCLError:
        return mismatch
    descriptions = {peer: description for peer, description in descriptions.items() if description}
    (first, expected), *others = descriptions.items()
    for peer, description in others:
        for mine, theirs in zip(expected, description, strict=True):
            for (where, what), (_, other) in zip_longest(mine, theirs, fillvalue=("the structure", "nothing more")):
                if what != other:
                    text = f"actors do not agree: {where} is {what} at {first}, but {other} at {peer}"
                    return CollectiveMismatchError(text, calls={first: what, peer: other})
    return mismatch


def _place_of(peer_id: str, places: Sequence[str]) -> int:
    for index, place in enumerate(places):
        if peer_id.startswith(place):
            return index
    raise WorldChangedError(f"{peer_id} is in the group, and was not called: use get_group() again")


def _restored(meta: tuple[Any, Sequence[Form]], row: Bytes) -> Any:
    skeleton, forms = meta
    tensors, start = [], 0
    for form in forms:
        tensors.append(form.over(row[start : start + form.room].copy()))
        start += form.room
    return put_together(skeleton, tensors)


def _part(form: Form, count: int) -> Form:
    shape = (form.shape[0] // count, *form.shape[1:])
    return Form(form.library, shape, form.dtype, form.nbytes // count, form.device)


def _shape_of(form: Form) -> str:
    name = str(form.dtype).removeprefix("torch.")
    return f"{name} {list(form.shape)}"


def _as_array(number: Any) -> Any:
    if isinstance(number, np.generic):
        return np.asarray(number)
    if isinstance(number, bool):
        return np.array(number)
    try:
        return np.array(number, np.int64 if isinstance(number, int) else np.float64)
    except OverflowError:
        raise UsageError(f"{number} does not fit 64 bits: numbers are reduced as int64 and float64") from None
