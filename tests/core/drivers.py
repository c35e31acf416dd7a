"""What can happen in a `World`, as steps that a driver chooses among: a random one here, Hypothesis in the test."""

from __future__ import annotations

import random
from collections.abc import Callable

from ray_pccl.control.messages import Question, VoteKind
from tests.core.simulation import Peer, Violation, World

MOST_PEERS = 7
Choose = Callable[[list], object]  # type: ignore[type-arg]


def _some(world: World, choose: Choose, *, where: Callable[[Peer], bool]) -> Peer | None:
    found = [peer for peer in world.peers.values() if where(peer)]
    return choose(found) if found else None  # type: ignore[return-value]


def start_peer(world: World, choose: Choose) -> None:
    if sum(peer.alive for peer in world.peers.values()) < MOST_PEERS:
        group, watched = choose(["g", "g", "g", "h"]), choose([True, False])
        passive = choose([False, False, False, False, True])
        world.start_peer(group=group, watched=watched, minimum=2, maximum=4, passive=passive)  # type: ignore[arg-type]


def start_alone(world: World, choose: Choose) -> None:
    """A peer of a group in which one is enough, so that the loss of one is the loss of all."""
    if sum(peer.alive for peer in world.peers.values()) < MOST_PEERS:
        world.start_peer(group="alone", watched=bool(choose([True, False])), minimum=1, maximum=1)


def joiner_turns_away(world: World, choose: Choose) -> None:
    """Two come to a group that needs two, and one goes before it forms."""
    if sum(peer.alive for peer in world.peers.values()) < MOST_PEERS:
        pair = [world.start_peer(group="pair", minimum=2, maximum=3) for _ in range(2)]
        world.deliver_all()
        world.kill(pair[0], seen=bool(choose([True, False])))
        world.deliver_all()


def members_die_with_the_master(world: World, choose: Choose) -> None:
    """Everyone dies while nobody could be told; the sentinels tell the next master, in any order."""
    world.crash_master()
    dead = [peer for peer in world.peers.values() if peer.member]
    for peer in dead:
        world.kill(peer, seen=False)
    world.start_master()
    for peer in dead[choose([0, 0, 1]) :]:  # type: ignore[misc]
        world.sees_death(peer)


def kill(world: World, choose: Choose) -> None:
    if peer := _some(world, choose, where=lambda peer: peer.alive):
        world.kill(peer, seen=bool(choose([True, False])))


def sentinel_tells(world: World, choose: Choose) -> None:
    if peer := _some(world, choose, where=lambda peer: not peer.alive):
        world.sees_death(peer)


def kill_all_members(world: World, choose: Choose) -> None:
    seen = bool(choose([True, True, False]))
    for peer in list(world.peers.values()):
        if peer.member and peer.group == "g":
            world.kill(peer, seen=seen)


def cut_all_members_off(world: World, choose: Choose) -> None:
    for peer in world.peers.values():
        if peer.member:
            world.partition(peer)


def stop_or_resume(world: World, choose: Choose) -> None:
    if peer := _some(world, choose, where=lambda peer: peer.alive):
        (world.resume if peer.stopped else world.stop)(peer)


def partition_or_heal(world: World, choose: Choose) -> None:
    if peer := _some(world, choose, where=lambda peer: peer.alive):
        (world.heal if peer.partitioned else world.partition)(peer)


def heal_all(world: World, choose: Choose) -> None:
    for peer in world.peers.values():
        if peer.partitioned:
            world.heal(peer)


def leave(world: World, choose: Choose) -> None:
    if peer := _some(world, choose, where=lambda peer: peer.awake):
        world.leave(peer)


def crash_master(world: World, choose: Choose) -> None:
    world.crash_master()


def start_master(world: World, choose: Choose) -> None:
    if world.master is None:
        world.start_master()


def start_second_master(world: World, choose: Choose) -> None:
    if sum(master.alive for master in world.masters) == 1:
        world.start_master()


def master_loses_its_journal(world: World, choose: Choose) -> None:
    """The newest master can't reach its journal any more; another is started, and both have peers."""
    if (master := world.master) is not None and not master.cut_off:
        master.cut_off = True
        world.note(f"master boot {master.core.identity.boot} is CUT OFF from its journal")
        if choose([True, True, False]):
            world.start_master()


def journal_is_back(world: World, choose: Choose) -> None:
    for master in world.masters:
        master.cut_off = False


def dial_any_master(world: World, choose: Choose) -> None:
    alive = [master for master in world.masters if master.alive]
    if alive and (peer := _some(world, choose, where=lambda peer: peer.awake and peer.link is None)):
        world.dial(peer, choose(alive))  # type: ignore[arg-type]


def vote(world: World, choose: Choose) -> None:
    kinds = [VoteKind.UPDATE_TOPOLOGY, VoteKind.UPDATE_TOPOLOGY, VoteKind.PEERS_PENDING, VoteKind.AWAIT_MINIMUM]
    kind = choose([*kinds, VoteKind.OPTIMIZE_TOPOLOGY])
    if peer := _some(world, choose, where=lambda peer: peer.member):
        world.vote(peer, kind)  # type: ignore[arg-type]


def all_vote(world: World, choose: Choose) -> None:
    kind = choose([VoteKind.UPDATE_TOPOLOGY, VoteKind.UPDATE_TOPOLOGY, VoteKind.PEERS_PENDING])
    for peer in world.peers.values():
        if peer.member and peer.group == "g":
            world.vote(peer, kind)  # type: ignore[arg-type]


def all_optimize(world: World, choose: Choose) -> None:
    for peer in world.peers.values():
        if peer.member and peer.group == "g":
            world.vote(peer, VoteKind.OPTIMIZE_TOPOLOGY)


def probe_ends(world: World, choose: Choose) -> None:
    if peer := _some(world, choose, where=lambda peer: bool(peer.probes)):
        peer.end_probe()


def solver_answers(world: World, choose: Choose) -> None:
    for master in world.masters:
        master.solve()


def add(world: World, choose: Choose) -> None:
    if peer := _some(world, choose, where=lambda peer: peer.member):
        world.add(peer)


def wait_key(world: World, choose: Choose) -> None:
    if peer := _some(world, choose, where=lambda peer: peer.member):
        world.wait_key(peer)


def query(world: World, choose: Choose) -> None:
    if peer := _some(world, choose, where=lambda peer: peer.member):
        world.query(peer, choose([Question.NUM_WAITING, Question.IS_CLOSED]))  # type: ignore[arg-type]


def enter(world: World, choose: Choose) -> None:
    if peer := _some(world, choose, where=lambda peer: peer.member):
        world.enter(peer, tag=choose([0, 0, 1]), retry=True)  # type: ignore[arg-type]


def enter_without_retry(world: World, choose: Choose) -> None:
    for peer in world.peers.values():
        if peer.member and choose([True, False]):
            world.enter(peer, tag=2, retry=False)


def all_enter(world: World, choose: Choose) -> None:
    for peer in world.peers.values():
        world.enter(peer)


def progress(world: World, choose: Choose) -> None:
    if peer := _some(world, choose, where=lambda peer: peer.member):
        world.progress(peer)


def all_progress(world: World, choose: Choose) -> None:
    for peer in world.peers.values():
        world.progress(peer)


def break_link(world: World, choose: Choose) -> None:
    members = [peer for peer in world.peers.values() if peer.member]
    if len(members) > 1:
        peer = choose(members)
        other = choose([other for other in members if other is not peer and other.group == peer.group] or [peer])  # type: ignore[attr-defined]
        if other is not peer:
            world.break_link(peer, other)  # type: ignore[arg-type]


def deliver_up(world: World, choose: Choose) -> None:
    if links := world.links():
        world.deliver_up(choose(links))  # type: ignore[arg-type]


def deliver_down(world: World, choose: Choose) -> None:
    if links := world.links():
        world.deliver_down(choose(links))  # type: ignore[arg-type]


def carry_out(world: World, choose: Choose) -> None:
    if busy := [master for master in world.masters if master.alive and master.pending]:
        choose(busy).carry_out()  # type: ignore[attr-defined]


def carry_out_all(world: World, choose: Choose) -> None:
    for master in list(world.masters):
        master.carry_out_all()


def deliver_all(world: World, choose: Choose) -> None:
    world.deliver_all()


def time_passes(world: World, choose: Choose) -> None:
    world.advance(choose([0.2, 0.6, 1.2]), deliver=bool(choose([True, True, False])))  # type: ignore[arg-type]


def much_time_passes(world: World, choose: Choose) -> None:
    world.advance(choose([3.4, 9.0]))  # type: ignore[arg-type]


STEPS: dict[Callable[[World, Choose], None], int] = {
    start_peer: 6,
    kill: 3,
    sentinel_tells: 2,
    kill_all_members: 1,
    cut_all_members_off: 1,
    stop_or_resume: 1,
    partition_or_heal: 2,
    heal_all: 1,
    leave: 1,
    crash_master: 2,
    start_master: 3,
    start_second_master: 1,
    master_loses_its_journal: 1,
    journal_is_back: 1,
    dial_any_master: 2,
    vote: 4,
    all_vote: 3,
    all_optimize: 2,
    probe_ends: 2,
    solver_answers: 2,
    add: 2,
    wait_key: 1,
    query: 1,
    enter: 4,
    enter_without_retry: 1,
    all_enter: 3,
    progress: 6,
    all_progress: 3,
    break_link: 2,
    deliver_up: 6,
    deliver_down: 6,
    carry_out: 5,
    carry_out_all: 3,
    deliver_all: 4,
    time_passes: 5,
    much_time_passes: 2,
}


# Narrower lives, in which rare meetings of a few things are common.
OPERATIONS: dict[Callable[[World, Choose], None], int] = {
    kill: 2,
    partition_or_heal: 1,
    crash_master: 1,
    start_master: 3,
    break_link: 1,
    all_enter: 6,
    enter: 3,
    progress: 20,
    deliver_up: 10,
    deliver_down: 10,
    carry_out: 12,
    time_passes: 1,
}
CALLS: dict[Callable[[World, Choose], None], int] = {
    start_peer: 1,
    kill: 1,
    crash_master: 3,
    start_master: 6,
    vote: 3,
    all_vote: 5,
    add: 8,
    deliver_up: 8,
    deliver_down: 6,
    carry_out: 8,
    deliver_all: 2,
    time_passes: 2,
}
ENDINGS: dict[Callable[[World, Choose], None], int] = {
    start_peer: 5,
    start_alone: 6,
    joiner_turns_away: 3,
    members_die_with_the_master: 2,
    kill: 5,
    sentinel_tells: 2,
    kill_all_members: 4,
    cut_all_members_off: 2,
    stop_or_resume: 3,
    partition_or_heal: 6,
    heal_all: 1,
    leave: 2,
    crash_master: 2,
    start_master: 3,
    master_loses_its_journal: 1,
    deliver_up: 3,
    deliver_all: 6,
    time_passes: 10,
    much_time_passes: 3,
}
TOPOLOGY: dict[Callable[[World, Choose], None], int] = {
    start_peer: 1,
    kill: 2,
    leave: 1,
    stop_or_resume: 1,
    crash_master: 2,
    start_master: 5,
    break_link: 2,
    all_optimize: 6,
    all_vote: 2,
    vote: 1,
    probe_ends: 8,
    solver_answers: 6,
    all_enter: 2,
    all_progress: 3,
    deliver_up: 8,
    deliver_down: 8,
    carry_out: 10,
    deliver_all: 2,
    time_passes: 3,
    much_time_passes: 1,
}
LIVES = {"any": STEPS, "operations": OPERATIONS, "calls": CALLS, "endings": ENDINGS, "topology": TOPOLOGY}


def formed(world: World, choose: Choose) -> None:
    """Three peers form the group before anything happens to it."""
    for _ in range(3):
        passive = bool(choose([False, False, False, False, True]))
        world.start_peer(watched=bool(choose([True, False])), minimum=2, maximum=4, passive=passive)
    world.advance(1.0)


def run_random(seed: int, steps: int = 80) -> World:
    """A random life of a world, and its settling. Raises `Violation`."""
    rng = random.Random(seed)
    world = World()
    choose: Choose = rng.choice
    life = LIVES[rng.choice(list(LIVES))]
    formed(world, choose)
    for step in rng.choices(list(life), list(life.values()), k=steps):
        step(world, choose)
        world.check()
    world.settle()
    return world


def hunt(seeds: range, steps: int = 80) -> Violation | None:
    """The first violation that the seeds lead to, if any. Code that raises is one, too."""
    for seed in seeds:
        try:
            run_random(seed, steps)
        except Violation as violation:
            return violation
        except Exception as error:
            return Violation(f"seed {seed}: {type(error).__name__}: {error}")
    return None
