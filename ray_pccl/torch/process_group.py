"""The process group of the backend "pccl": what torch calls, on a `Communicator`. See `docs/design/`."""

# Torch's class takes more forms of each call than it ever makes itself; and its names for the arguments are not ours.
# mypy: disable-error-code="override, assignment, misc, call-arg"

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Store

from ray_pccl.torch.averages import Averages
from ray_pccl.torch.collective_calls import CollectiveCalls
from ray_pccl.torch.lane import Lane
from ray_pccl.torch.membership import GroupMembership
from ray_pccl.torch.options import Options
from ray_pccl.torch.point_to_point import Mailbox
from ray_pccl.torch.works import EndedWork, PCCLWork

log = logging.getLogger("ray_pccl.torch")

Tensor = torch.Tensor
_ALLREDUCE, _BROADCAST, _REDUCE = c10d.AllreduceOptions(), c10d.BroadcastOptions(), c10d.ReduceOptions()
_ALLGATHER, _GATHER, _SCATTER = c10d.AllgatherOptions(), c10d.GatherOptions(), c10d.ScatterOptions()
_REDUCE_SCATTER, _ALL_TO_ALL, _BARRIER = c10d.ReduceScatterOptions(), c10d.AllToAllOptions(), c10d.BarrierOptions()
_IN_TURN = c10d.BarrierOptions()
_IN_TURN.asyncOp = False


class PCCLProcessGroup(dist.ProcessGroup):
    """One rank's end of a process group.

    Calls run one after another, in the order in which they were issued, which is to be the same on all ranks: one that
    blocks its caller in the caller's thread, the others in a thread of the group's own. Point-to-point messages run
    beside them. The tensors of a call belong to it until its work has ended.
    """

    def __init__(self, store: Store, membership: GroupMembership, timeout: timedelta) -> None:
        super().__init__(membership.rank, membership.size)  # torch has a subclass in Python take no store
        self._store = store
        self._membership = membership
        self._calls = CollectiveCalls(membership.communicator, retry=membership.elastic)
        self._mailbox = Mailbox(membership)
        self._lane = Lane("collectives")
        self.averages = Averages()
        self._timeout_s = timeout.total_seconds()
        self._name = self._description = ""
        self._pid = os.getpid()
        _open.add(self)

    # ------------------------------------------------------------------------------------- what torch asks about it

    @property
    def membership(self) -> GroupMembership:
        """Who is in the group, and what was heard of them."""
        return self._membership

    def getBackendName(self) -> str:  # noqa: N802
        """The name that it was asked for with."""
        return "pccl"

    def getRank(self) -> int:  # noqa: N802
        """This process's rank: now, if the group is elastic."""
        return self._membership.rank

    def getSize(self) -> int:  # noqa: N802
        """How many ranks there are: now, if the group is elastic."""
        return self._membership.size

    def getGroupName(self) -> str:  # noqa: N802
        """Torch's name for it."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Torch names it."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Torch's description of it."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Torch describes it."""
        self._description = description

    def get_group_store(self) -> Store:
        """The store that its ranks share."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """How long ranks may be in different calls, from now on."""
        self._timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Leaves the group, and leaves nothing behind. What is under way here raises; safe to call twice."""
        _open.discard(self)
        if self._pid == os.getpid():  # a forked child has none of it
            self._membership.close()
            self._mailbox.close()
            self._lane.close()
            self.averages.clear()

    def abort(self) -> None:
        """The same as `shutdown`: every wait ends at once."""
        self.shutdown()

    # ------------------------------------------------------------------------------------------------- collectives

    def allreduce(self, tensors: list[Tensor], opts: Any = _ALLREDUCE) -> dist.Work:
        """Combines all ranks' tensors, in place, with the same bits everywhere."""
        op, timeout = opts.reduceOp, self._timeout(opts)

        def run() -> None:
            for tensor in tensors:
                self._calls.all_reduce(tensor, op, timeout)

        return self._issue(run, tensors, opts, "all_reduce")

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any = _BROADCAST) -> dist.Work:
        """Brings the root's tensors to all."""
        root, timeout = self._membership.peer_at(opts.rootRank), self._timeout(opts)

        def run() -> None:
            for tensor in tensors:
                self._calls.broadcast(tensor, root, timeout)

        return self._issue(run, tensors, opts, "broadcast")

    def reduce(self, tensors: list[Tensor], opts: Any = _REDUCE) -> dist.Work:
        """Combines all ranks' tensors into the root's."""
        op, timeout = opts.reduceOp, self._timeout(opts)
        root = self._membership.peer_at(opts.rootRank)

        def run() -> None:
            for tensor in tensors:
                self._calls.reduce(tensor, op, root, timeout)

        return self._issue(run, tensors, opts, "reduce")

    def barrier(self, opts: Any = _BARRIER) -> dist.Work:
        """Returns when all ranks are here."""
        timeout = self._timeout(opts)
        return self._issue(lambda: self._calls.barrier(timeout), [], opts, "barrier")

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = _ALLGATHER) -> dist.Work:
        """Brings all ranks' tensors to everyone: `outputs[i][r]` is rank r's `inputs[i]`."""
        timeout = self._timeout(opts)

        def run() -> None:
            for output, source in _pairs(outputs, inputs):
                self._calls.all_gather_list(output, source, timeout)

        return self._issue(run, _flat(outputs), opts, "all_gather")

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = _ALLGATHER
    ) -> dist.Work:
        """Like `allgather`, but `outputs[r][i]` is rank r's `inputs[i]`."""
        timeout = self._timeout(opts)

        def run() -> None:
            by_tensor = [[of_rank[place] for of_rank in outputs] for place in range(len(inputs))]
            for output, source in zip(by_tensor, inputs, strict=True):
                self._calls.all_gather_list(output, source, timeout)

        return self._issue(run, _flat(outputs), opts, "all_gather_coalesced")

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = _ALLGATHER) -> dist.Work:
        """Brings all ranks' tensors into one, by rank."""
        return self.all_gather_single_coalesced([output], [source], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = _ALLGATHER
    ) -> dist.Work:
        """Several `all_gather_single`."""
        timeout = self._timeout(opts)

        def run() -> None:
            for output, source in _pairs(outputs, inputs):
                self._calls.all_gather(output, source, timeout)

        return self._issue(run, outputs, opts, "all_gather_single")

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = _REDUCE_SCATTER
    ) -> dist.Work:
        """Combines all ranks' lists, and leaves each rank the tensor of its place."""
        op, timeout = opts.reduceOp, self._timeout(opts)

        def run() -> None:
            for output, sources in _pairs(outputs, inputs):
                self._calls.reduce_scatter_list(output, sources, op, timeout)

        return self._issue(run, outputs, opts, "reduce_scatter")

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = _REDUCE_SCATTER) -> dist.Work:
        """Combines all ranks' tensors, and leaves each rank its part."""
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = _REDUCE_SCATTER
    ) -> dist.Work:
        """Several `reduce_scatter_single`."""
        op, timeout = opts.reduceOp, self._timeout(opts)

        def run() -> None:
            for output, source in _pairs(outputs, inputs):
                self._calls.reduce_scatter(output, source, op, timeout)

        return self._issue(run, outputs, opts, "reduce_scatter_single")

    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = _ALL_TO_ALL,
    ) -> dist.Work:
        """Exchanges parts of one tensor for parts of another: equal ones, or with the sizes that are given."""
        timeout = self._timeout(opts)

        def run() -> None:
            if output_splits or input_splits:
                self._calls.all_to_all_split(output, source, output_splits, input_splits, timeout)
            else:
                self._calls.all_to_all(output, source, timeout)

        return self._issue(run, [output], opts, "all_to_all_single")

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = _ALL_TO_ALL) -> dist.Work:
        """Exchanges tensors, of any sizes."""
        timeout = self._timeout(opts)
        return self._issue(lambda: self._calls.all_to_all_list(outputs, inputs, timeout), outputs, opts, "all_to_all")

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = _GATHER) -> dist.Work:
        """Brings all ranks' tensors to the root."""
        root, timeout = self._membership.peer_at(opts.rootRank), self._timeout(opts)
        output = outputs[0] if outputs else []
        return self._issue(lambda: self._calls.gather(output, inputs[0], root, timeout), output, opts, "gather")

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = _SCATTER) -> dist.Work:
        """Brings the root's tensors to the ranks."""
        root, timeout = self._membership.peer_at(opts.rootRank), self._timeout(opts)
        sources = inputs[0] if inputs else []
        return self._issue(lambda: self._calls.scatter(outputs[0], sources, root, timeout), outputs, opts, "scatter")

    # The names of before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ---------------------------------------------------------------------------------------------- point to point

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> PCCLWork:
        """Sends a tensor to a rank."""
        return self._mailbox.send(tensors[0], dst, tag, self._timeout_s)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> PCCLWork:
        """Receives a tensor from a rank."""
        return self._mailbox.receive(tensors[0], src, tag, self._timeout_s)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> PCCLWork:
        """Receives a tensor from whichever rank sends one first; the work's `source_rank()` tells which."""
        return self._mailbox.receive(tensors[0], None, tag, self._timeout_s)

    recvAnysource = recv_anysource  # noqa: N815

    # ------------------------------------------------------------------------------------------------------ inside

    def average_into(self, output: Tensor, source: Tensor) -> dist.Work:
        """Averages all ranks' `source` over those who contributed, into everyone's `output`; for `average_hook`."""
        timeout = self._timeout_s
        return self._issue(
            lambda: self._calls.average_into(output, source, timeout), [output], _ALLREDUCE, "average_into"
        )

    def run_in_turn(self, run: Callable[[], None], name: str) -> None:
        """Runs something that all ranks run, after all calls that were issued before; raises what it raises."""
        self._issue(run, [], _IN_TURN, name, is_collective=False).wait()

    def _issue(
        self, run: Callable[[], None], results: list[Tensor], opts: Any, name: str, *, is_collective: bool = True
    ) -> dist.Work:
        membership, calls = self._membership, self._calls
        membership.require_usable()
        if not opts.asyncOp and self._lane.enter():
            calls.begun = not is_collective
            try:
                run()
            except Exception as error:
                self._fail(error)
            finally:
                self._lane.leave()
            return EndedWork(results)
        work = PCCLWork(results, f"{name} of group {self._description or self._name!r}")

        def guarded() -> None:
            membership.require_usable()
            calls.begun = not is_collective
            try:
                run()
            except Exception as error:
                self._fail(error)

        self._lane.submit(lambda: work.run(guarded, membership.explain))
        return work

    def _fail(self, error: Exception) -> NoReturn:
        """Raises what a call failed with. Who can't know of it yet is told, for the others would wait in vain."""
        if not self._calls.begun:
            self._calls.fail(error, self._timeout_s)
        explained = self._membership.explain(error)
        if explained is error:
            raise error
        raise explained from error

    def _timeout(self, opts: Any) -> float:
        seconds: float = opts.timeout.total_seconds()
        return seconds if seconds > 0 else self._timeout_s


def create(given: Any, options: Any) -> PCCLProcessGroup:
    """Makes the process group that torch asks for: blocks until all its ranks have come."""
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"pg_options of the backend 'pccl' are ray_pccl.torch.Options(...), not {options!r}")
    known = next((group.membership.master for group in list(_open) if group.membership.master is not None), None)
    membership = GroupMembership.join(
        options or Options(), given.store, given.group_rank, given.group_size, given.timeout, known
    )
    try:
        return PCCLProcessGroup(given.store, membership, given.timeout)
    except BaseException:
        membership.close()
        raise


def _pairs(outputs: Sequence[Any], inputs: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Those that belong together; raises before the first one is taken if there are not as many of both."""
    return list(zip(outputs, inputs, strict=True))


def _flat(lists: list[list[Tensor]]) -> list[Tensor]:
    return [tensor for tensors in lists for tensor in tensors]


_open: weakref.WeakSet[PCCLProcessGroup] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    """A process that ends with groups open leaves them, and its threads end before the interpreter does."""
    for group in list(_open):
        try:
            group.shutdown()
        except Exception:  # the others are to be left, too
            log.exception("a process group could not be left")
