"""What must hold: whoever ever returned from an operation, dead and evicted peers included, holds the same answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.commit.plan import Key, Operation

if TYPE_CHECKING:
    from tests.commit.peer import Call, Peer
    from tests.commit.world import World


class Answers:
    """All that callers were told, checked as they are told it and at the end."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.results: dict[Key, tuple[set[str], str]] = {}
        """Whose inputs are in the result of an operation, and who was the first to return it."""
        self.errors: list[tuple[Peer, Operation, str]] = []

    def returned(self, peer: Peer, call: Call) -> None:
        """A call returned a result."""
        if not peer.alive:
            return
        world, contributors = self._world, set(call.result)
        world.note(f"{peer.name} RETURNS {call.key} with {call.result}")
        what = f"{peer.name} returned {call.key} with the inputs of {call.result}"
        if len(contributors) != len(call.result):
            world.fail(f"{what}: one counts twice")
        if not contributors <= set(world.memories):
            world.fail(f"{what}: one was overwritten")
        if peer.name not in contributors:
            world.fail(f"{what}: its own is missing")
        if call.root and call.root not in contributors:
            world.fail(f"{what}: its root, {call.root}, was lost")
        if not call.operation.retry and contributors != set(call.entered_with):
            world.fail(f"{what}: it was not to be tried again, and began with {call.entered_with}")
        if len(contributors) < world.plan.minimum:
            world.fail(f"{what}: fewer than {world.plan.minimum}")
        known, first = self.results.setdefault(call.key, (contributors, peer.name))
        if known != contributors:
            world.fail(f"{what}, but {first} with those of {sorted(known)}")
        world.moment("returned", peer)

    def raised(self, peer: Peer, operation: Operation, error: str) -> None:
        """A call raised an error."""
        if peer.alive:
            self._world.note(f"{peer.name} RAISES {error} from {operation.tag, operation.number}")
            self.errors.append((peer, operation, error))

    def check(self) -> None:
        """At the end: what anyone ever returned has failed on no survivor."""
        members = {member.peer_id for member in self._world.last_epoch().members}
        for peer, operation, error in self.errors:
            known = self.results.get((operation.tag, operation.number))
            if known is not None and peer.alive and not peer.ended and peer.name in members:
                self._world.fail(
                    f"{operation.tag, operation.number} raised {error} on {peer.name}, which survived, "
                    f"but {known[1]} returned the inputs of {sorted(known[0])}"
                )
