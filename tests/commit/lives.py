"""Lives, one a seed: run, counted, and told in full where an invariant broke."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from tests.commit.plan import Aim, random_plan
from tests.commit.world import Violation, World


def live(seed: int, aim: Aim | None = None, *, tell: bool = False) -> World:
    """One life. Raises `Violation`; any other exception is a violation, too."""
    rng = random.Random(seed)
    world = World(random_plan(rng, aim), rng, tell=tell)
    try:
        world.run()
    except Violation:
        raise
    except Exception as error:
        story = "".join(f"\n  {line}" for line in world.story or ())
        raise Violation(f"{type(error).__name__}: {error}{story}") from error
    return world


@dataclass
class Lived:
    """What a number of lives amounts to."""

    lives: int = 0
    traces: set[bytes] = field(default_factory=set)
    seen: Counter[str] = field(default_factory=Counter)
    """How often what happened: results, errors, faults, and the moments in which these came."""

    def add(self, world: World) -> None:
        self.lives += 1
        self.traces.add(blake2b(world.trace, digest_size=8).digest())
        self.seen["results"] += len(world.answers.results)
        self.seen.update(error for _, _, error in world.answers.errors)
        for moment, fault in world.struck:
            self.seen[moment] += 1
            self.seen[fault.name] += 1
        self.seen["recoveries"] += any(peer.epoch > 1 for peer in world.peers)


def explore(seeds: Iterable[int]) -> Lived:
    """Lives all of them. A life that breaks an invariant is lived again, to be told."""
    lived = Lived()
    for seed in seeds:
        try:
            lived.add(live(seed))
        except Violation:
            live(seed, tell=True)
            raise
    return lived


def hunt(seeds: Iterable[int], aim: Aim | None = None) -> int | None:
    """The first seed whose life breaks an invariant, if there is one."""
    for seed in seeds:
        try:
            live(seed, aim)
        except Violation:
            return seed
    return None
