"""What one peer has found out about its network, as a pure machine: kept for a master that is restarted."""

from __future__ import annotations

from collections.abc import Collection

from ray_pccl.control.messages import Edge, Measured, Observed, Round

OBSERVE_EVERY_S = 5.0
EDGES_A_MESSAGE = 256
"""What a peer of a large group knows goes in several messages, so that others get their turn in between."""


class Network:
    """Measurements of this peer's own: what it probed, and what its links carried. Both are told again."""

    def __init__(self, peer_id: str) -> None:
        self._peer_id = peer_id
        self._probed: dict[tuple[str, str], tuple[float, float]] = {}
        self._observed: dict[str, tuple[float, float]] = {}
        """Since it last told."""
        self._last: dict[str, tuple[float, float]] = {}
        """What it told of each link."""
        self._told = 0.0
        self.surveyed = False
        """Whether a master has ever asked about this network. To others, what links carry would be told for nothing."""

    def probed(self, survey: Round, edges: tuple[Edge, ...], now: float) -> Measured:
        """A probe has ended: what to tell."""
        for edge in edges:
            if edge.rate:
                self._probed[edge.source, edge.target] = (edge.rate, now)
        return Measured(edges, survey)

    def again(self, now: float) -> list[Measured | Observed]:
        """All that was probed, for a master that may not know it, and what shows that some of it is true no more."""
        probed = [Edge(source, target, rate, now - at) for (source, target), (rate, at) in self._probed.items()]
        seen = [Edge(self._peer_id, target, rate, now - at) for target, (rate, at) in self._last.items()]
        return [*map(Measured, _parts(probed)), *map(Observed, _parts(seen))]

    def observed(self, target: str, rate: float, now: float) -> None:
        """The link to a peer was busy and carried so much.

        The best since the last word counts: a sample may have been disturbed, but a link that fell has no good ones.
        """
        if self.surveyed and (target not in self._observed or rate > self._observed[target][0]):
            self._observed[target] = (rate, now)

    def to_tell(self, now: float) -> Observed | None:
        """What links carried, if there is something and the last time was long enough ago."""
        if not self._observed or now - self._told < OBSERVE_EVERY_S:
            return None
        self._told = now
        self._last |= self._observed
        edges = [Edge(self._peer_id, target, rate, now - at) for target, (rate, at) in self._observed.items()]
        self._observed.clear()
        return Observed(tuple(edges))

    def keep(self, members: Collection[str]) -> None:
        """Others than these are gone, and so is what was known about them."""
        self._probed = {edge: known for edge, known in self._probed.items() if all(end in members for end in edge)}
        self._observed = {target: known for target, known in self._observed.items() if target in members}
        self._last = {target: known for target, known in self._last.items() if target in members}


def _parts(edges: list[Edge]) -> list[tuple[Edge, ...]]:
    return [tuple(edges[at : at + EDGES_A_MESSAGE]) for at in range(0, len(edges), EDGES_A_MESSAGE)]
