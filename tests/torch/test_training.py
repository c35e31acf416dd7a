"""A training goes on while peers come and die: every step on all or on none, every sample once an epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ray_pccl.settings import Settings
from ray_pccl.testing import Faults, PeerGroup, PeerProcess, PeerStarter, eventually
from tests.torch.training_programs import (
    BATCH,
    Training,
    begin,
    finish,
    look,
    prepare,
    rejoins,
    set_goal,
    strike,
)

PATIENCE_S = 60.0


@pytest.fixture
def master_settings() -> Settings:
    """A death is seen by its signal; nobody is taken for dead because the machine is busy."""
    return Settings.from_env(None, heartbeat_timeout_s=4, stall_timeout_s=60)


@pytest.fixture
def crew(peer_group: PeerStarter) -> Callable[..., PeerGroup]:
    def make(size: int, join_timeout_s: float = 30.0, **more: Any) -> PeerGroup:
        settings = Settings.from_env(None, last_call_s=30.0, op_timeout_s=20.0, join_timeout_s=join_timeout_s)
        given = {"min_world_size": 1, "expected_world_size": size, "settings": settings} | more
        return peer_group(size, environment={"OMP_NUM_THREADS": "1"}, **given)

    return make


def start(peers: Sequence[PeerProcess], first_seed: int = 0) -> None:
    for started in [peer.run_async(begin, seed) for seed, peer in enumerate(peers, first_seed)]:
        started.result(PATIENCE_S)


def reach(peer: PeerProcess, more: int) -> None:
    """Waits until a peer has made so many steps more."""
    goal = peer.run(look)[1] + more
    eventually(lambda: peer.run(look)[1] >= goal, PATIENCE_S, f"step {goal}")


def end(peers: Sequence[PeerProcess]) -> list[Training]:
    """Has all stop after the same step; what they saw."""
    goal = peers[0].run(look)[1] + 100
    for peer in peers:
        peer.run(set_goal, goal)
    return [peer.run(finish) for peer in peers]


def check(trainings: Sequence[Training]) -> Counter[int]:
    """All saw the same steps with the same bits, one after another; each position was used once, by a contributor."""
    assert [training.error for training in trainings] == [""] * len(trainings)
    by_step: dict[int, set[tuple[Any, ...]]] = {}
    for training in trainings:
        numbers = [seen.info.step for seen in training.seen]
        if not training.rejoined_at:
            assert numbers == list(range(training.joined_at + 1, training.joined_at + 1 + len(numbers)))
        for seen in training.seen:
            about = (seen.info.contributors, seen.info.loss, seen.bits, str(seen.positions))
            by_step.setdefault(seen.info.step, set()).add(about)
    apart = [step for step, found in by_step.items() if len(found) > 1]
    assert not apart, f"members differ after step {apart[0]}: {by_step[apart[0]]}"
    longest = max(trainings, key=lambda training: len(training.seen))
    assert longest.joined_at == 0
    used = Counter(place for seen in longest.seen for places in seen.positions.values() for place in places)
    assert set(used.values()) == {1}, "a sample was used twice"
    assert all(tuple(seen.positions) == seen.info.contributors for seen in longest.seen)
    outstanding = BATCH * len(longest.seen[-1].info.contributors)
    assert len(set(range(max(used))) - set(used)) <= outstanding, "samples were lost"
    return used


def sizes(training: Training) -> list[int]:
    """How many contributed, step by step, without repetitions."""
    counts = [len(seen.info.contributors) for seen in training.seen]
    return [count for count, before in zip(counts, [0, *counts], strict=False) if count != before]


@pytest.mark.slow
def test_newcomers_are_healed_bit_for_bit_and_deaths_cost_no_step_and_no_sample(crew, faults: Faults) -> None:
    group = crew(4)
    start(group)
    reach(group[0], 3)
    (newcomer,) = group.add()
    newcomer.run(prepare)
    newcomer.joined.result(PATIENCE_S)
    newcomer.run(begin, 99)
    eventually(lambda: newcomer.run(look)[0] >= 3, PATIENCE_S, "the newcomer is in")
    reach(newcomer, 3)
    faults.kill_master()
    # A step has two reductions of gradients: every second one comes between two.
    for victim, point, nth in [(1, "training_met", 2), (2, "training_reducing", 4), (3, "training_committed", 2)]:
        group[victim].run(strike, point, nth)
        eventually(lambda victim=victim: not group[victim].alive, PATIENCE_S, "it dies")
        reach(group[0], 3)
    faults.cut(newcomer)  # it finds itself evicted, and joins again
    eventually(lambda: newcomer.run(rejoins) == 1, PATIENCE_S, "it is back")
    reach(newcomer, 3)
    survivor, healed = trainings = end([group[0], newcomer])

    used = check(trainings)
    before = next(seen for seen in survivor.seen if seen.info.step == healed.joined_at)
    assert healed.joined_bits == before.bits, "the newcomer was given another state than the others held"
    assert sizes(survivor) in ([4, 5, 4, 3, 2, 1, 2], [4, 5, 4, 3, 2]), "who was evicted may miss no step"
    assert max(seen.info.attempts for seen in survivor.seen) >= 2, "nobody died in a step"
    assert set(range(max(used) - 5 * BATCH)) <= set(used), "what the dead had was not handed out again"
    assert survivor.seen[-1].info.loss < 0.5 * survivor.seen[0].info.loss


@pytest.mark.slow
def test_below_its_minimum_a_group_waits_for_a_newcomer_and_then_gives_up(crew, faults: Faults) -> None:
    group = crew(2, min_world_size=2, join_timeout_s=8.0)
    (spare,) = group.add(connect=False)
    spare.run(prepare)
    start(group)
    reach(group[0], 5)
    faults.kill(group[1])
    spare.connect()
    spare.joined.result(PATIENCE_S)
    spare.run(begin, 99)
    reach(spare, 5)
    assert {len(peer.members) for peer in (group[0], spare)} == {2}
    faults.kill(spare)
    training = group[0].run(finish)
    assert training.error.startswith("TooFewPeersError: "), training.error
    training.error = ""
    check([training])
    assert sizes(training) == [2]
