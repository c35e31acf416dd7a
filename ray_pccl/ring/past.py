"""Forgetting: a peer keeps an operation's outcome until every member is known to be past it (R2).

Within one tag the next operation shows that. A program that uses ever new tags would have its ledger grow for ever: so
when it has grown, members tell each other what they have finished, and each forgets what all have.
"""

from __future__ import annotations

import struct

from ray_pccl.control.messages import OperationState
from ray_pccl.errors import ProtocolError
from ray_pccl.peer.ledger import Key, Ledger
from ray_pccl.ring.wire import CONTROL_BYTES

KEPT = 512
"""Up to so many finished operations nobody cares."""
_KEY = struct.Struct("<qq")
_MOST = CONTROL_BYTES // _KEY.size
_MOST_WAITING = 1 << 16


class Past:
    """What the other members of the epoch have said to be past. Lives in the mesh's thread."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._said: dict[Key, set[str]] = {}
        self._told: set[Key] = set()

    def move(self) -> None:
        """A new epoch: whoever is in it says it again."""
        self._said.clear()
        self._told.clear()

    def to_tell(self) -> bytes:
        """What this peer has finished and not told yet; empty if it is not worth the while."""
        finished = self._finished()
        self._told &= finished
        new = sorted(finished - self._told)[:_MOST]
        if len(finished) <= KEPT or len(new) < KEPT // 2:
            return b""
        self._told.update(new)
        return b"".join(_KEY.pack(*key) for key in new)

    def heard(self, peer_id: str, body: bytes, others: int) -> None:
        """Another member, one of so many, is past these. What it has not heard from us yet is not forgotten."""
        if len(body) % _KEY.size:
            raise ProtocolError("a list of operations that is cut off")
        for key in _KEY.iter_unpack(body):
            if len(self._said) < _MOST_WAITING or key in self._said:
                self._said.setdefault(key, set()).add(peer_id)
        for key in [key for key in self._said if self._ledger.is_past(key)]:
            del self._said[key]
        self.forget(others)

    def forget(self, others: int) -> None:
        """Forgets what this peer has told, and all others have."""
        for key in [key for key in self._told if len(self._said.get(key, ())) == others]:
            del self._said[key]
            self._told.discard(key)
            self._ledger.forget(key)

    def _finished(self) -> set[Key]:
        operations = self._ledger.snapshot()
        return {key for key, operation in operations.items() if operation.state is OperationState.COMMITTED}
