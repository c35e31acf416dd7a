"""The collectives, as a user calls them: arguments in, a committed result or an error out, retries in between."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from ray_pccl.control.messages import Failure, OperationState, Running, VoteKind, error_of
from ray_pccl.descriptors import (
    QuantizationOptions,
    ReduceInfo,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
)
from ray_pccl.errors import MasterUnreachableError, OperationTimeoutError, PCCLError, PeerEvictedError, UsageError
from ray_pccl.peer.connection import MasterConnection
from ray_pccl.peer.handles import Handle, Workers
from ray_pccl.peer.ledger import FrozenError, Key, Operation
from ray_pccl.peer.requests import Request, check_tag
from ray_pccl.ring import fault_points
from ray_pccl.ring.collect import collect
from ray_pccl.ring.header import Kind
from ray_pccl.ring.messaging import Transfer
from ray_pccl.ring.plane import DataPlane
from ray_pccl.ring.programs import as_bytes
from ray_pccl.ring.segment import ENTRIES
from ray_pccl.ring.shared import Host, SharedAttempt, slots
from ray_pccl.ring.task import Attempt, Epoch, RefusedError
from ray_pccl.ring.tensors import as_input, as_output
from ray_pccl.settings import check_timeout
from ray_pccl.state.syncing import SharedStates

log = logging.getLogger("ray_pccl.peer")

_LOOK_S = 0.05
_RETRY_S = 0.0005
_RUNNING, _PREPARED = OperationState.RUNNING, OperationState.PREPARED
_COMMITTED, _FAILED = OperationState.COMMITTED, OperationState.FAILED


class Operations:
    """All operations of one membership: from `connect()` to `close()` or eviction."""

    def __init__(self, connection: MasterConnection, plane: DataPlane) -> None:
        self._connection = connection
        self._membership = connection.membership
        self._plane = plane
        self._workers = Workers()
        self._tags: dict[int, Request] = {}
        """What is in flight."""
        self._lock = threading.Lock()
        self._awaiting = threading.Lock()
        self.entered = 0
        """How many operations were begun."""
        self.pinned: tuple[str, ...] | None = None
        """The only members, by rank, with whom operations are to run: in any other epoch everyone refuses them."""
        self._fitting: Epoch | None = None
        self._recorder = connection.recorder
        self._recorder.running = self._running
        self.shared_states = SharedStates(self, plane, self._membership.identity.peer_id)

    def _running(self) -> list[Running]:
        now = time.monotonic()
        return sorted(
            (Running(request.tag, request.describe(), now - request.began) for request in list(self._tags.values())),
            key=lambda running: -running.seconds,
        )

    def close(self) -> None:
        """Ends the threads, once their operations have failed."""
        self._workers.close()

    @property
    def members(self) -> tuple[str, ...]:
        """Who is in the present epoch, by rank."""
        return tuple(member.peer_id for member in self._membership.view.members)

    @property
    def patience_s(self) -> float:
        """How long members may be in different calls, unless a call says otherwise."""
        return self._membership.settings.op_timeout_s

    # ------------------------------------------------------------------------------------------------- requests

    @staticmethod
    def all_reduce(
        send: Any,
        recv: Any,
        op: ReduceOp,
        tag: int,
        operand: ReduceOperandDescriptor | None,
        quantization: QuantizationOptions | None,
        *,
        retry: bool,
        signature: int = 0,
    ) -> Request:
        """The request of an all-reduce; without `recv` it is in place."""
        if recv is None or recv is send:
            # One look at it is enough: for a torch tensor it takes several microseconds.
            target = as_output(send, "send")
            given = as_input(send) if target.staged else target
        else:
            given, target = as_input(send), as_output(recv)
        return Request(
            Kind.ALL_REDUCE,
            given,
            target,
            tag=tag,
            op=op,
            retry=retry,
            quantization=quantization,
            operand=operand,
            signature=signature,
        )

    def _reduction(self, descriptor: ReduceOpDescriptor) -> Request:
        what = descriptor.reduce_descriptor
        operand, quantization = what.operand_descriptor, what.quantization_options
        return self.all_reduce(descriptor.send, descriptor.recv, what.op, what.tag, operand, quantization, retry=True)

    def reduce(self, send: Any, recv: Any, *, op: ReduceOp, root: int, tag: int, retry: bool) -> Request:
        """The request of a reduce: in place at a root that has no `recv`."""
        return self.request("REDUCE", send, recv, output=send, op=op, root=root, tag=tag, retry=retry)

    def broadcast(self, tensor: Any, *, root: int, tag: int, retry: bool) -> Request:
        """The request of a broadcast: the tensor is an input at the root, and an output elsewhere."""
        if root != self._membership.view.rank:
            as_output(tensor, "tensor")  # it will be found out again when the root is known, but an error is due now
        return self.request("BROADCAST", tensor, None, output=tensor, root=root, tag=tag, retry=retry)

    @staticmethod
    def request(kind: str, send: Any, recv: Any, **given: Any) -> Request:
        """The request of any other collective."""
        return Request(
            Kind[kind],
            as_input(send) if send is not None else None,
            as_output(recv) if recv is not None else None,
            **given,
        )

    # ---------------------------------------------------------------------------------------------- starting

    def run(self, request: Request, timeout: float | None) -> ReduceInfo:
        """Runs a request in this thread."""
        patience = self._patience(timeout)
        try:
            self._claim(request)
            return self._execute(request, patience, behind=False)
        finally:
            try:
                self._release(request)
            except BaseException:  # see `_try`
                self._release(request)
                raise

    def start(self, request: Request, timeout: float | None) -> Handle:
        """Runs a request behind the caller's back."""
        patience = self._patience(timeout)
        self._claim(request)
        handle = Handle()

        def execute() -> ReduceInfo:
            try:
                return self._execute(request, patience, behind=True)
            finally:
                self._release(request)

        self._workers.submit(lambda: handle.run(execute))
        return handle

    def _patience(self, timeout: float | None) -> float:
        if timeout is None:
            return self._membership.settings.op_timeout_s
        return check_timeout(timeout, "an operation")

    def _claim(self, request: Request) -> None:
        self.entered += 1
        request.began = time.monotonic()
        with self._lock:
            if request.tag in self._tags:
                raise UsageError(
                    f"an operation with tag {request.tag} is in flight already: use another, or wait for it"
                )
            if len(self._tags) >= ENTRIES:
                raise UsageError(f"{ENTRIES} operations are in flight already: wait for some of them")
            self._tags[request.tag] = request
        self._recorder.changes += 1  # only a hint that there is something to tell

    def _release(self, request: Request) -> None:
        if self._tags.get(request.tag) is request:  # not that of another call, which is why this one failed
            self._tags.pop(request.tag, None)

    # ---------------------------------------------------------------------------------------------- executing

    def _execute(self, request: Request, patience: float, *, behind: bool) -> ReduceInfo:
        try:
            info = self._attempt(request, patience, behind=behind)
        except BaseException:
            self._recorder.failed()
            raise
        self._recorder.committed(request.kind.call, request.nbytes, time.monotonic() - request.began)
        return info

    def _attempt(self, request: Request, patience: float, *, behind: bool) -> ReduceInfo:
        """Tries until it commits, or fails for good."""
        ledger = self._membership.ledger
        key: Key | None = None
        operation: Operation | None = None
        while True:
            epoch, host = self._await_epoch(patience)
            now = time.monotonic()
            try:
                if key is None:
                    if epoch.size < self._membership.view.min_world_size:
                        self._await_minimum()
                        continue
                    request.settle_root(epoch)
                    retry, root, floor = request.retry, request.root_id, request.floor
                    key, operation = ledger.begin(request.tag, epoch.number, now, retry=retry, root=root, floor=floor)
                else:
                    fault_points.reach("before_retry")
                    ledger.again(key, epoch.number, now)
            except FrozenError:
                self._plane.wait_changed(_LOOK_S, lambda: not ledger.frozen)
                continue
            assert operation is not None
            if operation.state is _FAILED:
                raise _failed(operation)
            try:
                info = self._try(request, key, operation, epoch, host, now + patience, behind=behind)
            except PCCLError:
                raise
            except BaseException as error:  # an interrupt, no memory: the others are not to wait for this peer
                if operation.state is _RUNNING:
                    with contextlib.suppress(PCCLError):
                        self._refuse(key, operation, epoch, RefusedError(_interruption(epoch, error)))
                raise
            if info is not None:
                return info
            self._recorder.aborted()
            log.info(
                "group %r: a death ended an attempt of %s in epoch %d: it is tried again",
                *(self._membership.identity.group, request.describe(), epoch.number),
                extra=self._about(epoch.number, key),
            )

    def _about(self, epoch: int, key: Key) -> dict[str, object]:
        """What a line of the log is about."""
        identity = self._membership.identity
        operation = f"{key[0]}/{key[1]}"
        return {"group": identity.group, "epoch": epoch, "operation": operation, "peer": identity.peer_id}

    def _await_minimum(self) -> None:
        patience = self._membership.settings.join_timeout_s
        with self._awaiting:  # one thread votes, for all that wait
            view = self._membership.view
            if len(view.members) < view.min_world_size:
                self._connection.call(lambda now: self._membership.vote(VoteKind.AWAIT_MINIMUM, patience, now))

    def _await_epoch(self, patience: float) -> tuple[Epoch, Host | None]:
        settings = self._membership.settings
        deadline = time.monotonic() + patience + settings.master_timeout_s
        try:
            return self._plane.await_ready(deadline)
        except TimeoutError:
            raise OperationTimeoutError(
                f"the members of group {self._membership.identity.group!r} were not linked in time", calls={}
            ) from None

    def _try(
        self,
        request: Request,
        key: Key,
        operation: Operation,
        epoch: Epoch,
        host: Host | None,
        deadline: float,
        *,
        behind: bool,
    ) -> ReduceInfo | None:
        """One attempt. None: it was aborted, and is to be tried again in the next epoch."""
        plane, ledger = self._plane, self._membership.ledger
        try:
            if self.pinned is not None and epoch is not self._fitting:
                self._check_pinned(epoch, self.pinned)
            task = request.task(epoch)
        except RefusedError as refused:
            self._refuse(key, operation, epoch, refused)
            return None
        if epoch.size == 1:
            try:
                ledger.commit(key, time.monotonic(), epoch=epoch.number)
            except FrozenError:
                self._await_decision(operation)
                return None
            request.alone()
            return ReduceInfo(0, 0, 1, epoch.members)
        attempt: Attempt | None = None
        try:
            attempt = plane.attempt(task, key, epoch, host, deadline)
            if operation.state is _FAILED:  # another refused it before this attempt could be told
                raise _failed(operation)
            try:
                plane.run(attempt, behind=behind)
            except FrozenError:
                if self._await_decision(operation) is not _COMMITTED:
                    return None
                self._resolve(attempt)
            except RefusedError as refused:
                if self._refuse(key, operation, epoch, refused) is not _COMMITTED:
                    return None
                self._resolve(attempt)
            except PCCLError:
                raise
            except BaseException as error:
                self._interrupted(attempt, operation, error)
                raise
            request.finish(keeps=task.out is not None)
        finally:
            try:
                plane.leave(key, attempt)
            except BaseException:  # an interrupt at the very moment: what is done twice does no harm
                plane.leave(key, attempt)
                raise
        return ReduceInfo(attempt.tx, attempt.rx, epoch.size, epoch.members)

    def _check_pinned(self, epoch: Epoch, pinned: tuple[str, ...]) -> None:
        """Refuses, as every other member does by the same comparison, what would run among other ranks than those."""
        if epoch.members != pinned:
            text = (
                f"the ranks of group {self._membership.identity.group!r} were {', '.join(pinned)}, and are "
                f"{', '.join(epoch.members)} since links broke: results would be in another order; make a new group"
            )
            raise RefusedError(Failure("WorldChangedError", text))
        self._fitting = epoch

    def _resolve(self, attempt: Attempt) -> None:
        """The master decided that it commits: every survivor has its result, or all it needs to make it (R8)."""
        if isinstance(attempt, SharedAttempt) and attempt.publishes and not attempt.prepared:
            collect(attempt.task, attempt.epoch.rank, slots(attempt))
            # Nobody of our epoch writes before we have left this one: if someone did, we are in none any more.
            if not attempt.all_published():
                self._plane.wait_changed(self._membership.settings.heartbeat_timeout_s, lambda: False)
                text = "this peer was evicted while it made the result of an operation"
                raise PeerEvictedError(text, reason="it was too slow")

    def _refuse(self, key: Key, operation: Operation, epoch: Epoch, refused: RefusedError) -> OperationState:
        """Fails for good, and has everyone else fail the same way.

        Unless the epoch froze before that: then it returns what was decided. It may be a commit, of what this peer had
        published, and took back too late.
        """
        try:
            self._membership.ledger.fail(key, refused.failure, time.monotonic(), epoch.number)
        except FrozenError:
            return self._await_decision(operation)
        self._plane.refuse(key, epoch, refused.failure)
        raise error_of(refused.failure)

    def _interrupted(self, attempt: Attempt, operation: Operation, error: BaseException) -> None:
        """The caller gives up: if it still may, for everyone; if not, the others have what they need to commit."""
        if isinstance(attempt, SharedAttempt) and not attempt.withdraw():
            with contextlib.suppress(FrozenError):  # frozen: it counts as prepared
                while not attempt.commit_now():
                    time.sleep(_RETRY_S)
            return
        failure = _interruption(attempt.epoch, error)
        with contextlib.suppress(PCCLError):
            self._refuse(attempt.key, operation, attempt.epoch, RefusedError(failure))
        self._plane.stop(attempt, error_of(failure))

    def _await_decision(self, operation: Operation) -> OperationState:
        """What became of an operation whose epoch froze. Raises its error if it was consumed."""
        ledger, membership = self._membership.ledger, self._membership

        def decided() -> bool:
            return operation.state in (_COMMITTED, _FAILED) or not ledger.frozen

        while not decided():
            self._plane.wait_changed(_LOOK_S, decided)
            silence = time.monotonic() - membership.last_heard
            if silence >= membership.settings.master_timeout_s and not decided():
                raise MasterUnreachableError(
                    f"an operation of group {membership.identity.group!r} was interrupted by a loss, and the master, "
                    f"who has to decide what becomes of it, was not heard for {silence:.1f} s"
                )
        if operation.state is _FAILED:
            raise _failed(operation)
        return operation.state

    # ------------------------------------------------------------------------------------------ point to point

    def message(
        self,
        tensor: Any,
        rank: int | None,
        tag: int,
        timeout: float | None,
        *,
        sends: bool,
        peer_id: str = "",
        datatype: str = "",
    ) -> Callable[[], ReduceInfo]:
        """Posts a message to or from a rank of the present epoch, or a peer; what is returned waits for it.

        One to be received from rank None comes from whoever sends first: the info's contributor. `datatype` is what
        the elements are, where the tensor stands for another.
        """
        patience = self._patience(timeout)
        operand = as_input(tensor, "send") if sends else as_output(tensor, "recv")
        epoch, _ = self._await_epoch(patience)
        is_rank = isinstance(rank, int) and not isinstance(rank, bool)
        if rank is not None and (not is_rank or not 0 <= rank < epoch.size or rank == epoch.rank):
            name = "dest" if sends else "source"
            raise UsageError(f"{name} is another rank from 0 to {epoch.size - 1}, not {rank!r}")
        about = f"{operand.count} elements of {datatype or operand.datatype.name}"
        other = epoch.members[rank] if rank is not None else peer_id
        way = (other, check_tag(tag))
        transfer = Transfer(way, as_bytes(operand.array), about, time.monotonic() + patience)
        messages = self._plane.messages
        post = messages.post_send if sends else messages.post_receive
        if not other:
            post = messages.post_open_receive
        self.entered += 1
        began = time.monotonic()
        self._plane.call(lambda: post(transfer))

        def wait() -> ReduceInfo:
            try:
                while not transfer.ended.wait(1.0):
                    if self._plane.ending is not None:
                        transfer.end(self._plane.ending)
            except BaseException:
                self._plane.call(lambda: messages.cancel(transfer))
                transfer.ended.wait(1.0)
                raise
            if transfer.error is not None:
                self._recorder.failed()
                raise transfer.error
            if not sends:
                operand.store()
            moved = len(transfer.memory)
            self._recorder.committed("send" if sends else "recv", moved, time.monotonic() - began)
            ends = (epoch.members[epoch.rank] if sends else transfer.way[0],)
            return ReduceInfo(moved if sends else 0, 0 if sends else moved, epoch.size, ends)

        return wait

    def start_message(self, tensor: Any, rank: int, tag: int, timeout: float | None, *, sends: bool) -> Handle:
        """Posts a message, and waits for it behind the caller's back."""
        wait = self.message(tensor, rank, tag, timeout, sends=sends)
        handle = Handle()
        self._workers.submit(lambda: handle.run(wait))
        return handle

    def end_messages(self, error: PCCLError) -> None:
        """Has every message that is under way raise this error."""
        self._plane.call(lambda: self._plane.messages.end_all(error))

    # ------------------------------------------------------------------------------------------------- many

    def reduce_many(self, descriptors: Iterable[ReduceOpDescriptor], max_in_flight: int) -> ReduceInfo:
        """All-reduces, at most so many at a time, each retried until it commits."""
        if isinstance(max_in_flight, bool) or not isinstance(max_in_flight, int) or max_in_flight < 1:
            raise UsageError(f"max_in_flight is 1 or more, not {max_in_flight!r}")
        waiting = list(descriptors)
        requests = [self._reduction(descriptor) for descriptor in waiting]
        tags = [request.tag for request in requests]
        if len(set(tags)) != len(tags):
            raise UsageError("every descriptor needs a tag of its own: operations in flight together pair by tag")
        flying: list[Handle] = []
        infos: list[ReduceInfo] = []
        error: BaseException | None = None
        for request in requests:
            if len(flying) >= max_in_flight:
                error = _collect(flying.pop(0), infos) or error
            if error is not None:
                break
            flying.append(self.start(request, None))
        for handle in flying:
            error = _collect(handle, infos) or error
        if error is not None:
            raise error
        if not infos:
            epoch = self._membership.view
            members = tuple(member.peer_id for member in epoch.members)
            return ReduceInfo(0, 0, len(members), members)
        fewest = min(infos, key=lambda info: info.world_size)
        return ReduceInfo(
            sum(info.tx_bytes for info in infos),
            sum(info.rx_bytes for info in infos),
            fewest.world_size,
            fewest.contributors,
        )


def _collect(handle: Handle, infos: list[ReduceInfo]) -> BaseException | None:
    ok, _, info = handle.wait()
    if ok and info is not None:
        infos.append(info)
        return None
    return handle.exception()


def _interruption(epoch: Epoch, error: BaseException) -> Failure:
    me = epoch.members[epoch.rank]
    return Failure("PCCLError", f"peer {me} was interrupted in the operation: {type(error).__name__} {error}")


def _failed(operation: Operation) -> PCCLError:
    if operation.failure is None:
        return PCCLError("the operation failed, and nobody said why")
    return error_of(operation.failure)
