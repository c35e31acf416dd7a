"""How a group's ring gets into its best order: survey, solve, and what is found later in the background.

It knows the network and the search; the votes, and the round that puts an order into force, are the group's.
`docs/design/topology.md` says who may die between which lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum

from master_actor.core.actions import Action, Send, Solve, Solved
from master_actor.core.bandwidth import Bandwidth
from master_actor.core.matrix import matrix, worth_of
from master_actor.core.ring import Edge as Link
from master_actor.core.survey import Survey
from ray_pccl.control.messages import Edge, Failure, Measured, Observed, Round, Surveying
from ray_pccl.settings import Settings
from ray_pccl.types import Member

BUDGET_S = 1.0
"""What the search may take for each hundred members, while all wait for it."""
LONGEST_BUDGET_S = 10.0
PATIENCE_IN_BACKGROUND = 10
"""How many times longer it may take when nobody waits."""
WORTHWHILE = 1.02
"""An order has to be better than the present one by this factor, in its slowest edge or in the sum of all."""
SOLVER_PATIENCE_S = 30.0
"""How much longer than its budget a solver may take, to start a process for instance."""
PROBE_PATIENCE_S = 9.0
"""How much longer than its data a probe may take: it dials twice, and its partner may hold its interpreter."""
QUIET_S = 1.0
"""How much longer than its data a probe takes as a rule."""
MOST_RATE = 1e15
"""Bytes per second. Whoever tells of more is wrong, and sums and 32-bit floats are to stay finite."""
EDGES_NAMED = 6
EDGES_TOLD = 1000
"""Where a group falls apart, a quarter of all its edges may be in the way: more than a frame can carry."""


class Stage(Enum):
    """How far `optimize_topology()` is."""

    PROBING = "probing"
    SOLVING = "solving"
    LINKING = "linking"


@dataclass(frozen=True, slots=True)
class _Search:
    """A question to the solver: whom it is about, and how long an answer is waited for."""

    number: int
    members: tuple[str, ...]
    deadline: float


@dataclass(frozen=True, slots=True)
class Ring:
    """An order of members, and what it is worth."""

    order: tuple[str, ...]
    worth: tuple[float, float]
    optimal: bool


class Optimizer:
    """What one group knows of its network, and makes of it. `members` are those that live, in rank order."""

    def __init__(
        self,
        group: str,
        settings: Settings,
        *,
        emit: Callable[[Action], None],
        next_round: Callable[[], Round],
        members: Callable[[], list[Member]],
        avoid: Callable[[], Collection[Link]],
        quiet_at: float = 0.0,
    ) -> None:
        self._group = group
        self._settings = settings
        self._emit = emit
        self._next_round = next_round
        self._members = members
        self._avoid = avoid
        self.bandwidth = Bandwidth()
        self.survey: Survey | None = None
        self._surveyed = False
        self._quiet_at = quiet_at
        """When probes of an earlier survey, for which nobody waits, must have ended: two would share the way."""
        self._progress = (0, 0)
        self._word: Surveying | None = None
        self._searches = 0
        self._search: _Search | None = None
        self._found: Ring | Failure | None = None
        self._in_background: _Search | None = None
        self._applied: Ring | None = None
        self.better: tuple[str, ...] | None = None
        """An order that was found in the background, for the next `update_topology()`."""

    # ------------------------------------------------------------------------------------------- the foreground

    @property
    def is_busy(self) -> bool:
        """Whether something is under way that has an end of its own."""
        return self.survey is not None or self._search is not None

    def advance(self, now: float) -> Ring | Failure | None:
        """All members are in the call: takes the next step, and returns the outcome once there is one."""
        if not self._surveyed:
            self._surveyed = True
            hosts = list(dict.fromkeys(member.host for member in self._members()))
            self.survey = Survey(self._next_round(), self.bandwidth.lacking(hosts), self.bandwidth.lacks)
            if now < self._quiet_at and not self.survey.is_over:
                self._tell(Stage.PROBING, self._quiet_at - now + self._patience_s)
            self._go_on(now)
        if self.survey is not None:
            return None
        here = tuple(member.peer_id for member in self._members())
        if len({member.host for member in self._members()}) == 1:
            return Ring(here, (math.inf, 0.0), optimal=True)
        if self._found is not None:
            found, self._found = self._found, None
            if isinstance(found, Failure):
                return found
            if set(found.order) == set(here):
                return self._present(found) or found
        if self._search is None or set(self._search.members) != set(here):
            self._in_background = None  # a new question ends what the solver still does for an old one
            self._search = self._ask_solver(self._budget_s, now)
            self._tell(Stage.SOLVING, self._budget_s + SOLVER_PATIENCE_S)
        return None

    @property
    def _budget_s(self) -> float:
        return min(LONGEST_BUDGET_S, BUDGET_S * max(1.0, len(self._members()) / 100))

    @property
    def _patience_s(self) -> float:
        """How long a round of probes may take."""
        return 2 * self._settings.probe_ms / 1000 + PROBE_PATIENCE_S

    def reset(self) -> None:
        """Nobody waits for an outcome any more. What was measured is kept."""
        if self.survey is not None:
            ends = [deadline - PROBE_PATIENCE_S + QUIET_S for deadline in self.survey.deadlines]
            self._quiet_at = max([self._quiet_at, *ends])
        self.survey = self._search = self._found = None
        self._surveyed, self._progress = False, (0, 0)

    def tell_again(self, peer_id: str) -> None:
        """A member was away, and may wait for less than what is under way takes."""
        if self._word is not None and self.is_busy:
            self._emit(Send(peer_id, self._word))

    def linking(self, within_s: float) -> None:
        """An order was found, and a round begins that puts it into force."""
        self._tell(Stage.LINKING, within_s)

    def applied(self, ring: Ring, now: float) -> None:
        """The ring is in this order now; a better one is looked for behind everyone's back, if there may be one."""
        self.reset()
        self.better, self._applied = None, ring
        self._in_background = None if ring.optimal else self._ask_solver(PATIENCE_IN_BACKGROUND * self._budget_s, now)

    def solved(self, answer: Solved) -> bool:
        """The solver has answered. Returns whether someone may be waiting for it."""
        if self._search is not None and answer.number == self._search.number:
            self._found = self._outcome(answer, self._search.members)
            self._search = None
            return True
        search = self._in_background
        if search is not None and answer.number == search.number:
            self._in_background = None
            ring = self._outcome(answer, search.members)
            if isinstance(ring, Ring) and self._applied is not None and _is_better(ring.worth, self._applied.worth):
                self.better, self._applied = ring.order, ring
        return False

    def better_for(self, living: Collection[str]) -> tuple[str, ...] | None:
        """The better order, if it is about exactly these members."""
        better = self.better
        return better if better is not None and set(better) == set(living) else None

    def tick(self, now: float) -> bool:
        """Ends waits whose time is up. Returns whether that brings someone on."""
        before = self.survey
        if self.survey is not None:
            self.survey.give_up_late(now)
            self._go_on(now)
        if self._search is not None and now >= self._search.deadline:
            self._search = None
            self._found = self._broken("the search for the best ring did not end in time")
            return True
        return before is not None and self.survey is None

    # ------------------------------------------------------------------------------------------ what is measured

    def measured(self, peer_id: str, message: Measured, now: float) -> bool:
        """A peer has measured edges. Returns whether that ends the survey."""
        self._take(peer_id, message.edges, now, self.bandwidth.probed)
        if self.survey is None:
            return False
        for edge in message.edges if message.survey == self.survey.number else ():
            self.survey.reported(peer_id, edge.target if edge.source == peer_id else edge.source)
        if message.survey != self.survey.number:
            self.survey.end_known()
        self._go_on(now)
        return self.survey is None

    def observed(self, peer_id: str, message: Observed, now: float) -> None:
        """A peer tells what its links carried. What was found in the background was found with what is wrong now."""
        if self._take(peer_id, message.edges, now, self.bandwidth.observed):
            self.better = self._in_background = None

    def lost(self, gone: Member, now: float) -> None:
        """A member is gone, and a round will follow: nobody need be told here that this may have ended the survey."""
        self.better = self._found = self._search = None  # all about members of which one is gone
        if any(member.host == gone.host for member in self._members()):
            self.bandwidth.forget_unreachable(gone.host)
        else:
            self.bandwidth.forget(gone.host)
        if self.survey is not None:
            self.survey.lost(gone.peer_id)
            self._go_on(now)

    def forget(self) -> None:
        """The group is empty: nothing is known of the next one."""
        self.reset()
        self.bandwidth = Bandwidth()
        self.better = self._applied = self._in_background = None

    def _take(
        self, peer_id: str, edges: tuple[Edge, ...], now: float, put: Callable[[str, str, float, float], bool | None]
    ) -> bool:
        """Hands over what makes sense. Returns whether an edge has fallen."""
        fell = False
        host_of = {member.peer_id: member.host for member in self._members()}
        for edge in edges:
            ends = (edge.source, edge.target)
            sound = edge.rate is not None and 0 <= edge.rate < math.inf and 0 <= edge.age_s < math.inf
            if sound and edge.rate is not None and peer_id in ends and all(end in host_of for end in ends):
                rate = min(edge.rate, MOST_RATE)
                fell |= bool(put(host_of[edge.source], host_of[edge.target], rate, now - edge.age_s))
        return fell

    def _go_on(self, now: float) -> None:
        """Begins the next round of the survey, if this one is over."""
        survey = self.survey
        if survey is None or not survey.is_between_rounds or (now < self._quiet_at and not survey.is_over):
            return
        orders = survey.next_round(self._members(), now + self._patience_s)
        if survey.to_probe:
            self._tell(Stage.PROBING, self._patience_s)
        for dialler, probe in orders:
            self._emit(Send(dialler, probe))
        if survey.is_over:
            self.survey = None

    def _tell(self, stage: Stage, within_s: float) -> None:
        if self.survey is not None:
            self._progress = (self.survey.probed, self.survey.to_probe)
        # Twice: the master's own clock is the one that counts, and stands still while the master is held up.
        self._word = Surveying(stage.value, *self._progress, 2 * within_s)
        for member in self._members():
            self._emit(Send(member.peer_id, self._word))

    # --------------------------------------------------------------------------------------------- the solver

    def _ask_solver(self, budget_s: float, now: float) -> _Search:
        self._searches += 1
        members = self._members()
        hosts, rates = matrix(members, self.bandwidth, self._avoid())
        self._emit(Solve(self._group, self._searches, rates, hosts, budget_s))
        ids = tuple(member.peer_id for member in members)
        return _Search(self._searches, ids, now + budget_s + SOLVER_PATIENCE_S)

    def _present(self, found: Ring) -> Ring | None:
        """The ring as it is, if what was found is not worth a new epoch: figures are never exact."""
        members = self._members()
        worth = worth_of(members, self.bandwidth, self._avoid())
        if worth is None or _is_better(found.worth, worth):
            return None
        return Ring(tuple(member.peer_id for member in members), worth, found.optimal)

    def _outcome(self, answer: Solved, members: tuple[str, ...]) -> Ring | Failure:
        if answer.error:
            return self._broken(answer.error)
        if answer.edges:
            edges = tuple((members[source], members[target]) for source, target in answer.edges)
            named = ", ".join(f"{source} -> {target}" for source, target in edges[:EDGES_NAMED])
            more = f" and {len(edges) - EDGES_NAMED} more" if len(edges) > EDGES_NAMED else ""
            text = (
                f"no ring of group {self._group!r} does without edges that can't connect: it needs one of "
                f"{named}{more}. Let these peers reach each other, or take one of them out of the group"
            )
            return Failure("NoRingError", text, {"edges": edges[:EDGES_TOLD]})
        return Ring(tuple(members[place] for place in answer.order), (answer.bottleneck, answer.total), answer.optimal)

    def _broken(self, how: str) -> Failure:
        return Failure("PCCLError", f"the ring of group {self._group!r} was not ordered, and stays as it was: {how}")


def _is_better(new: tuple[float, float], old: tuple[float, float]) -> bool:
    """Whether a ring is worth a new epoch: its slowest edge is, or its sum with a slowest edge that is no worse."""
    return new[0] > WORTHWHILE * old[0] or (new[0] >= old[0] and new[1] > WORTHWHILE * old[1])
