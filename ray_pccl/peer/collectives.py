"""The collectives of a `Communicator`: signatures and promises. `operations` does the work.

Everything here is light to import: numpy is loaded by `connect()`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ray_pccl.descriptors import (
    QuantizationOptions,
    ReduceInfo,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
)
from ray_pccl.peer.handles import Handle

if TYPE_CHECKING:
    from ray_pccl.peer.operations import Operations

_SUM = ReduceOp.SUM


class Collectives:
    """What all members call alike. Operations in flight together pair by their `tag`, in any order of launch.

    Tensors are numpy arrays, torch tensors, or device tensors (CuPy, torch CUDA), which are staged through host memory.
    Every call ends: with its result on all members; with an error on all of them; or, after a death, with the result
    of the survivors. The blocking forms try again by themselves then, the `_async` forms do not, unless told otherwise
    by `retry`. After an error the input is what it was, bit for bit; the contents of a separate output are undefined.

    All raise `CollectiveMismatchError` (members called different things under one tag), `OperationTimeoutError` (not
    all entered within `timeout` seconds, ``op_timeout_s`` if not given), `PeerLostError` (someone died, and the call
    was not to be retried, or can't be), `TooFewPeersError` (the group fell below its minimum), `PeerEvictedError`,
    `MasterUnreachableError`, `UsageError`.
    """

    def _operations(self) -> Operations:
        raise NotImplementedError

    # --------------------------------------------------------------------------------- those that survive a death

    def all_reduce(
        self,
        send: Any,
        recv: Any = None,
        *,
        op: ReduceOp = _SUM,
        tag: int = 0,
        operand_descriptor: ReduceOperandDescriptor | None = None,
        quantization_options: QuantizationOptions | None = None,
        retry: bool = True,
        timeout: float | None = None,
    ) -> ReduceInfo:
        """Combines every member's `send` into everyone's `recv`: the same bits on all.

        Without `recv`, or with one that overlaps `send`, it is in place: `send` is untouched until the operation has
        committed. `info.contributors` names whose inputs are in the result.
        """
        operations = self._operations()
        wanted = operations.all_reduce(send, recv, op, tag, operand_descriptor, quantization_options, retry=retry)
        return operations.run(wanted, timeout)

    def all_reduce_async(
        self,
        send: Any,
        recv: Any = None,
        *,
        op: ReduceOp = _SUM,
        tag: int = 0,
        operand_descriptor: ReduceOperandDescriptor | None = None,
        quantization_options: QuantizationOptions | None = None,
        retry: bool = False,
        timeout: float | None = None,
    ) -> Handle:
        """Starts `all_reduce`; the tensors belong to it until the handle is done."""
        operations = self._operations()
        wanted = operations.all_reduce(send, recv, op, tag, operand_descriptor, quantization_options, retry=retry)
        return operations.start(wanted, timeout)

    def all_reduce_multiple_with_retry(
        self, descriptors: Iterable[ReduceOpDescriptor], max_in_flight: int = 16
    ) -> ReduceInfo:
        """All-reduces many tensors, at most `max_in_flight` at a time, and retries what a death interrupts.

        The info sums up the bytes, and names the contributors of the reduction that had the fewest.
        """
        return self._operations().reduce_many(descriptors, max_in_flight)

    def reduce(
        self,
        send: Any,
        recv: Any = None,
        *,
        op: ReduceOp = _SUM,
        root: int = 0,
        tag: int = 0,
        retry: bool = True,
        timeout: float | None = None,
    ) -> ReduceInfo:
        """Combines every member's `send` into the root's `recv`, or in place there without one."""
        operations = self._operations()
        return operations.run(operations.reduce(send, recv, op=op, root=root, tag=tag, retry=retry), timeout)

    def reduce_async(
        self,
        send: Any,
        recv: Any = None,
        *,
        op: ReduceOp = _SUM,
        root: int = 0,
        tag: int = 0,
        retry: bool = False,
        timeout: float | None = None,
    ) -> Handle:
        """Starts `reduce`."""
        operations = self._operations()
        return operations.start(operations.reduce(send, recv, op=op, root=root, tag=tag, retry=retry), timeout)

    def broadcast(
        self, tensor: Any, *, root: int = 0, tag: int = 0, retry: bool = True, timeout: float | None = None
    ) -> ReduceInfo:
        """Brings the root's tensor to everyone, into theirs."""
        operations = self._operations()
        return operations.run(operations.broadcast(tensor, root=root, tag=tag, retry=retry), timeout)

    def broadcast_async(
        self, tensor: Any, *, root: int = 0, tag: int = 0, retry: bool = False, timeout: float | None = None
    ) -> Handle:
        """Starts `broadcast`."""
        operations = self._operations()
        return operations.start(operations.broadcast(tensor, root=root, tag=tag, retry=retry), timeout)

    def barrier(self, *, tag: int = 0, retry: bool = True, timeout: float | None = None) -> ReduceInfo:
        """Returns when all members have called it."""
        operations = self._operations()
        return operations.run(operations.request("BARRIER", None, None, tag=tag, retry=retry), timeout)

    def barrier_async(self, *, tag: int = 0, retry: bool = False, timeout: float | None = None) -> Handle:
        """Starts `barrier`."""
        operations = self._operations()
        return operations.start(operations.request("BARRIER", None, None, tag=tag, retry=retry), timeout)

    # ---------------------------------------------------------------------- those whose shape follows the world

    def all_gather(self, send: Any, recv: Any, *, tag: int = 0, timeout: float | None = None) -> ReduceInfo:
        """Brings every member's `send` to everyone: `recv` holds them by rank, world size times as many elements."""
        operations = self._operations()
        return operations.run(operations.request("ALL_GATHER", send, recv, tag=tag), timeout)

    def all_gather_async(self, send: Any, recv: Any, *, tag: int = 0, timeout: float | None = None) -> Handle:
        """Starts `all_gather`."""
        operations = self._operations()
        return operations.start(operations.request("ALL_GATHER", send, recv, tag=tag), timeout)

    def reduce_scatter(
        self, send: Any, recv: Any, *, op: ReduceOp = _SUM, tag: int = 0, timeout: float | None = None
    ) -> ReduceInfo:
        """Combines every member's `send`, and leaves each the part of its rank: `send` is world size times `recv`."""
        operations = self._operations()
        return operations.run(operations.request("REDUCE_SCATTER", send, recv, op=op, tag=tag), timeout)

    def reduce_scatter_async(
        self, send: Any, recv: Any, *, op: ReduceOp = _SUM, tag: int = 0, timeout: float | None = None
    ) -> Handle:
        """Starts `reduce_scatter`."""
        operations = self._operations()
        return operations.start(operations.request("REDUCE_SCATTER", send, recv, op=op, tag=tag), timeout)

    def all_to_all(self, send: Any, recv: Any, *, tag: int = 0, timeout: float | None = None) -> ReduceInfo:
        """Exchanges parts: part r of `send` goes to rank r, and part r of `recv` comes from there."""
        operations = self._operations()
        return operations.run(operations.request("ALL_TO_ALL", send, recv, tag=tag), timeout)

    def all_to_all_async(self, send: Any, recv: Any, *, tag: int = 0, timeout: float | None = None) -> Handle:
        """Starts `all_to_all`."""
        operations = self._operations()
        return operations.start(operations.request("ALL_TO_ALL", send, recv, tag=tag), timeout)

    def gather(
        self, send: Any, recv: Any = None, *, root: int = 0, tag: int = 0, timeout: float | None = None
    ) -> ReduceInfo:
        """Brings every member's `send` to the root's `recv`, by rank."""
        operations = self._operations()
        return operations.run(operations.request("GATHER", send, recv, root=root, tag=tag), timeout)

    def gather_async(
        self, send: Any, recv: Any = None, *, root: int = 0, tag: int = 0, timeout: float | None = None
    ) -> Handle:
        """Starts `gather`."""
        operations = self._operations()
        return operations.start(operations.request("GATHER", send, recv, root=root, tag=tag), timeout)

    def scatter(self, send: Any, recv: Any, *, root: int = 0, tag: int = 0, timeout: float | None = None) -> ReduceInfo:
        """Brings part r of the root's `send` to the `recv` of rank r; who is not the root passes None for `send`."""
        operations = self._operations()
        return operations.run(operations.request("SCATTER", send, recv, root=root, tag=tag), timeout)

    def scatter_async(
        self, send: Any, recv: Any, *, root: int = 0, tag: int = 0, timeout: float | None = None
    ) -> Handle:
        """Starts `scatter`."""
        operations = self._operations()
        return operations.start(operations.request("SCATTER", send, recv, root=root, tag=tag), timeout)

    # -------------------------------------------------------------------------------------------- point to point

    def send(self, tensor: Any, dest: int, *, tag: int = 0, timeout: float | None = None) -> ReduceInfo:
        """Sends a tensor to a rank of the present epoch; returns when it is there. Its tags are its own."""
        return self._operations().message(tensor, dest, tag, timeout, sends=True)()

    def send_async(self, tensor: Any, dest: int, *, tag: int = 0, timeout: float | None = None) -> Handle:
        """Starts `send`."""
        return self._operations().start_message(tensor, dest, tag, timeout, sends=True)

    def recv(self, tensor: Any, source: int, *, tag: int = 0, timeout: float | None = None) -> ReduceInfo:
        """Receives what a rank of the present epoch sends, into a tensor of the same count and type."""
        return self._operations().message(tensor, source, tag, timeout, sends=False)()

    def recv_async(self, tensor: Any, source: int, *, tag: int = 0, timeout: float | None = None) -> Handle:
        """Starts `recv`."""
        return self._operations().start_message(tensor, source, tag, timeout, sends=False)
