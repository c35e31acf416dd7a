"""What one life is made of: the peers, the program that all of them run, and where the knife goes in.

Everything follows from a seed. A *knife* is a moment (the second answer, the first push after a journal write, ...) and
what happens right there. That reaches the rare places, as between two deliveries of a decision, far more often than
faults at random times do; the moment `step` stands for those.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum

Key = tuple[int, int]
Knives = dict[tuple[str, int], "Fault"]


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


PEER_MOMENTS = ("entered", "prepared", "committed", "refused", "closed", "answered", "answered", "decided", "decided")
PEER_MOMENTS += ("returned", "writing", "published", "withdrawn", "recomputing", "recomputing")
MASTER_MOMENTS = ("journalling", "journalled", "pushed", "pushed")
PEER_FAULTS = (Fault.CRASH,) * 5 + (Fault.SUSPECT, Fault.ZOMBIE, Fault.STOP) * 2
PEER_FAULTS += (Fault.BREAK_LINK, Fault.CRASH_MASTER, Fault.LEASE)
MASTER_FAULTS = (Fault.CRASH_MASTER,) * 4 + (Fault.CRASH, Fault.SUSPECT, Fault.TIME)
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
    """A life. `speeds`: how often the data plane and the control thread of each peer get their turn."""

    peers: int
    minimum: int
    operations: tuple[Operation, ...]
    knives: Knives
    speeds: tuple[tuple[int, int], ...]


def random_plan(rng: random.Random) -> Plan:
    """A life of 2 to 5 peers with 1 to 3 operations over 1 or 2 tags, and up to 4 faults."""
    peers = rng.choice((2, 3, 3, 3, 4, 5))
    minimum = rng.choice((1, 1, 1, 2))
    speeds = tuple((rng.choice((1, 5, 25)), rng.choice((1, 2, 4))) for _ in range(peers))
    if rng.random() < AIMED:
        operations, knives = rng.choice((_reader_is_evicted, _one_withdraws, _master_dies_in_a_round))(rng, peers)
    else:
        kinds = rng.choice(((Kind.LINKS,), (Kind.PUBLISHED,), (Kind.PUBLISHED,), tuple(Kind)))
        operations, knives = _operations(rng, peers, kinds), {}
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        knives.update(_knife(rng, STEPS_EACH * peers * len(operations)))
    return Plan(peers, minimum, operations, knives, speeds)


def _operations(rng: random.Random, peers: int, kinds: tuple[Kind, ...]) -> tuple[Operation, ...]:
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
    return tuple(operations)


def _knife(rng: random.Random, steps: int) -> Knives:
    match rng.randrange(6):
        case 0 | 1 | 2:
            return {("step", rng.randrange(1, steps)): rng.choice(ANY_FAULTS)}
        case 3 | 4:
            return {(rng.choice(PEER_MOMENTS), rng.choice((1, 1, 2, 2, 3, 4))): rng.choice(PEER_FAULTS)}
        case _:
            return {(rng.choice(MASTER_MOMENTS), rng.choice((1, 1, 2, 2, 3, 4, 5))): rng.choice(MASTER_FAULTS)}


# ------------------------------------------------------------------------ lives that are aimed at what is rare otherwise


def _reader_is_evicted(rng: random.Random, peers: int) -> tuple[tuple[Operation, ...], Knives]:
    """While a peer recomputes a decided commit, the others go on without it, and come back to the same slots."""
    operations = tuple(Operation(0, number, Kind.PUBLISHED) for number in range(3))
    decided = {("returned", rng.choice((1, 2))): rng.choice((Fault.CRASH, Fault.SUSPECT, Fault.BREAK_LINK))}
    evicted = {("recomputing", rng.choice((1, 2, 3))): rng.choice((Fault.ZOMBIE, Fault.STOP))}
    in_mid_write = {("writing", rng.randrange(2 * peers, 3 * peers)): Fault.CRASH}
    return operations, decided | evicted | rng.choice(({}, in_mid_write))


def _one_withdraws(rng: random.Random, peers: int) -> tuple[tuple[Operation, ...], Knives]:
    """A peer gives an operation up in the moment in which another commits it."""
    tired = frozenset(rng.sample(range(peers), peers - 1))
    fault = rng.choice((Fault.CRASH, Fault.SUSPECT, Fault.STOP, Fault.LEASE))
    return (Operation(0, 0, Kind.PUBLISHED, impatient=tired),), {
        ("withdrawn", rng.choice((1, 2))): rng.choice((Fault.STOP, Fault.CRASH, Fault.LEASE)),
        ("returned", 1): fault,
    }


def _master_dies_in_a_round(rng: random.Random, peers: int) -> tuple[tuple[Operation, ...], Knives]:
    """A master dies after some of its pushes, and a peer after it answered the next one."""
    kind = rng.choice(tuple(Kind))
    return (Operation(0, 0, kind),), {
        ("step", rng.randrange(4 * peers, STEPS_EACH * peers)): rng.choice((Fault.CRASH, Fault.SUSPECT, Fault.BREAK_LINK)),
        ("pushed", rng.randrange(peers, 2 * peers + 2)): Fault.CRASH_MASTER,
        ("answered", rng.randrange(peers, 2 * peers + 1)): Fault.CRASH,
    }
