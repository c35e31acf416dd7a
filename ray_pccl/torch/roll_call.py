"""Where everyone is: a small all-gather with which each step of a training begins.

It agrees on who takes part with what, and costs about as much as an empty all-reduce. All survivors see the same table
or none does, so all decide alike on what comes next, without a vote.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import astuple, dataclass

import numpy as np

from ray_pccl.errors import CollectiveMismatchError, PCCLError, PeerLostError, TooFewPeersError, WorldChangedError
from ray_pccl.peer.communicator import Communicator
from ray_pccl.types import MembershipChange, MembershipEvent

MAX_MISMATCHES = 8
"""How often a newcomer that was let in amid a step may meet the others' reduction with its roll call."""


@dataclass(frozen=True, slots=True)
class Row:
    """What a member tells the others."""

    step: int
    """How many steps have committed, as far as it knows."""
    is_ready: bool
    """It holds the group's state. A newcomer does not, before it was healed."""
    is_stepping: bool = False
    """It has gradients for the next step. Else it only wants to know that all are ready."""
    sees_waiting: bool = False
    """Someone waits to be let in."""
    pattern: int = 0
    """A hash of which parameters have gradients; of DiLoCo's arguments."""
    weight: float = 0.0
    """How much its gradients count."""
    loss: float = 0.0
    """Its loss."""


_ROW = np.dtype("i8, ?, ?, ?, u8, f8, f8")
Table = dict[str, Row]
"""Rows by `peer_id`, in rank order."""


class RetryError(Exception):
    """Someone died, or came, in between: begin again with a roll call. All members are told alike."""


class RollCall:
    """The roll calls of one communicator, and what it hears of peers that wait."""

    def __init__(self, communicator: Communicator, tag: int) -> None:
        self.communicator = communicator
        self.tag = tag
        self.sees_waiting = True  # who came before we listened
        self._epoch = -1
        self._mismatches = 0
        mine = weakref.ref(self)

        def note(event: MembershipEvent) -> None:
            found = mine()
            if found is not None:
                found._note(event.change)

        communicator.on_membership(note)

    def _note(self, change: MembershipChange) -> None:
        """In a thread of its own, so it may ask."""
        if change in (MembershipChange.WAITING, MembershipChange.MASTER_BACK):
            self.sees_waiting = True  # a master that was restarted does not tell again who waits
        elif change in (MembershipChange.LOST, MembershipChange.LEFT):
            # Of a group that was full, someone may have waited for this place, and was told of long ago.
            with contextlib.suppress(PCCLError):
                self.sees_waiting = self.communicator.num_waiting() > 0 or self.sees_waiting

    def take(self, row: Row) -> Table:
        """Everyone's rows. Blocks until all members have called it; `RetryError` if that has to begin again."""
        comm = self.communicator
        comm.await_minimum()
        epoch = comm.epoch
        sent = np.array([astuple(row)], _ROW)
        theirs = np.empty(comm.world_size, _ROW)
        with self.retrying(newcomer=not row.is_ready):
            info = comm.all_gather(sent.view(np.uint8), theirs.view(np.uint8), tag=self.tag)
        # Only now: until all have met, what a member that is late meets us with is of the roll call before.
        self._epoch, self._mismatches = epoch, 0
        rows = [Row(*values) for values in theirs.tolist()]
        return dict(zip(info.contributors, rows, strict=True))

    def retrying(self, *, newcomer: bool = False) -> _Retrying:
        """A context in which the loss of a peer, or the arrival of one, is a `RetryError`."""
        return _Retrying(self, newcomer)

    def is_of_an_arrival(self, *, newcomer: bool) -> bool:
        """Whether a mismatch may come of a peer that was let in since the roll call began, and not of a mistake."""
        self._mismatches += 1
        return self._mismatches <= MAX_MISMATCHES and (newcomer or self.communicator.epoch != self._epoch)

    def admit(self) -> None:
        """Lets in who waits; all members call it."""
        self.sees_waiting = False
        self.communicator.update_topology()


class _Retrying:
    def __init__(self, roll_call: RollCall, newcomer: bool) -> None:
        self._roll_call = roll_call
        self._newcomer = newcomer

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        match error:
            case PeerLostError() | WorldChangedError() | TooFewPeersError():
                raise RetryError from error
            case CollectiveMismatchError():
                if self._roll_call.is_of_an_arrival(newcomer=self._newcomer):
                    raise RetryError from error
