"""What is done to a group, fault by fault: each chosen by a seeded chance, and over when the group goes on."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ray_pccl.ring.fault_points import DELEGATE_NAMES
from tests.chaos.arena import Arena, Victim
from tests.chaos.board import POINTS, Action, Word

IN_RECOVERY = ("frozen", "answered", "decided", "before_retry")
"""Points that a peer passes when another has died."""
THROUGH_MEMORY = ("before_show", "before_publish", "published", "reading_slots", "round")
"""Points that only operations through shared memory pass."""
REACH_S = 2.0
"""How long a victim may take to come to its point; if it does not, it is struck where it is."""
WEIGHTS = {
    "kill_anywhere": 20,
    "kill_at_point": 50,
    "kill_two": 6,
    "kill_while_slow": 8,
    "stop": 5,
    "stop_shortly": 3,
    "cut": 6,
    "kill_master": 3,
    "kill_master_and_peer": 3,
}


@dataclass
class Tally:
    """What was done so far."""

    kills: int = 0
    inside: int = 0
    """Kills of peers that were between entering and returning from an operation."""
    at: Counter[str] = field(default_factory=Counter)
    """Kills by the named point at which they struck."""
    others: Counter[str] = field(default_factory=Counter)
    """Other faults, by name."""

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.kills + other.kills, self.inside + other.inside, self.at + other.at, self.others + other.others
        )

    def __str__(self) -> str:
        share = 100 * self.inside // max(1, self.kills)
        return f"{self.kills} kills ({share} % inside), {dict(self.others)}, at points: {dict(self.at)}"


class Reaper:
    """Does harm to one arena."""

    def __init__(self, arena: Arena, transport: str, chance: random.Random, tally: Tally, done: Counter[str]) -> None:
        self._arena = arena
        self._chance = chance
        self.tally = tally
        self._done = done
        """Kills by point in the arenas before this one, so that all points get their share."""
        unreached = {"auto": DELEGATE_NAMES, "tcp": (*DELEGATE_NAMES, *THROUGH_MEMORY), "gloo": THROUGH_MEMORY}
        self._points = [name for name in POINTS if name not in unreached[transport]]

    def strike(self) -> None:
        """One fault, chosen by chance. Returns when it is over and the group has gone on."""
        size = self._chance.choice((3, 4, 4, 5))

        def formed() -> bool:
            self._arena.fill(size)  # one may be put out while we wait
            return len(self._arena.members()) >= 3

        self._arena.wait(formed, "three members run operations")
        name = self._chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        fault: Callable[[], None] = getattr(self, name)
        fault()
        if name not in ("kill_anywhere", "kill_at_point"):
            self.tally.others[name] += 1
        self._arena.wait_progress(self._chance.choice((1, 2, 3)))

    # --------------------------------------------------------------------------------------------------- killing

    def kill_anywhere(self) -> None:
        """SIGKILL at a random instant."""
        self._linger()
        self._kill(self._victim())

    def kill_at_point(self) -> None:
        """SIGKILL at an exact point of the protocol: the one that had the fewest so far."""
        point = min(self._points, key=lambda name: (self._done[name] + self.tally.at[name], self._chance.random()))
        if point in IN_RECOVERY:
            self._kill_in_recovery(point)
        else:
            victim = self._victim()
            visit = self._chance.choice((1, 1, 2, 3, 5, 20))
            self._arm(victim, point, visit, Action.KILL)
            self._await_death(victim)

    def _kill_in_recovery(self, point: str) -> None:
        first, second = self._chance.sample(self._arena.members(), 2)
        self._arm(second, point, 1, Action.KILL)
        self._kill(first)
        self._await_death(second)

    def kill_two(self) -> None:
        """Two die one right after the other."""
        for victim in self._chance.sample(self._arena.members(), 2):
            self._kill(victim)
            time.sleep(self._chance.choice((0, 0.002, 0.01)))

    def kill_while_slow(self) -> None:
        """One dies while a thread of another is held up at a point: the decision overtakes it."""
        slow, victim = self._chance.sample(self._arena.members(), 2)
        self._arm(slow, self._chance.choice(self._points), 1, Action.DELAY)
        self._arena.wait_for(lambda: bool(slow.board[Word.STRUCK]) or not slow.is_member, REACH_S)
        slow.board.disarm()
        self._kill(victim)

    def _kill(self, victim: Victim) -> None:
        if victim.alive:
            victim.signal(signal.SIGKILL)
        self._count(victim)

    def _await_death(self, victim: Victim) -> None:
        """It dies at its point; or, if it does not come there, where it is."""
        self._arena.wait_for(lambda: not victim.alive, REACH_S)
        victim.board.disarm()
        self._kill(victim)

    def _count(self, victim: Victim) -> None:
        self._arena.wait(lambda: not victim.alive, f"{victim.name} is dead")
        self.tally.kills += 1
        self.tally.inside += victim.board[Word.IN_CALL] > 0
        if (struck := victim.board[Word.STRUCK]) and victim.board[Word.ACTION] == Action.KILL:
            self.tally.at[POINTS[struck - 1]] += 1

    # ---------------------------------------------------------------------------------- stopping and cutting off

    def stop(self) -> None:
        """SIGSTOP, at a point or anywhere, until the group has gone on without it; then SIGCONT."""
        victim = self._victim()
        epoch = victim.board[Word.EPOCH]
        victim.harmed = victim.stopped = True
        if self._chance.random() < 0.7:
            point = self._chance.choice([name for name in self._points if name not in IN_RECOVERY])
            self._arm(victim, point, 1, Action.STOP)
            self._arena.wait_for(lambda: _is_stopped(victim), REACH_S)
            victim.board.disarm()
        victim.signal(signal.SIGSTOP)
        self._arena.wait(lambda: _is_stopped(victim), f"{victim.name} is stopped")
        others = self._arena.members()
        self._arena.wait(
            lambda: all(other.board[Word.EPOCH] > epoch or not other.is_member for other in others),
            f"the others go on without {victim.name}",
        )
        self._arena.wait_progress(self._chance.choice((1, 5, 20)))
        victim.signal(signal.SIGCONT)
        victim.stopped = False
        self._arena.wait(lambda: not victim.alive, f"{victim.name} notices that it was evicted")

    def stop_shortly(self) -> None:
        """SIGSTOP for a moment: nobody is evicted."""
        self._linger()
        victim = self._victim()
        victim.signal(signal.SIGSTOP)
        time.sleep(self._chance.random() * 0.15)
        victim.signal(signal.SIGCONT)

    def cut(self) -> None:
        """A link between two members breaks."""
        victim = self._victim()
        if self._chance.random() < 0.7:
            point = self._chance.choice([name for name in self._points if name not in IN_RECOVERY])
            self._arm(victim, point, 1, Action.CUT)
            self._arena.wait_for(lambda: bool(victim.board[Word.STRUCK]) or not victim.is_member, REACH_S)
            victim.board.disarm()
        else:
            victim.board[Word.CUTS] += 1

    # ------------------------------------------------------------------------------------------------- the master

    def kill_master(self) -> None:
        """SIGKILL of the master, which comes back at once, or while operations have gone on without it."""
        self._linger()
        self._arena.master.kill()
        if self._chance.random() < 0.5:
            time.sleep(self._chance.random() * 0.2)
        self._arena.master.start()

    def kill_master_and_peer(self) -> None:
        """Both die, in either order; the loss is decided by the master that comes back."""
        victim = self._victim()
        first = self._chance.random() < 0.5
        if first:
            self._kill(victim)
        self._arena.master.kill()
        if not first:
            self._kill(victim)
        self._arena.master.start()

    # ---------------------------------------------------------------------------------------------------- inside

    def _victim(self) -> Victim:
        return self._chance.choice(self._arena.members())

    def _arm(self, victim: Victim, point: str, visit: int, action: Action) -> None:
        victim.board.arm(POINTS.index(point), visit, action)

    def _linger(self) -> None:
        """Lets a random piece of the operations pass, so that the instant is any."""
        time.sleep(self._chance.random() * 0.03)


def _is_stopped(victim: Victim) -> bool:
    try:
        state = Path(f"/proc/{victim.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "T" or not victim.alive
