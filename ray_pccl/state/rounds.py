"""What a sync needs of its group: rounds in which all members meet, the members' supplies, and what it remembers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ray_pccl.control.messages import Failure
from ray_pccl.peer.requests import SHARED_STATE_TAG, Request
from ray_pccl.ring.header import Kind
from ray_pccl.ring.tensors import as_input, as_output
from ray_pccl.state import supplying
from ray_pccl.state.pieces import Piece
from ray_pccl.state.pulling import Puller
from ray_pccl.state.supplying import Supply
from ray_pccl.state.tensors import Bytes

if TYPE_CHECKING:
    from ray_pccl.peer.operations import Operations
    from ray_pccl.ring.plane import DataPlane


@dataclass(slots=True)
class Standing:
    """What a member remembers of the group's syncs."""

    known: int | None = None
    since: int = 0

    def note(self, revision: int) -> None:
        """A sync has committed."""
        if self.known is None:
            self.since = revision
        self.known = revision


class Rounds:
    """What the syncs of one membership have in common."""

    def __init__(self, operations: Operations, plane: DataPlane, peer_id: str) -> None:
        self._operations = operations
        self._plane = plane
        self.peer_id = peer_id
        self.standing = Standing()
        self.supply = Supply()
        plane.offer(supplying.SERVICE, self.supply.serve)

    def gather(self, mine: bytes, timeout: float | None, tag: int) -> dict[str, bytes]:
        """Everyone's bytes, by rank; as many on all members."""
        world = len(self._operations.members)
        sent = np.frombuffer(mine, np.uint8)
        theirs = np.empty(world * len(mine), np.uint8)
        is_reserved = tag == SHARED_STATE_TAG
        request = Request(
            Kind.ALL_GATHER, as_input(sent), as_output(theirs), tag=tag, reserved=is_reserved, signature=1
        )
        info = self._operations.run(request, timeout)
        rows = theirs.reshape(len(info.contributors), len(mine))
        return {peer: row.tobytes() for peer, row in zip(info.contributors, rows, strict=True)}

    def refuse(self, failure: Failure, timeout: float | None, tag: int) -> None:
        """Fails the round that the others are in, or come to, with this error on everyone."""
        is_reserved = tag == SHARED_STATE_TAG
        refusal = Request(Kind.BARRIER, None, None, tag=tag, reserved=is_reserved, refusal=failure)
        self._operations.run(refusal, timeout)

    @property
    def members(self) -> tuple[str, ...]:
        """Who is in the group now."""
        return self._operations.members

    @property
    def patience_s(self) -> float:
        """How long to wait if nothing else was said."""
        return self._operations.patience_s

    def puller(self, sync: bytes, pieces: Sequence[Piece], wanted: Bytes) -> Puller:
        """Pulls from members' supplies."""
        plane = self._plane
        return Puller(sync, pieces, wanted, lambda peer, patience: plane.call_on(supplying.SERVICE, peer, patience))
