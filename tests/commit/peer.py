"""A peer's process: its membership, the threads of its program, its links to the others and its line to the master."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING

from ray_pccl.control.messages import Answer, Message, OperationState, Welcome
from ray_pccl.peer.effects import Effect, Identity, Send
from ray_pccl.peer.ledger import FrozenError
from ray_pccl.peer.membership import ENDED, Membership
from tests.commit import boards, links
from tests.commit.plan import Key, Kind, Operation

if TYPE_CHECKING:
    from tests.commit.world import MasterProcess, World

IN_FLIGHT = (OperationState.RUNNING, OperationState.PREPARED)
ATTEMPTS = {Kind.LINKS: links.attempt, Kind.PUBLISHED: boards.attempt}
WAKES_UP = 0.1


class Line:
    """A connection of a peer to a master, with what is on its way. `None` on its way up: the connection has closed."""

    __slots__ = ("down", "master", "up")

    def __init__(self, master: MasterProcess, greeting: list[Message]) -> None:
        self.master = master
        self.up: deque[Message | None] = deque(greeting)
        self.down: deque[Message] = deque()


class Call:
    """One call of the program, on one peer, from its entry to its return."""

    def __init__(self, peer: Peer, operation: Operation, key: Key, root: str) -> None:
        self.operation = operation
        self.key = key
        self.root = root
        self.entered_with = peer.members
        self.result: list[str] = []
        """Whose inputs are in the result, once for each time that they went into it."""
        self._impatient = peer.place in operation.impatient
        self._world = peer.world

    def is_tired(self) -> bool:
        """Whether the caller wants no more of it: said once."""
        if self._impatient and self._world.rng.random() < self._world.plan.impatience:
            self._impatient = False
            return True
        return False


class Peer:
    """One process. Methods that return an int are steps: 0 if there was nothing to do, else which of them it was."""

    def __init__(self, world: World, place: int) -> None:
        self.world = world
        self.place = place
        self.name = f"p{place}"
        plan = world.plan
        identity = Identity(self.name, "g", "h", plan.minimum, plan.peers)
        self.membership = Membership(identity, world.settings, world.now)
        self.membership.join(1000.0, world.now)
        self.ledger = self.membership.ledger
        self.ledger.close_boards = self._close_boards
        self.alive, self.stopped, self.deaf, self.ended = True, False, False, False
        self.line: Line | None = None
        self.epoch = 0
        self.members: tuple[str, ...] = ()
        self.rosters: dict[int, tuple[str, ...]] = {}
        self.memory = world.memories[self.name]
        self.inboxes: list[deque[tuple[int, str, Key]]] = [deque() for _ in range(plan.peers)]
        self.heard: dict[tuple[Key, str], list[str]] = {}
        """What was heard in this epoch about each operation, and from whom."""
        self.broken: list[tuple[int, str]] = []
        """Links that broke, to be noticed: the epoch, and who was at the other end."""
        self.calls: dict[Key, Call] = {}
        by_tag = {tag: [op for op in plan.operations if op.tag == tag] for tag in range(len(self.memory.begun))}
        self.threads = [self._thread(operations) for operations in by_tag.values() if operations]
        self._freezing = False

    # ---------------------------------------------------------------------------------------------- the program

    def work(self) -> int:
        """One of the threads takes a step: the one that is drawn, or else the next that can."""
        if not self.threads or not self.alive or self.stopped:
            return 0
        count = len(self.threads)
        first = int(self.world.rng.random() * count)
        for place in range(first, first + count):
            if self._resume(self.threads[place % count]):
                return place % count + 1
        return 0

    def _resume(self, thread: Generator[bool, None, None]) -> bool:
        try:
            return not thread.gi_running and next(thread)  # type: ignore[attr-defined]
        except StopIteration:
            if self.alive:
                self.threads.remove(thread)
                self.world.unfinished -= 1
            return True

    def _thread(self, operations: list[Operation]) -> Generator[bool, None, None]:
        for operation in operations:
            yield from self._call(operation)
            yield True

    def _call(self, operation: Operation) -> Generator[bool, None, None]:
        """Enters the operation, and tries until it has committed or failed."""
        answers = self.world.answers
        call = yield from self._enter(operation)
        if call is None:
            answers.raised(self, operation, "PeerEvictedError" if self.ended else "TooFewPeersError")
            return
        key = call.key
        while self.ledger.operations[key].state in IN_FLIGHT:
            epoch = self.epoch
            for moved in ATTEMPTS[operation.kind](self, call):
                yield moved
                if self.epoch != epoch or self.ended:
                    break
            if self.ended:
                break
        held = self.ledger.operations[key]
        if held.state is OperationState.COMMITTED and not call.result:
            for moved in boards.recompute(self, call, held.epoch):
                yield moved
                if self.ended:
                    break
        if held.state is OperationState.COMMITTED and call.result:
            answers.returned(self, call)
        elif self.ended:
            answers.raised(self, operation, "PeerEvictedError")
        else:
            assert held.failure is not None
            answers.raised(self, operation, held.failure.error)
        del self.calls[key]

    def _enter(self, operation: Operation) -> Generator[bool, None, Call | None]:
        """Waits for an epoch that is not frozen, and enters. Returns the call, or None if there is none to be made."""
        while not self.ended and len(self.members) >= self.world.plan.minimum:
            root = "" if operation.root is None else self.members[operation.root % len(self.members)]
            try:
                key = self.ledger.enter(operation.tag, self.epoch, self.world.now, retry=operation.retry, root=root)
            except FrozenError:
                yield False
                continue
            if key != (operation.tag, operation.number):
                self.world.fail(f"{self.name} counts {operation} as {key}")
            self.memory.begun[operation.tag] = operation.number
            self.calls[key] = call = Call(self, operation, key, root)
            self.world.note(f"{self.name} enters {key} in epoch {self.epoch}")
            self.world.moment("entered", self)
            yield True
            return call
        return None

    def has_failed(self, key: Key) -> bool:
        """Whether the operation has failed for good, by somebody's refusal."""
        return self.ledger.operations[key].state is OperationState.FAILED

    def memories(self) -> list[boards.Memory]:
        """What the members of the epoch publish, in their order."""
        return [self.world.memories[name] for name in self.members]

    # --------------------------------------------------------------------------------------- links to the others

    def tell(self, what: str, key: Key) -> None:
        """Says something to all members. What never arrives, is taken out of the inboxes by `World.crash`."""
        if self.alive:
            self.world.note(f"{self.name} tells {what} of {key}")
            for name in self.members:
                if name != self.name and (self.epoch, frozenset((name, self.name))) not in self.world.broken_links:
                    self.world.peer(name).inboxes[self.place].append((self.epoch, what, key))

    def hear_peer(self) -> int:
        """The next message of another peer arrives. One of a later epoch is parked (R4), one of an earlier dropped."""
        if not self.alive or self.stopped:
            return 0
        count = len(self.inboxes)
        first = int(self.world.rng.random() * count)
        for place in range(first, first + count):
            inbox = self.inboxes[place % count]
            if inbox and inbox[0][0] <= self.epoch:
                epoch, what, key = inbox.popleft()
                if self.is_current(epoch) and not self.ended:
                    self._heard(what, key, self.world.peers[place % count].name)
                return place % count + 1
        return 0

    def is_current(self, epoch: int) -> bool:
        """Whether a message of this epoch counts."""
        return epoch == self.epoch

    def _heard(self, what: str, key: Key, sender: str) -> None:
        self.world.note(f"{self.name} hears {what} of {key} from {sender}")
        if what == links.REFUSED:
            try:
                self.ledger.refused(key, self.epoch, links.TIRED, self.world.now)
            except FrozenError:
                self.world.note(f"{self.name} is frozen, and does not hear it")
        else:
            self.heard.setdefault((key, what), []).append(sender)

    def notice(self) -> int:
        """The peer finds that a link is broken, and reports it; or it wakes up; or it hears the master again."""
        if not self.alive:
            return 0
        if self.stopped:
            self.stopped = self.world.rng.random() >= WAKES_UP
            return 0 if self.stopped else 1
        if self._freezing or self.ended:
            return 0
        if (self.deaf or self.ledger.lease_missed) and self.line is not None and self.line.master.alive:
            self.deaf = False
            self.membership.heard(self.world.now)
            self._apply(self.membership.tick(self.world.now))
            return 2
        if self.broken:
            epoch, other = self.broken.pop()
            if epoch == self.epoch and other in self.members:
                self._apply(self.membership.link_broken(other))
                return 3
        return 0

    # --------------------------------------------------------------------------------------- line to the master

    def dial(self) -> int:
        """Makes a connection to the master that runs, if the one before is gone. What was still on it is lost."""
        master = self.world.master
        if master is None or not self.alive or self.stopped or self.ended or self._freezing:
            return 0
        if self.line is not None and self.line.master is master:
            return 0
        boot = master.core.identity.boot
        self.line = Line(master, self.membership.welcome(Welcome(boot, "m", {}), self.world.now))
        master.lines[self.name] = self.line
        return 1

    def speak(self) -> int:
        """The next message of this peer reaches the master, or the end of its connection does."""
        line = self.line
        if line is None or not line.up or not line.master.alive:
            return 0
        line.master.hear(self.name, line.up.popleft())
        return 1

    def hear_master(self) -> int:
        """The next message of the master arrives."""
        line = self.line
        if line is None or not line.down or not self.alive or self.stopped or self._freezing:
            return 0
        self.take(line.down.popleft())
        return 1

    def take(self, message: Message) -> None:
        """The control thread handles a message of the master."""
        self.world.note(f"{self.name} <- {message}")
        effects = self.membership.received(message, self.world.now)  # type: ignore[arg-type]
        if self.alive:
            self._apply(effects)

    def _close_boards(self) -> list[Key]:
        """Others run meanwhile, but not this peer's control thread: whoever freezes holds the ledger's lock."""
        self._freezing = True
        whole = boards.close(self)
        self._freezing = False
        return whole

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send) and self.line is not None and self.alive:
                self.world.note(f"{self.name} -> {effect.message}")
                self.line.up.append(effect.message)
                if isinstance(effect.message, Answer):
                    self.world.moment("answered", self)
        view = self.membership.view
        if view.epoch != self.epoch:
            self.epoch = view.epoch
            self.members = tuple(member.peer_id for member in view.members)
            self.rosters[self.epoch] = self.members
            self.heard.clear()
            self.world.moment("decided", self)
        if self.membership.standing in ENDED and not self.ended:
            self.ended = True
            if self.line is not None:
                self.line.up.append(None)
