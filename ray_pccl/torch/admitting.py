"""Keeping a group open: members that admit by themselves whoever comes.

A group's members admit newcomers in a vote of all of them, at a moment that suits their work. A group that is nothing
but a store has no work and no such moment, so each of its members votes as soon as it hears that somebody waits.
"""

from __future__ import annotations

import logging
import threading

from ray_pccl.errors import OperationTimeoutError, PCCLError, PeerEvictedError
from ray_pccl.peer.communicator import Communicator
from ray_pccl.types import MembershipChange, MembershipEvent

log = logging.getLogger("ray_pccl.torch")

VOTE_S = 10.0
"""A vote that not all have joined by then is held again: a member may not have heard of the newcomer."""
REJOIN_S = 5.0
"""The least that coming back may take, however short the caller's patience for a key is."""
_STIRRING = (MembershipChange.WAITING, MembershipChange.EPOCH, MembershipChange.MASTER_BACK)
"""When somebody may wait: one came; or came before we were in, or while there was no master to say so."""


class Doorman:
    """One member's part of it, in a thread of its own. The member makes no votes of its own meanwhile."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._stirred = threading.Event()
        self._over = False
        self._rejoining = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="ray_pccl-doorman", daemon=True)
        communicator.on_membership(self._heard)

    def start(self) -> None:
        """The communicator is connected: from now on newcomers are let in."""
        self._stirred.set()
        self._thread.start()

    def close(self) -> None:
        """Lets nobody in any more. A vote under way ends with the communicator."""
        self._over = True
        self._stirred.set()

    def rejoin(self, timeout_s: float) -> None:
        """Brings back a member that was taken for dead: as a new peer, which the others let in."""
        with self._rejoining:
            try:
                _ = self._communicator.epoch
            except PeerEvictedError:
                self._communicator.connect(max(timeout_s, REJOIN_S))

    def _heard(self, event: MembershipEvent) -> None:
        if event.change in _STIRRING:
            self._stirred.set()

    def _run(self) -> None:
        while True:
            self._stirred.wait()
            self._stirred.clear()
            if self._over:
                return
            try:
                while not self._over and self._communicator.num_waiting():
                    self._communicator.update_topology(VOTE_S)
            except OperationTimeoutError:
                self._stirred.set()
            except PCCLError as error:  # evicted, or no master: the event of coming back stirs us again
                log.debug("nobody can be admitted to group %r now: %s", self._communicator.peer_group, error)
