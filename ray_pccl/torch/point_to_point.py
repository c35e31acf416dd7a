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
from ray_pccl.torch.backend_errors import BackendError, UsageBackendError
from ray_pccl.torch.collective_calls import carried
from ray_pccl.torch.membership import GroupMembership
from ray_pccl.torch.works import PCCLWork

_Way = tuple[str, str, int]
"""Sending or receiving, the other peer (empty: any), the tag."""


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
        peer_id = self._peer_at(rank, "dst")

        def run() -> None:
            self._transfer(tensor, peer_id, tag, timeout, sends=True)

        return self._issue(("send", peer_id, tag), work, run)

    def receive(self, tensor: torch.Tensor, rank: int | None, tag: int, timeout: float) -> PCCLWork:
        """Receives a tensor from a rank, or from any."""
        work = PCCLWork([tensor], f"recv() from {'any rank' if rank is None else f'rank {rank}'}")

        peer_id = "" if rank is None else self._peer_at(rank, "src")

        def run() -> None:
            info = self._transfer(tensor, peer_id, tag, timeout, sends=False)
            work.source = self._membership.rank_of(info.contributors[0]) if rank is None else rank

        return self._issue(("recv", peer_id, tag), work, run)

    def close(self) -> None:
        """Ends the threads; what is under way has failed by then."""
        self._workers.close()

    def _peer_at(self, rank: int, name: str) -> str:
        """Which peer is meant: found out when the call is made, for the world may be another when it runs."""
        self._membership.require_usable()
        peer_id = self._membership.peer_at(rank)
        if not peer_id or peer_id == self._membership.communicator.peer_id:
            raise UsageBackendError(f"{name} is another rank of the group, not {rank!r}")
        return peer_id

    def _transfer(self, tensor: torch.Tensor, peer_id: str, tag: int, timeout: float, *, sends: bool) -> ReduceInfo:
        operations = self._membership.communicator._operations()
        datatype = str(tensor.dtype)
        wait = operations.message(carried(tensor), None, tag, timeout, sends=sends, peer_id=peer_id, datatype=datatype)
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
            is_served = way in self._ways
            self._ways.setdefault(way, deque()).append(lambda: work.run(guarded, membership.explain))
        if not is_served:
            self._workers.submit(lambda: self._serve(way))
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
