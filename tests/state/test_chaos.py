"""Peers die at random points of random syncs: survivors agree, or all keep what they had; and the group goes on.

python -m pytest tests/state/test_chaos.py --durations=0 -k seed-3      the same course of events again
"""

from __future__ import annotations

import random
from concurrent.futures import Future

import pytest

from ray_pccl.ring.fault_points import STATE_NAMES
from ray_pccl.testing import PeerProcess, PeerProcessEndedError
from tests.state.conftest import OVER_BOTH, PATIENCE_S, Crew
from tests.state.programs import MIB, Content, Outcome, hold, strike, sync, touch

SYNCS = 6
FAILURES = {"NoUpToDatePeerError"}


def _ended(future: Future[Outcome]) -> Outcome | None:
    """What came of a sync; None if its peer died."""
    try:
        return future.result(PATIENCE_S)
    except PeerProcessEndedError:
        return None


def _provoke(peers: list[PeerProcess], chance: random.Random) -> None:
    """Some have gone apart, and one or two are to die, somewhere."""
    for peer in chance.sample(peers, chance.randint(0, len(peers) - 1)):
        peer.run(touch, "weights", chance.randrange(8 * MIB), chance.random())
    for peer in chance.sample(peers, min(len(peers) - 1, chance.choice([0, 1, 1, 2]))):
        peer.run(strike, chance.choice(STATE_NAMES), chance.randint(1, 3), "kill")


@pytest.mark.slow
@OVER_BOTH
@pytest.mark.parametrize("seed", range(2), ids=lambda seed: f"seed-{seed}")
def test_whoever_dies_survivors_agree_or_keep_what_they_had(crew, transport, seed) -> None:
    chance = random.Random(seed)
    group: Crew = crew(4)
    revision = 0
    for peer in group.peers:
        peer.run(hold, Content(seed=1, nbytes=33 * MIB))
    for number in range(SYNCS):
        living = [peer for peer in group.peers if peer.alive]
        _provoke(living, chance)
        outcomes = [_ended(future) for future in [peer.run_async(sync, "ENFORCE_POPULAR", 1) for peer in living]]
        ended = [outcome for outcome in outcomes if outcome is not None]
        story = f"seed {seed}, sync {number}: {outcomes}"
        assert ended, story
        errors = {outcome.error for outcome in ended}
        assert len(errors) == 1, story
        if errors == {""}:
            assert len({(outcome.after, outcome.revision) for outcome in ended}) == 1, story
            assert ended[0].revision > revision, story
            revision = ended[0].revision
        else:
            assert errors <= FAILURES and all(outcome.after == outcome.before for outcome in ended), story
        group.peers = [peer for peer in living if peer.alive]
        for peer in group.peers:
            peer.run(strike, "nowhere", 1, "")
        missing = 4 - len(group.peers)
        if missing:
            for peer in group.admit(missing):
                peer.run(hold, Content(seed=number + 50, nbytes=33 * MIB))
