"""An operation over shared memory (R8): inputs are published, and *published* serves as *prepared*.

Each peer writes its own memory alone; everyone reads everyone's, also that of the dead. Between any two loads and
stores others may run. What holds it together:

- *The flag goes first and comes last*: it is taken away before the data change, and set after. It carries the epoch.
- *Read, then look again*: whoever saw all flags and read all data looks at all `closed` words and all flags once more,
  and commits only if nothing changed. *Close, then look*: whoever freezes stores `closed` first, and then looks at the
  flags. So of a peer that commits and a peer that freezes at least one sees the other.
- *A flag is withdrawn before its owner refuses*, and the refusal needs a member that has published nothing. One that
  has withdrawn its flag does not count as such: two that withdraw at once must not take each other for a reason, while
  a third has seen both flags twice. For who freezes a withdrawn flag is a published one: its owner may find that all
  had published, and put the flag back.
- *Two slots a tag*: the one of `number` is written again for `number + 2`, when all have begun `number + 1`. What one
  has begun is a word of its own: an operation that failed early was never published, and still all are past it.
- *A decided commit is recomputed* from the slots, whoever closed them since; afterwards the flags must still be of this
  operation. They are, unless the reader was evicted meanwhile, and the others went on.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, NamedTuple

from tests.commit.links import commit, frozen, refuse
from tests.commit.plan import Key, Kind

if TYPE_CHECKING:
    from tests.commit.peer import Call, Peer

SLOTS = 2


class Flag(NamedTuple):
    """Says of which operation, and in which epoch, the input in a slot is."""

    epoch: int
    number: int
    withdrawn: bool = False


class Slot:
    """One input. `data` stands for it by the operation that it belongs to."""

    __slots__ = ("data", "flag")

    def __init__(self) -> None:
        self.data: Key | None = None
        self.flag: Flag | None = None


class Memory:
    """What a peer publishes. It outlives its process."""

    def __init__(self, tags: int) -> None:
        self.closed = 0
        """The epoch up to which flags of this peer count for no commit any more."""
        self.begun = [-1] * tags
        """For each tag, the number of the operation that the peer is in; it is past all before it."""
        self.slots = [[Slot() for _ in range(SLOTS)] for _ in range(tags)]

    def slot(self, key: Key) -> Slot:
        """Where the input of an operation lies."""
        tag, number = key
        return self.slots[tag][number % SLOTS]


def attempt(peer: Peer, call: Call) -> Iterator[bool]:
    """One try at the operation, in the peer's present epoch."""
    key, epoch, memories = call.key, peer.epoch, peer.memories()
    call.result = []
    flag = Flag(epoch, key[1])
    for memory in memories:
        while not slot_is_free(memory, key):
            if peer.has_failed(key) or (call.is_tired() and refuse(peer, call)):
                return
            yield False
        yield True
    yield from publish(peer, key, flag)
    while True:
        for memory in memories:
            while not is_published(memory, key, flag):
                if peer.has_failed(key):
                    return
                if call.is_tired():
                    if (yield from withdraw(peer, call, memories, flag)):
                        return
                    continue
                yield False
            yield True
        read = []
        for memory in memories:
            read.append(memory.slot(key).data)
            yield True
        yield from nobody_closed(memories, epoch)
        if (yield from nobody_withdrew(memories, key, flag)):
            break
    call.result = contributions(key, peer.members, read)
    yield from commit(peer, call)


def is_published(memory: Memory, key: Key, flag: Flag) -> bool:
    """Whether the input may be counted on: published in this epoch, and not withdrawn."""
    return memory.slot(key).flag == flag


def publish(peer: Peer, key: Key, flag: Flag) -> Iterator[bool]:
    """The old flag goes before the data change, the new one comes after. A retry has the same data."""
    slot = peer.memory.slot(key)
    if slot.data != key:
        slot.flag = None
        yield True
        slot.data = key
        peer.world.moment("writing", peer)
        yield True
    slot.flag = flag
    peer.world.moment("published", peer)
    yield True


def slot_is_free(memory: Memory, key: Key) -> bool:
    """Whether the owner of this memory is past what was in our slot before."""
    return memory.begun[key[0]] >= key[1] - SLOTS + 1


def nobody_closed(memories: list[Memory], epoch: int) -> Iterator[bool]:
    """After the last read: nobody has closed the epoch. If somebody has, there is no way on but the next one."""
    for memory in memories:
        if memory.closed >= epoch:
            yield from frozen()
        yield True


def nobody_withdrew(memories: list[Memory], key: Key, flag: Flag) -> Generator[bool, None, bool]:
    """After the last read: all flags are still there. Returns whether that is so."""
    for memory in memories:
        if not is_published(memory, key, flag):
            return False
        yield True
    return True


def withdraw(peer: Peer, call: Call, memories: list[Memory], flag: Flag) -> Generator[bool, None, bool]:
    """Tries to refuse an operation whose input is published. Returns whether it did."""
    peer.world.moment("tired", peer)
    yield True  # what it waited for may come in the very moment in which it gives up
    slot = peer.memory.slot(call.key)
    slot.flag = flag._replace(withdrawn=True)
    peer.world.moment("withdrawn", peer)
    yield True
    for memory in memories:
        if published_nothing(memory, call.key, flag.epoch):
            if peer.has_failed(call.key) or refuse(peer, call):
                return True
            break  # frozen in between
        yield True
    slot.flag = flag
    yield True
    return False


def published_nothing(memory: Memory, key: Key, epoch: int) -> bool:
    """Whether this is a reason to refuse."""
    return not was_published(memory, key, epoch)


def was_published(memory: Memory, key: Key, epoch: int) -> bool:
    """Whether the input was published in this epoch, and whatever became of it."""
    flag = memory.slot(key).flag
    return flag is not None and flag.epoch == epoch and flag.number == key[1]


def close(peer: Peer) -> list[Key]:
    """The epoch freezes. Returns the operations whose inputs are all published: nothing is missing to finish them."""
    peer.memory.closed = peer.epoch
    peer.world.moment("closed", peer)
    return look(peer)


def look(peer: Peer) -> list[Key]:
    """The operations whose inputs are all published, by one load after another."""
    whole = []
    for key, call in list(peer.calls.items()):
        if call.operation.kind is Kind.PUBLISHED:
            for memory in peer.memories():
                peer.world.meanwhile()
                if not was_published(memory, key, peer.epoch):
                    break
            else:
                whole.append(key)
    return whole


def recompute(peer: Peer, call: Call, epoch: int) -> Iterator[bool]:
    """A commit was decided: the result is what the inputs of that epoch make, whoever closed or died since."""
    names = peer.rosters[epoch]
    memories = [peer.world.memories[name] for name in names]
    read = []
    for memory in memories:
        peer.world.moment("recomputing", peer)
        yield True
        read.append(memory.slot(call.key).data)
    yield from nobody_went_on(memories, call.key)
    call.result = contributions(call.key, names, read)


def nobody_went_on(memories: list[Memory], key: Key) -> Iterator[bool]:
    """After the last read: the slots hold this operation still. If not, others went on without us: we are evicted."""
    for memory in memories:
        flag = memory.slot(key).flag
        if flag is None or flag.number != key[1]:
            yield from frozen()
        yield True


def contributions(key: Key, names: tuple[str, ...], read: list[Key | None]) -> list[str]:
    """Whose inputs were read."""
    return [name if data == key else f"{name}'s {data}" for name, data in zip(names, read, strict=True)]
