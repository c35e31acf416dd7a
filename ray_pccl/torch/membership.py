"""A process group's membership: the communicator behind it, and what a death means for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from torch._C._distributed_c10d import Store

from ray_pccl.control.endpoint import Endpoint
from ray_pccl.errors import PCCLError, PeerLostError, TooFewPeersError
from ray_pccl.peer.communicator import Communicator
from ray_pccl.peer.host import host_id
from ray_pccl.settings import LONGEST_S, Settings
from ray_pccl.torch import own_master
from ray_pccl.torch.backend_errors import BackendError, PeerLostBackendError, UsageBackendError, as_backend_error
from ray_pccl.torch.options import Options
from ray_pccl.torch.placing import find_place, meet
from ray_pccl.types import MembershipChange, MembershipEvent

NO_NEWCOMERS_S = 0.01
"""How long a group that is not elastic waits for newcomers after a death: nobody may come."""
LAST_CALL_S = 10.0
"""An elastic group begins with all its ranks, who have met already; one that died since is not waited for longer."""


class GroupMembership:
    """One process's place in the group behind a process group.

    A group that is not elastic lives as long as all its ranks do: the first one that goes ends it for the others, in
    every call that is under way and every later one. Its minimum is its size, so that no operation can begin, let
    alone commit, in an epoch with fewer.
    """

    def __init__(self, communicator: Communicator, master: Endpoint | None, *, elastic: bool) -> None:
        self.communicator = communicator
        self.master = master
        self.elastic = elastic
        self.on_end: Callable[[BackendError], None] = _ignore
        """Called once, when a group that is not elastic has lost a rank."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._end: BackendError | None = None
        self._reasons: dict[str, str] = {}
        self._epoch = communicator.epoch
        self._first = communicator.members
        if not elastic:
            communicator._operations().pinned = self._first
        self._world = self._first, communicator.rank
        self._seen = self._first

    @classmethod
    def join(
        cls,
        options: Options,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        known: Endpoint | None,
    ) -> GroupMembership:
        """Joins the group whose ranks share `store`; blocks until all have come, or raises a `BackendError`."""
        own_master.reap()
        place = find_place(options, store, rank, size, timeout, known)
        meet(store, place.life, size, timeout)
        settings = options.settings if options.settings is not None else Settings.from_env()
        seconds = min(timeout.total_seconds(), LONGEST_S)
        if options.elastic:
            settings = replace(settings, last_call_s=LAST_CALL_S if size > 1 else settings.last_call_s)
        else:
            settings = replace(settings, join_timeout_s=NO_NEWCOMERS_S)
        communicator = Communicator(
            place.group,
            master=place.master,
            min_world_size=options.min_world_size if options.elastic else size,
            max_world_size=options.max_world_size if options.elastic else size,
            rank=rank,
            expected_world_size=size,
            settings=settings,
            namespace=options.namespace,
            label=f"rank{rank}@{host_id()}-{os.getpid()}",
        )
        try:
            communicator.connect(seconds)
            membership = cls(communicator, place.master, elastic=options.elastic)
        except PCCLError as error:
            communicator.close()
            raise as_backend_error(error) from error
        except BaseException:
            communicator.close()
            raise
        communicator.on_membership(membership._heard)
        membership._look()
        return membership

    def close(self) -> None:
        """Leaves. Everything under way raises."""
        with self._lock:
            if self._end is None:
                self._end = UsageBackendError("the process group was destroyed")
        self.communicator.close()
        own_master.reap()

    # --------------------------------------------------------------------------------------------- who is here

    @property
    def rank(self) -> int:
        """This process's rank; the last one that is known."""
        return self.look()[1]

    @property
    def size(self) -> int:
        """How many ranks there are; the last number that is known."""
        return len(self.look()[0])

    def look(self) -> tuple[tuple[str, ...], int]:
        """The members and this process's rank, for a caller who goes by them from now on."""
        self._look()
        world = self._world
        self._seen = world[0]
        return world

    def peer_at(self, rank: int) -> str:
        """Which peer a caller means by a rank: that of the world that it was last told of. Empty if there is none.

        A rank of the world in which a call happens to run would be another peer's, if someone has died since.
        """
        return self._seen[rank] if 0 <= rank < len(self._seen) else ""

    def rank_of(self, peer_id: str) -> int:
        """The rank that a caller knows a peer by; -1 if it was never told of it."""
        return self._seen.index(peer_id) if peer_id in self._seen else -1

    @property
    def end(self) -> BackendError | None:
        """Why the group can't be used any more, if it can't."""
        return self._end

    def require_usable(self) -> None:
        """Raises why the group can't be used any more, if it can't."""
        if self._pid != os.getpid():
            raise UsageBackendError("this process group belongs to the parent process: make one after the fork")
        if self._end is None and not self.elastic:
            self._look()
        if self._end is not None:
            raise self._end.again()

    def explain(self, error: BaseException) -> BaseException:
        """What a call that failed with `error` is to raise."""
        if not isinstance(error, PCCLError):
            return error
        if self._end is not None:
            return self._end.again()
        if not self.elastic:
            if isinstance(error, TooFewPeersError):
                self._look()
                return self._end.again() if self._end is not None else as_backend_error(error)
            if isinstance(error, PeerLostError):
                self._finish(PeerLostBackendError(str(error), **error.details))
        elif isinstance(error, PeerLostError):
            self.look()  # the caller is told now, and what it calls next is for the world without them
        return as_backend_error(error)

    def changes(self) -> tuple[tuple[str, ...], int, tuple[str, ...]]:
        """The members, this process's rank, and who the members were at the last call, or when this process joined."""
        members, rank = self.look()
        before, self._first = self._first, members
        return members, rank, before

    # ---------------------------------------------------------------------------------------------------- inside

    def _heard(self, event: MembershipEvent) -> None:
        if event.change in (MembershipChange.LOST, MembershipChange.LEFT) and event.peer_id is not None:
            self._reasons[event.peer_id] = event.reason or "it left"
        if event.change is MembershipChange.EPOCH:
            self._look()

    def _look(self) -> None:
        """Takes notice of the present epoch."""
        communicator = self.communicator
        try:
            epoch = communicator.epoch
            if epoch == self._epoch:
                return
            members, rank = communicator.members, communicator.rank
        except PCCLError:  # evicted, or closed: calls say so themselves
            return
        self._epoch = epoch  # of before the members: if another came in between, it is looked at the next time
        if self.elastic:
            self._world = members, rank
        elif lost := tuple(member for member in self._first if member not in members):
            # The same ranks in another order are no loss: every call is refused, on all (see `Operations.pinned`).
            reasons = "; ".join(f"{peer}: {self._reasons.get(peer, 'it is gone')}" for peer in lost)
            text = (
                f"group {communicator.peer_group!r} has lost {', '.join(lost)} ({reasons}): the process group is over"
            )
            self._finish(PeerLostBackendError(text, peers=lost, reason=reasons))

    def _finish(self, error: BackendError) -> None:
        with self._lock:
            if self._end is not None:
                return
            self._end = error
        self.on_end(error)


def _ignore(error: BackendError) -> None:
    pass
