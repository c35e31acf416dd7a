"""Point-to-point messages of a process group: any number in flight, in order between two ranks under one tag."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable

import torch

from ray_pccl.descriptors import ReduceInfo
from ray_pccl.errors import UsageError
from ray_pccl.peer.handles import Workers
from ray_pccl.torch.backend_errors import BackendError
from ray_pccl.torch.collective_calls import carried
from ray_pccl.torch.membership import GroupMembership
from ray_pccl.torch.works import PCCLWork

_Way = tuple[str, int | None, int]
"""Sending or receiving, the other rank (None: any), the tag."""


class Mailbox:
    """The messages of one process group.

    Those that go one way follow one another; all others run at the same time. A thread serves a way as long as
    something is under way on it.
    """

    def __init__(self, membership: GroupMembership) -> None:
        self._membership = membership
        self._lock = threading.Lock()
        self._ways: dict[_Way, deque[Callable[[], Callable[[], None] | None]]] = {}
        self._workers = Workers()
        membership.on_end = self._end

    def send(self, tensor: torch.Tensor, rank: int, tag: int, timeout: float) -> PCCLWork:
        """Sends a tensor to a rank."""
        work = PCCLWork([tensor], f"send() to rank {rank}")

        def run() -> None:
            self._transfer(tensor, rank, tag, timeout, sends=True)

        return self._issue(("send", rank, tag), work, run)

    def receive(self, tensor: torch.Tensor, rank: int | None, tag: int, timeout: float) -> PCCLWork:
        """Receives a tensor from a rank, or from any."""
        work = PCCLWork([tensor], f"recv() from {'any rank' if rank is None else f'rank {rank}'}")

        def run() -> None:
            info = self._transfer(tensor, rank, tag, timeout, sends=False)
            members = self._membership.communicator.members
            work.source = members.index(info.contributors[0]) if rank is None else rank

        return self._issue(("recv", rank, tag), work, run)

    def close(self) -> None:
        """Ends the threads; what is under way has failed by then."""
        self._workers.close()

    def _transfer(self, tensor: torch.Tensor, rank: int | None, tag: int, timeout: float, *, sends: bool) -> ReduceInfo:
        wait = self._membership.communicator._operations().message(carried(tensor), rank, tag, timeout, sends=sends)
        if self._membership.end is not None:  # it ended before this was posted, and so this was not ended with it
            self._end(self._membership.end)
        return wait()

    def _issue(self, way: _Way, work: PCCLWork, run: Callable[[], None]) -> PCCLWork:
        membership = self._membership
        membership.require_usable()

        def guarded() -> None:
            membership.require_usable()
            run()

        with self._lock:
            queue = self._ways.get(way)
            if queue is None:
                queue = self._ways[way] = deque()
                self._workers.submit(lambda: self._serve(way))
            queue.append(lambda: work.run(guarded, membership.explain))
        return work

    def _serve(self, way: _Way) -> None:
        while True:
            with self._lock:
                queue = self._ways[way]
                if not queue:
                    del self._ways[way]
                    return
                execute = queue.popleft()
            follow_up = execute()
            del execute  # it holds the user's tensor
            if follow_up is not None:
                self._workers.submit(follow_up)  # callbacks may wait for the next message of this way

    def _end(self, error: BackendError) -> None:
        """The group is over: messages between survivors end, too."""
        with contextlib.suppress(UsageError):  # it is closed, and so they have ended
            self._membership.communicator._operations().end_messages(error)
