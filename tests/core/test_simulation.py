"""Hypothesis drives a whole world: joins, deaths, delays, reordered reports, partitions, restarts, two masters."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from master_actor.core.phases import TRANSITIONS
from tests.core.drivers import LIVES, Choose, formed
from tests.core.simulation import World

EXAMPLES = 1300
STEPS_EACH = 40
FIRED_AT_LEAST = 100
STEPS_AT_LEAST = 10_000

fired: Counter[tuple[object, object]] = Counter()
steps = Counter[str]()


class Worlds(RuleBasedStateMachine):
    """Every step is one that `drivers` knows; Hypothesis chooses which, to whom, and shrinks what fails."""

    @initialize(life=st.sampled_from([*sorted(LIVES), "endings", "endings"]), data=st.data())
    def begin(self, life: str, data: st.DataObject) -> None:
        self.world = World()
        self.weighted = [step for step, weight in LIVES[life].items() for _ in range(weight)]
        formed(self.world, self._choose(data))

    @staticmethod
    def _choose(data: st.DataObject) -> Choose:
        return lambda options: data.draw(st.sampled_from(options))

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(self.weighted))
        step(self.world, self._choose(data))
        steps["taken"] += 1

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()
            fired.update(self.world.transitions())


@pytest.mark.timeout(600)
def test_no_life_of_a_world_breaks_an_invariant_and_every_transition_was_seen() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Worlds,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS_EACH,
            deadline=None,
            derandomize=True,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert steps["taken"] >= STEPS_AT_LEAST
    rare = {f"{a.value} -> {b.value}": fired[a, b] for a, b in TRANSITIONS if fired[a, b] < FIRED_AT_LEAST}
    assert not rare, f"transitions fired fewer than {FIRED_AT_LEAST} times: {rare}"
