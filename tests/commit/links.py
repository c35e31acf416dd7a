"""An operation over links (R0): inputs to all, *prepared* to all, commit once *prepared* was heard from all.

A step is a generator's way from one `yield` to the next: True if it did something, False if it only waits. A peer that
freezes is left where it is; the decision then ends the attempt, and the operation with it, or begins another attempt.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ray_pccl.control.messages import Failure
from ray_pccl.peer.ledger import FrozenError

if TYPE_CHECKING:
    from tests.commit.peer import Call, Peer

INPUT, PREPARED, REFUSED = "input", "prepared", "refused"
TIRED = Failure("OperationTimeoutError", "it waited too long")


def attempt(peer: Peer, call: Call) -> Iterator[bool]:
    """One try at the operation, in the peer's present epoch."""
    key, members = call.key, peer.members
    peer.tell(INPUT, key)
    yield True
    while not heard_from_all(peer, key, INPUT, members):
        if peer.has_failed(key):
            return
        if call.is_tired() and refuse(peer, call):
            return
        yield False
    if peer.has_failed(key):
        return
    try:
        peer.ledger.prepare(key, peer.world.now)
    except FrozenError:
        yield from frozen()
    call.result = [peer.name, *peer.heard.get((key, INPUT), ())]
    peer.world.moment("prepared", peer)
    peer.tell(PREPARED, key)
    yield True
    while not heard_from_all(peer, key, PREPARED, members):
        if peer.has_failed(key):
            return
        yield False
    yield from commit(peer, call)


def heard_from_all(peer: Peer, key: tuple[int, int], what: str, members: tuple[str, ...]) -> bool:
    """Whether this was heard from every other member of the epoch."""
    return len(peer.heard.get((key, what), ())) >= len(members) - 1


def commit(peer: Peer, call: Call) -> Iterator[bool]:
    """The last step: from here on the caller may have its result."""
    try:
        peer.ledger.commit(call.key, peer.world.now)
    except FrozenError:
        yield from frozen()
    peer.world.moment("committed", peer)


def refuse(peer: Peer, call: Call) -> bool:
    """A peer that is not prepared fails the operation alone, and tells the others (R3)."""
    try:
        peer.ledger.fail(call.key, TIRED, peer.world.now)
    except FrozenError:
        return False
    peer.world.moment("refused", peer)
    peer.tell(REFUSED, call.key)
    return True


def frozen() -> Iterator[bool]:
    """Nothing moves until the decision, which ends the attempt."""
    while True:
        yield False
