"""A communicator whose world is fixed, as that of a collective group is in Ray.

Ranks are those that were asked for, for ever. A communicator's are not: where a link keeps breaking, the master puts
its members into another order. So ranks are translated into the epoch's, and what depends on the order is checked
against the order in which it really ran. All ranks translate with the same epoch, because it is the operation's tag.

The world size is fixed, too. When a rank dies or leaves, the operations in flight raise on all that are left, and so
does every later one, at once: the group has to be destroyed and initialised again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ray_pccl.descriptors import ReduceInfo, ReduceOp
from ray_pccl.errors import (
    MasterStoppedError,
    PCCLError,
    PeerEvictedError,
    PeerLostError,
    SettingsError,
    TooFewPeersError,
)
from ray_pccl.peer.communicator import Communicator
from ray_pccl.ring.tensors import as_input, as_output
from ray_pccl.util.collective.errors import as_runtime_error
from ray_pccl.util.collective.tensors import host_buffer, require_shapes, shape_of, writable


class _Order(NamedTuple):
    """The order of the members in an epoch."""

    epoch: int
    members: tuple[str, ...]


class FixedWorld:
    """The ranks of one collective group, and what they do together. May be used from several threads.

    Args:
        communicator: Connected; it is this object's from now on.
        members: The `peer_id` of each rank.
        name: The collective group's name, for errors.
        timeout_s: How long operations wait until all ranks have entered them; ``op_timeout_s`` if None.

    Every error is a `RuntimeError`.
    """

    def __init__(
        self, communicator: Communicator, members: tuple[str, ...], name: str, timeout_s: float | None
    ) -> None:
        self._comm = communicator
        self._members = members
        self._name = name
        self._timeout_s = timeout_s
        self._gone: dict[int, str] = {}
        """The ranks that are no more, and why."""
        self._collectives = threading.Lock()
        self._sends = [threading.Lock() for _ in members]
        self._receives = [threading.Lock() for _ in members]

    def close(self) -> None:
        """Leaves the group; operations of other threads raise."""
        self._comm.close()

    # ------------------------------------------------------------------------------- where the order does not matter

    def all_reduce(self, tensor: Any, op: ReduceOp) -> None:
        """Combines the tensors of all ranks into everyone's, in place."""
        with self._collectives, self._explained():
            self._order()
            self._comm.all_reduce(tensor, writable(tensor), op=op, retry=False, timeout=self._timeout_s)

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        with self._collectives, self._explained():
            self._order()
            self._comm.barrier(retry=False, timeout=self._timeout_s)

    def all_gather(self, outputs: list[Any], tensor: Any) -> None:
        """Brings the tensor of each rank to everyone's place of that rank in `outputs`."""
        with self._collectives, self._explained():
            require_shapes(outputs, tensor, "allgather")
            size = len(self._members)
            gathered = host_buffer(tensor, size * _count(tensor))
            whole = as_output(gathered)
            targets = [as_output(writable(output), "an output") for output in outputs]
            for place, target in enumerate(targets):
                _require_type(target.datatype, whole.datatype, f"output {place}")
            self._order()
            info = self._comm.all_gather(tensor, gathered, timeout=self._timeout_s)
            parts = whole.array.reshape(size, -1)
            for place, peer_id in enumerate(info.contributors):
                target = targets[self._members.index(peer_id)]
                np.copyto(target.array, parts[place])
                target.store()

    # ---------------------------------------------------------------------------------------- where the order counts

    def reduce(self, tensor: Any, root: int, op: ReduceOp) -> None:
        """Combines the tensors of all ranks into that of the root; the others keep theirs."""
        output = writable(tensor) if self._comm.peer_id == self._members[root] else None

        def call(order: _Order) -> ReduceInfo:
            place, tag = self._place(order, root), order.epoch
            return self._comm.reduce(tensor, output, op=op, root=place, tag=tag, retry=False, timeout=self._timeout_s)

        self._in_order(call)

    def broadcast(self, tensor: Any, root: int) -> None:
        """Brings the root's tensor to everyone, into theirs."""
        target = tensor if self._comm.peer_id == self._members[root] else writable(tensor)

        def call(order: _Order) -> ReduceInfo:
            place = self._place(order, root)
            return self._comm.broadcast(target, root=place, tag=order.epoch, retry=False, timeout=self._timeout_s)

        self._in_order(call)

    def reduce_scatter(self, output: Any, tensors: list[Any], op: ReduceOp) -> None:
        """Combines the lists of all ranks, and leaves each rank the tensor at its place. The lists stay untouched."""

        def call(order: _Order) -> ReduceInfo:
            require_shapes(tensors, output, "reducescatter")
            joined = host_buffer(tensors[0], len(tensors) * _count(output))
            whole = as_output(joined)
            parts = whole.array.reshape(len(tensors), -1)
            for rank, tensor in enumerate(tensors):
                given = as_input(tensor, "an input")
                _require_type(given.datatype, whole.datatype, f"input {rank}")
                np.copyto(parts[self._place(order, rank)], given.array)
            return self._comm.reduce_scatter(joined, writable(output), op=op, tag=order.epoch, timeout=self._timeout_s)

        self._in_order(call)

    def send(self, tensor: Any, dest: int) -> None:
        """Sends a tensor to a rank; returns when it is there."""
        with self._sends[dest], self._explained():
            order = self._order()
            self._comm.send(tensor, self._place(order, dest), tag=order.epoch, timeout=self._timeout_s)

    def recv(self, tensor: Any, source: int) -> None:
        """Receives what a rank sends, into a tensor of the same count and type."""
        with self._receives[source], self._explained():
            order = self._order()
            place = self._place(order, source)
            info = self._comm.recv(writable(tensor), place, tag=order.epoch, timeout=self._timeout_s)
            if tuple(info.contributors) != (self._members[source],):
                raise self._rearranged()

    def _in_order(self, call: Callable[[_Order], ReduceInfo]) -> None:
        with self._collectives, self._explained():
            order = self._order()
            if tuple(call(order).contributors) != order.members:
                raise self._rearranged()

    # -------------------------------------------------------------------------------------------------- who is there

    def _order(self) -> _Order:
        """The present order. Raises unless every rank is in it."""
        epoch = -1
        members: tuple[str, ...] = ()
        while epoch != self._comm.epoch:  # until the two are of one moment
            epoch = self._comm.epoch
            members = self._comm.members
        if self._gone or len(members) != len(self._members):
            raise self._broken(set(self._members) - set(members), "it died or left the group")
        return _Order(epoch, members)

    def _place(self, order: _Order, rank: int) -> int:
        return order.members.index(self._members[rank])

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Has errors say what they mean for the group."""
        try:
            yield
        except PCCLError as error:
            if isinstance(error, RuntimeError):
                raise
            if isinstance(error, PeerLostError):
                raise self._broken(error.peers, error.reason) from error
            if isinstance(error, TooFewPeersError):  # someone was gone before the operation began
                self._order()
            if isinstance(error, PeerEvictedError | MasterStoppedError):
                error = type(error)(f"{error}. {self._what_to_do()}", **error.details)
            raise as_runtime_error(error) from error

    def _broken(self, peer_ids: Iterable[str], reason: str) -> PCCLError:
        for peer_id in set(peer_ids) & set(self._members):
            self._gone.setdefault(self._members.index(peer_id), reason)
        who = "; ".join(f"rank {rank} of {len(self._members)}: {why}" for rank, why in sorted(self._gone.items()))
        text = (
            f"collective group {self._name!r} is not complete any more ({who}), and its world size is fixed. "
            f"{self._what_to_do()}"
        )
        peers = tuple(self._members[rank] for rank in sorted(self._gone))
        return as_runtime_error(PeerLostError(text, peers=peers, reason="; ".join(sorted(set(self._gone.values())))))

    def _what_to_do(self) -> str:
        return (
            f"Call destroy_collective_group({self._name!r}) on each rank that is left, and initialise the group again"
        )

    def _rearranged(self) -> PCCLError:
        return as_runtime_error(
            PCCLError(
                f"a link of collective group {self._name!r} broke at the moment of the call, and its members were put "
                "into another order: the result can't be trusted. Every rank that took part raises this"
            )
        )


def _count(tensor: Any) -> int:
    return int(np.prod(shape_of(tensor), dtype=np.int64))


def _require_type(found: Any, due: Any, what: str) -> None:
    if found is not due:
        raise SettingsError(f"{what} of the list is of {found.name}, others are of {due.name}: all have to be the same")
