"""A driven master whose members are on hosts of their own, and what it does in `optimize_topology()`."""

from __future__ import annotations

from collections.abc import Mapping

from master_actor.core.actions import Action, Append, Send, Solve, Solved
from ray_pccl.control.messages import Ask, Decide, Edge, Measured, Probe, Surveying, VoteFailed, VoteKind, VoteServed
from tests.core.driven import DrivenMaster

OPTIMIZE = VoteKind.OPTIMIZE_TOPOLOGY
RATE = 100.0


class Surveyed:
    """Peers `a`, `b`, ... on hosts `on-a`, `on-b`, ..., unless told otherwise."""

    def __init__(self, *peers: str, hosts: Mapping[str, str] | None = None, minimum: int | None = None) -> None:
        self.hosts = {peer: f"on-{peer}" for peer in peers} | dict(hosts or {})
        self.master = DrivenMaster()
        for peer in peers:
            self.master.join(peer, min_world_size=minimum or len(peers), host=self.hosts[peer], last_call_s=0.0)
        self.master.at(self.master.now)
        assert self.order == list(peers)

    @property
    def order(self) -> list[str]:
        return [member.peer_id for member in self.master.group().durable.members]

    @property
    def epoch(self) -> int:
        return self.master.group().durable.epoch

    def all_vote(self, count: int = 0, kind: VoteKind = OPTIMIZE, timeout_s: float = 100.0) -> list[Action]:
        """What the last vote leads to."""
        return [self.master.vote(peer, kind, count, timeout_s) for peer in self.master.group().living][-1]

    def report(
        self,
        dialler: str,
        probe: Probe,
        there: float | None = RATE,
        back: float | None = RATE,
    ) -> list[Action]:
        edges = (Edge(dialler, probe.other, there),) if probe.sends else ()
        edges += (Edge(probe.other, dialler, back),) if probe.receives else ()
        return self.master.say(dialler, Measured(edges, probe.survey))

    def measure_all(self, actions: list[Action], rates: Mapping[str, float | None] | None = None) -> list[Action]:
        """Answers every probe, round by round; `rates` by the two letters of an edge. What comes after the last."""
        while probes := probes_in(actions):
            actions = []
            for dialler, probe in probes.items():
                there = (rates or {}).get(dialler + probe.other, RATE)
                back = (rates or {}).get(probe.other + dialler, RATE)
                actions += self.report(dialler, probe, there, back)
        return actions

    def solve(self, question: Solve, order: str, *, bottleneck: float = 200.0, optimal: bool = True) -> list[Action]:
        """The solver finds a ring, told as letters."""
        before = "".join(self.master.group().living)
        places = tuple(before.index(peer) for peer in order)
        return self.master.handle(Solved("g", question.number, places, bottleneck, bottleneck * len(order), optimal))

    def answer_all(self, number: int | None = None) -> list[Action]:
        """All members answer the question of the round. What the last answer leads to."""
        inquiry = self.master.group().inquiry
        assert inquiry is not None
        asked = list(inquiry.deadlines)
        return [self.master.answer(peer, inquiry.question.round[1], epoch=self.epoch) for peer in asked][-1]

    def optimized(self, order: str, rates: Mapping[str, float | None] | None = None, **found: object) -> list[Action]:
        """A whole call, up to the new epoch."""
        count = self.master.group().ballot.counted(OPTIMIZE).served
        question = solve_in(self.measure_all(self.all_vote(count), rates))
        self.solve(question, order, **found)  # type: ignore[arg-type]
        return self.answer_all()


def probes_in(actions: list[Action]) -> dict[str, Probe]:
    """Who has to probe."""
    return {a.peer_id: a.message for a in actions if isinstance(a, Send) and isinstance(a.message, Probe)}


def pairs_in(actions: list[Action]) -> set[str]:
    """The pairs that are measured, as letters in order."""
    return {"".join(sorted((dialler, probe.other))) for dialler, probe in probes_in(actions).items()}


def solve_in(actions: list[Action]) -> Solve:
    (question,) = [action for action in actions if isinstance(action, Solve)]
    return question


def asks_in(actions: list[Action]) -> list[str]:
    return [a.peer_id for a in actions if isinstance(a, Send) and isinstance(a.message, Ask)]


def decides_in(actions: list[Action]) -> dict[str, Decide]:
    return {a.peer_id: a.message for a in actions if isinstance(a, Send) and isinstance(a.message, Decide)}


def failures_in(actions: list[Action]) -> dict[str, VoteFailed]:
    return {a.peer_id: a.message for a in actions if isinstance(a, Send) and isinstance(a.message, VoteFailed)}


def served_in(actions: list[Action]) -> dict[str, VoteServed]:
    return {a.peer_id: a.message for a in actions if isinstance(a, Send) and isinstance(a.message, VoteServed)}


def told_in(actions: list[Action]) -> list[Surveying]:
    return [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, Surveying)]


def records_in(actions: list[Action]) -> list[object]:
    return [action.record for action in actions if isinstance(action, Append)]
