"""What one life is made of: the peers, the program that all of them run, and where the knife goes in.

Everything follows from a seed. A *knife* is a moment (the second answer, the first push after a journal write, ...) and
what happens right there. That reaches the rare places, as between two deliveries of a decision, far more often than
faults at random times do; the moment `step` stands for those.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

Key = tuple[int, int]
Knives = dict[tuple[str, int], "Fault"]
Aim = Callable[[random.Random, int], tuple[tuple["Operation", ...], Knives]]


class Kind(Enum):
    """How an operation moves its data."""

    LINKS = "links"
    """Inputs and *prepared* are messages (R0)."""
    PUBLISHED = "published"
    """Inputs lie in shared memory, and *published* serves as *prepared* (R8)."""


class Fault(Enum):
    """What can happen to anyone at any moment."""

    CRASH = "a peer dies"
    CRASH_MASTER = "the master dies"
    SUSPECT = "the master evicts a peer that lives"
    BREAK_LINK = "two peers lose their link"
    STOP = "a peer does nothing for a while (SIGSTOP)"
    ZOMBIE = "a peer is stopped, evicted, and wakes up later"
    LEASE = "a peer has not heard the master for too long (R7)"
    TIME = "the master waits no longer for who has not answered, or not come back"


PEER_MOMENTS = (
    *("entered", "prepared", "committed", "returned", "closed"),
    *("answered", "decided", "recomputing") * 2,
    *("writing", "published", "tired", "withdrawn", *("refused",) * 3),
)
MASTER_MOMENTS = ("journalling", "journalled", "pushed", "pushed")
PEER_FAULTS = (
    *(Fault.CRASH,) * 5,
    *(Fault.SUSPECT, Fault.ZOMBIE, Fault.STOP) * 2,
    *(Fault.BREAK_LINK, Fault.CRASH_MASTER, Fault.LEASE),
)
MASTER_FAULTS = (*(Fault.CRASH_MASTER,) * 4, Fault.CRASH, Fault.SUSPECT, Fault.TIME)
ANY_FAULTS = (*PEER_FAULTS, Fault.CRASH_MASTER, Fault.BREAK_LINK, Fault.TIME)
STEPS_EACH = 14
AIMED = 0.3
"""How many of the lives are aimed at something."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of the program. `number` is its place among the calls of its tag."""

    tag: int
    number: int
    kind: Kind
    retry: bool = True
    root: int | None = None
    """The rank of its root, in the epoch in which it is called."""
    impatient: frozenset[int] = frozenset()
    """Who may get tired of waiting in it, and refuse it alone."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A life."""

    peers: int
    minimum: int
    operations: tuple[Operation, ...]
    knives: Knives
    speeds: tuple[tuple[int, int], ...]
    """How often the data plane and the control thread of each peer get their turn."""
    impatience: float
    """How likely one that may get tired of waiting does so, each time that it looks."""


def random_plan(rng: random.Random, aim: Aim | None = None) -> Plan:
    """A life of 2 to 5 peers with 1 to 3 operations over 1 or 2 tags, and a few faults."""
    peers = rng.choice((2, 3, 3, 3, 4, 5))
    minimum = rng.choice((1, 1, 1, 2))
    speeds = tuple((rng.choice((1, 5, 25)), rng.choice((1, 2, 4))) for _ in range(peers))
    if aim is None and rng.random() < AIMED:
        aim = rng.choice(AIMS)
    operations, knives = _anything(rng, peers) if aim is None else aim(rng, peers)
    for _ in range(rng.choice((0, 1, 1, 2)) if aim else rng.choice((1, 2, 2, 3, 4))):
        knives.update(_knife(rng, STEPS_EACH * peers * len(operations)))
    return Plan(peers, minimum, operations, knives, speeds, rng.choice((0.02, 0.1, 0.5)))


def _anything(rng: random.Random, peers: int) -> tuple[tuple[Operation, ...], Knives]:
    kinds = rng.choice(((Kind.LINKS,), (Kind.PUBLISHED,), (Kind.PUBLISHED,), tuple(Kind)))
    tags = rng.choice((1, 1, 2))
    numbers = [0] * tags
    operations = []
    for _ in range(rng.choice((1, 2, 2, 3)) if peers < 5 else rng.choice((1, 1, 2))):
        tag = rng.randrange(tags)
        retry, root, impatient = True, None, frozenset[int]()
        match rng.randrange(8):
            case 0:
                retry = False
            case 1:
                root = rng.randrange(peers)
            case 2 | 3:
                impatient = frozenset(rng.sample(range(peers), rng.choice((1, 2))))
        operations.append(Operation(tag, numbers[tag], rng.choice(kinds), retry, root, impatient))
        numbers[tag] += 1
    return tuple(operations), {}


def _knife(rng: random.Random, steps: int) -> Knives:
    match rng.randrange(6):
        case 0 | 1 | 2:
            return {("step", rng.randrange(1, steps)): rng.choice(ANY_FAULTS)}
        case 3 | 4:
            return {(rng.choice(PEER_MOMENTS), rng.choice((1, 1, 2, 2, 3, 4))): rng.choice(PEER_FAULTS)}
        case _:
            return {(rng.choice(MASTER_MOMENTS), rng.choice((1, 1, 2, 2, 3, 4, 5))): rng.choice(MASTER_FAULTS)}


# ----------------------------------------------------------------------- lives that are aimed at what is rare otherwise


def a_reader_is_evicted(rng: random.Random, peers: int) -> tuple[tuple[Operation, ...], Knives]:
    """While a peer recomputes a decided commit, the others go on without it, and come back to the same slots."""
    operations = tuple(Operation(0, number, Kind.PUBLISHED) for number in range(3))
    decided = {("returned", rng.choice((1, 2))): rng.choice((Fault.CRASH, Fault.SUSPECT, Fault.BREAK_LINK))}
    evicted = {("recomputing", rng.choice((1, 2, 3))): rng.choice((Fault.ZOMBIE, Fault.STOP))}
    in_mid_write = {("writing", rng.randrange(2 * peers, 3 * peers)): Fault.CRASH}
    return operations, decided | evicted | rng.choice(({}, in_mid_write))


def one_gives_up(rng: random.Random, peers: int) -> tuple[tuple[Operation, ...], Knives]:
    """Peers give an operation up in the moment in which another commits it, and dies."""
    tired = frozenset(rng.sample(range(peers), rng.choice((1, peers - 1))))
    returned = {("returned", 1): rng.choice((Fault.CRASH, Fault.CRASH, Fault.SUSPECT, Fault.BREAK_LINK))}
    withdrawn = {("withdrawn", rng.choice((1, 2))): rng.choice((Fault.STOP, Fault.ZOMBIE, Fault.LEASE, Fault.SUSPECT))}
    two_at_once = {("tired", 1): Fault.STOP, ("tired", 2): Fault.STOP}
    return (Operation(0, 0, Kind.PUBLISHED, impatient=tired),), returned | rng.choice(({}, withdrawn, two_at_once))


def the_last_is_late(rng: random.Random, peers: int) -> tuple[tuple[Operation, ...], Knives]:
    """A round begins while all but one have published, and that one does so while the others freeze."""
    link = {("entered", peers - 1): rng.choice((Fault.BREAK_LINK, Fault.BREAK_LINK, Fault.SUSPECT))}
    return (Operation(0, 0, Kind.PUBLISHED),), link | {("entered", peers): Fault.STOP}


def the_master_dies_in_a_round(rng: random.Random, peers: int) -> tuple[tuple[Operation, ...], Knives]:
    """A master dies after some of its pushes, and a peer after it answered the next one."""
    retry = rng.choice((True, True, False))
    return (Operation(0, 0, rng.choice(tuple(Kind)), retry),), {
        ("step", rng.randrange(3 * peers, STEPS_EACH * peers)): rng.choice((Fault.SUSPECT, Fault.BREAK_LINK)),
        ("pushed", rng.randrange(peers, 2 * peers + 2)): Fault.CRASH_MASTER,
        ("answered", rng.randrange(peers, 2 * peers + 1)): Fault.CRASH,
    }


AIMS: tuple[Aim, ...] = (a_reader_is_evicted, one_gives_up, the_last_is_late, the_master_dies_in_a_round)
