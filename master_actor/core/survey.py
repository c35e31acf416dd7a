"""The measuring of what is not known of the network: pairs of hosts, in rounds in which no host is busy twice."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ray_pccl.control.messages import Probe, Round
from ray_pccl.types import Member

Pair = tuple[str, str]
"""Two hosts, in the order in which they came."""
LOOK_AHEAD = 8
"""How many pairs for each host a round passes over at most, to find others whose hosts are free."""


@dataclass(frozen=True, slots=True)
class _Running:
    dialler: str
    target: str
    edges: int
    deadline: float


class Survey:
    """One survey, from its first round to its last. A pair is tried once, and again only if a peer of it was lost."""

    def __init__(self, number: Round, lacking: Mapping[str, Sequence[str]], lacks: Callable[[str, str], bool]) -> None:
        """Of all hosts, `lacking` has the edges that are unknown now, by source; `lacks` says what is unknown later."""
        self.number = number
        self._lacks = lacks
        self._waiting = deque(tournament(lacking))
        self._running: dict[Pair, _Running] = {}
        self._pair_of: dict[tuple[str, str], Pair] = {}
        """What runs, by who dials whom."""
        self.to_probe = sum(edges for _, edges in self._waiting)
        self.probed = 0
        """How many directed edges are done with, of `to_probe`."""

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to measure."""
        return not self._waiting and not self._running

    @property
    def is_between_rounds(self) -> bool:
        """Whether the next round may begin."""
        return not self._running

    def next_round(self, members: Iterable[Member], deadline: float) -> list[tuple[str, Probe]]:
        """Who has to probe whom now. Pairs whose figures came from elsewhere meanwhile, or whose hosts are gone, go."""
        speakers: dict[str, Member] = {}
        for member in members:
            speakers.setdefault(member.host, member)
        busy: set[str] = set()
        orders: list[tuple[str, Probe]] = []
        later: list[tuple[Pair, int]] = []
        # With some edges known, rounds have gaps that only pairs far behind could fill, if any: not worth the search.
        while self._waiting and len(busy) + 1 < len(speakers) and len(later) < LOOK_AHEAD * len(speakers):
            pair, edges = self._waiting.popleft()
            if not self._edges(pair) or not all(host in speakers for host in pair):
                self.probed += edges
            elif busy.isdisjoint(pair):
                busy.update(pair)
                orders.append(self._order(pair, edges, speakers, deadline))
            else:
                later.append((pair, edges))
        self._waiting.extendleft(reversed(later))
        if not orders:  # nobody is left to measure anything with
            self._waiting.clear()
        return orders

    def _order(self, pair: Pair, edges: int, speakers: dict[str, Member], deadline: float) -> tuple[str, Probe]:
        target, dialler = sorted((speakers[host] for host in pair), key=lambda member: member.peer_id)
        self._pair_of[dialler.peer_id, target.peer_id] = pair
        self._running[pair] = _Running(dialler.peer_id, target.peer_id, edges, deadline)
        sends, receives = self._lacks(dialler.host, target.host), self._lacks(target.host, dialler.host)
        return dialler.peer_id, Probe(self.number, target.peer_id, target.address, sends, receives)

    def reported(self, dialler: str, target: str) -> None:
        """A pair is done with."""
        if (pair := self._pair_of.get((dialler, target))) is not None:
            self._done(pair)

    def end_known(self) -> None:
        """A report that was lost with its connection is told again, of no survey: its pair is done with, too."""
        for pair in [pair for pair in self._running if not self._edges(pair)]:
            self._done(pair)

    def lost(self, peer_id: str) -> None:
        """A peer is gone: its pair is not waited for, and tried again where its host has another peer."""
        for pair, running in list(self._running.items()):
            if peer_id in (running.dialler, running.target):
                self._waiting.append((pair, self._ended(pair)))

    def give_up_late(self, now: float) -> None:
        """What was not reported by its deadline stays unknown."""
        for pair in [pair for pair, running in self._running.items() if now >= running.deadline]:
            self._done(pair)

    @property
    def deadlines(self) -> list[float]:
        """When each pair that is being measured is given up."""
        return [running.deadline for running in self._running.values()]

    def _done(self, pair: Pair) -> None:
        self.probed += self._ended(pair)

    def _ended(self, pair: Pair) -> int:
        """A pair does not run any more. Returns how many edges it was about."""
        running = self._running.pop(pair)
        del self._pair_of[running.dialler, running.target]
        return running.edges

    def _edges(self, pair: Pair) -> int:
        near, far = pair
        return int(self._lacks(near, far)) + int(self._lacks(far, near))


def tournament(lacking: Mapping[str, Sequence[str]]) -> list[tuple[Pair, int]]:
    """All pairs of which an edge is lacking, and how many are, in the order of a round-robin tournament of their hosts.

    Taken greedily, they make the fewest rounds, if all is lacking.
    """
    involved = {target for targets in lacking.values() for target in targets}
    hosts = [host for host, targets in lacking.items() if targets or host in involved]
    place = {host: number for number, host in enumerate(hosts)}
    missing = {host: set(lacking[host]) for host in hosts}
    cycle = len(hosts) - 1 + len(hosts) % 2
    rounds: list[list[tuple[Pair, int]]] = [[] for _ in range(cycle)]
    for near, source in enumerate(hosts):
        for target in lacking[source]:
            far = place[target]
            if near < far:  # those meet whose places add up to the same, and who would meet itself meets the last
                at = 2 * near if far == cycle else near + far
                rounds[at % cycle].append(((source, target), 2 if source in missing[target] else 1))
            elif source not in missing[target]:
                at = 2 * far if near == cycle else near + far
                rounds[at % cycle].append(((target, source), 1))
    return [pair for pairs in rounds for pair in pairs]
