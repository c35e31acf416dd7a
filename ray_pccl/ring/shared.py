"""Operations through shared memory, on one host.

Small ones (`express`): every rank copies its input into its slot, publishes it, and makes its result from all slots.
*Published* serves as *prepared*: whoever froze without having returned makes the result again from the slots, which
stay as they are until everyone is past them. Large ones (`blocks`) pass through windows in rounds: copy in what others
need, reduce your own slice, copy out theirs; then *prepared* is a flag of its own.

Both are generators that yield whenever they have to wait for another rank, so that a thread can drive one or many.
docs/design/data-plane.md has the order of loads and stores, and who dies between them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from ray_pccl.peer.ledger import Key, Ledger
from ray_pccl.ring import fault_points
from ray_pccl.ring.arena import Arena, offset_in_own, own_arena
from ray_pccl.ring.bell import Bell
from ray_pccl.ring.collect import collect, reduce_arrays, reduce_packed, show
from ray_pccl.ring.header import Kind
from ray_pccl.ring.quantization import BLOCK
from ray_pccl.ring.segment import (
    ASLEEP,
    CLOSED,
    DONE,
    FLAGS,
    LAST,
    PART_BYTES,
    PARTS,
    SLOT_BYTES,
    SOURCE,
    STAGE_BITS,
    WINDOW,
    WINDOWS,
    Bytes,
    OwnSegment,
    Segment,
    ident_of,
)
from ray_pccl.ring.task import Array, Attempt, Epoch, Task

PUBLISHED = ENTERED = 1
GRANTED = 2
"""The leader has chosen a window for the operation."""
FIRST_ROUND = 3
PREPARED = 1 << (STAGE_BITS - 1)
Steps = Generator[None, None, None]
ALIGNMENT = 64
"""Slices begin at cache lines."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """What a process of this host shows: its segment, its bell, and its tensors that need no copying."""

    segment: Segment
    bell: Bell
    arena: Arena


class Host:
    """The members of one epoch, all on this host, by rank."""

    def __init__(self, epoch: Epoch, own: OwnSegment, neighbours: Sequence[Neighbour]) -> None:
        self.epoch = epoch
        self.own = own
        self.neighbours = neighbours
        self.segments = [neighbour.segment for neighbour in neighbours]
        self.others = [rank for rank in range(epoch.size) if rank != epoch.rank]
        self._asleep = [(neighbours[rank].segment.words, neighbours[rank].bell) for rank in self.others]
        self.lock = threading.Lock()
        self.windows = list(range(WINDOWS))
        """At rank 0: the windows that no operation uses."""
        self.last: dict[int, int] = {}
        """The last operation of each tag that committed."""
        self.lent: list[tuple[int, int, int]] = []
        """At rank 0: windows of operations that failed, with tag and number, until nobody uses them any more."""
        self.busy: set[int] = set()
        """Tags with an operation in flight."""

    def reclaim(self) -> None:
        """Takes back the windows of failed operations that all others have left, or never entered."""
        for loan in list(self.lent):
            window, tag, number = loan
            if all(self._has_left(self.segments[rank], tag, number) for rank in self.others):
                self.lent.remove(loan)
                self.windows.append(window)

    def _has_left(self, segment: Segment, tag: int, number: int) -> bool:
        at = segment.has_shown(tag, ident_of(self.epoch.number, tag), number)
        return at is None or segment.words[at + DONE] > number

    def ring(self) -> None:
        """Something was published: wakes who sleeps."""
        for words, bell in self._asleep:
            if words[ASLEEP]:
                bell.ring()


class SharedAttempt(Attempt):
    """An attempt of which the others see an entry on this rank's board."""

    __slots__ = ("at", "flag", "host", "ident", "moves", "places", "publishes", "window")

    def __init__(self, task: Task, key: Key, host: Host, ledger: Ledger, deadline: float) -> None:
        super().__init__(task, key, host.epoch, ledger, deadline)
        self.host = host
        tag, number = self.key
        self.ident = ident_of(self.epoch.number, tag)
        self.flag = number << STAGE_BITS
        self.at = -1
        self.places: list[tuple[Segment, int]] = []
        """Where the others' entries are, once they have entered."""
        self.moves = 0
        """Grows with every step, so that whoever drives it knows that it goes on."""
        self.window = -1
        self.publishes = max(task.recipe.shown(host.epoch.size)) <= SLOT_BYTES
        """Whether it is small: its published input serves as *prepared*."""

    # ------------------------------------------------------------------------------------------------- the board

    def claim(self) -> Steps:
        """Waits for an entry on the board, and until nobody reads what it is going to overwrite."""
        tag, number = self.key
        with self.host.lock:
            self.host.busy.add(tag)
            at = self.host.own.take(tag)
        while at is None:
            with self.host.lock:
                self._recycle()
                at = self.host.own.take(tag)
            if at is None:
                yield
        self.at = at
        last = self.host.last.get(tag)
        if last is not None and number - last > 1:
            # Operations in between failed: others may still read the last that did not, from the slot we want.
            while not self._all_past(tag, last):
                yield
        self.host.own.dedicate(at, self.ident, number)

    def _recycle(self) -> None:
        for tag in self.host.own.tags:
            last = self.host.last.get(tag)
            if tag not in self.host.busy and (last is None or self._all_past(tag, last)):
                self.host.own.give_back(tag)
                self.host.last.pop(tag, None)
                return

    def _all_past(self, tag: int, number: int) -> bool:
        for rank in self.host.others:
            segment = self.host.segments[rank]
            at = segment.find(tag)
            if at is not None and segment.words[at + DONE] <= number:
                return False
        return True

    def post(self, stage: int) -> None:
        """Shows the operation at this stage."""
        self.host.own.post(self.at, self.key[1], self.packed, self.flag + stage)
        self.moves += 1
        self.host.ring()

    def reach(self, stage: int) -> None:
        """Goes on to the next stage of a posted operation."""
        self.host.own.words[self.at + FLAGS + (self.key[1] & 1)] = self.flag + stage
        self.moves += 1
        self.host.ring()

    def wait_all(self, stage: int) -> Steps:
        """Waits until all others have come this far."""
        (tag, number), ident = self.key, self.ident
        for rank in self.host.others:
            segment = self.host.segments[rank]
            while segment.is_at_least(tag, ident, number, stage) is None:
                yield

    def wait_entered(self) -> Steps:
        """Waits until all others have posted the operation, and compares what they posted."""
        tag, number = self.key
        for rank in self.host.others:
            segment = self.host.segments[rank]
            while (at := segment.is_at_least(tag, self.ident, number, ENTERED)) is None:
                yield
            header = segment.header(at, number)
            if header != self.packed:
                raise self.mismatch(rank, header)
            self.places.append((segment, at))

    def entered(self, rank: int) -> bytes | None:
        """The header that a rank has posted under this tag and number, if any."""
        segment = self.host.segments[rank]
        at = segment.is_at_least(self.key[0], self.ident, self.key[1], ENTERED)
        return None if at is None else segment.header(at, self.key[1])

    def done(self) -> None:
        """This rank reads nothing of the operation any more."""
        if self.at >= 0:
            self.host.own.words[self.at + DONE] = self.key[1] + 1
        with self.host.lock:
            self.host.busy.discard(self.key[0])

    def all_published(self) -> bool:
        """Whether every rank has published its input to this very operation, be it withdrawn since."""
        return all(self._has_published(rank) for rank in range(self.epoch.size))

    def _has_published(self, rank: int) -> bool:
        segment = self.host.segments[rank]
        at = segment.has_shown(self.key[0], self.ident, self.key[1])
        return at is not None and segment.header(at, self.key[1]) == self.packed

    def commit(self) -> Steps:
        """Commits, unless a member has frozen: then this peer will be asked, too, and waits for that."""
        while not self.commit_now():
            yield

    def commit_now(self) -> bool:
        """Commits, unless a member has frozen or withdrawn. Raises `FrozenError` if it is this one that froze."""
        if not self.ledger.commit(self.key, time.monotonic(), self._stands, self.epoch.number):
            return False
        self.host.own.words[self.at + LAST] = self.host.last[self.key[0]] = self.key[1]
        return True

    def _stands(self) -> bool:
        # Under the ledger's lock, whose acquisition orders our own stores before these loads.
        epoch, (_, number), ident = self.epoch.number, self.key, self.ident
        place = FLAGS + (number & 1)
        for segment, at in self.places:
            words = segment.words
            shown = words[at + place] >> STAGE_BITS == number or words[at + LAST] >= number
            if words[CLOSED] >= epoch or not shown or words[at] != ident:
                return False
        return True

    def withdraw(self) -> bool:
        """Takes a published input back, for a refusal. False if all have published: then it may be committed.

        Two may do this at once, and a third have seen both: so who has withdrawn has published for the other.
        """
        words, place = self.host.own.words, self.at + FLAGS + (self.key[1] & 1)
        if self.prepared or self.at < 0 or not self._has_published(self.epoch.rank):
            return True
        if words[place] >= 0:
            words[place] = ~words[place]
        if not self.publishes:
            return True  # nobody commits with what is not prepared
        _fence()
        if not all(self._has_published(rank) for rank in self.host.others):
            return True
        words[place] = self.flag + PUBLISHED
        _fence()
        return False


def _fence() -> None:
    """Orders the stores before it and the loads after it: taking a lock is a locked instruction."""
    with _fence_lock:
        pass


_fence_lock = threading.Lock()


class SharedMemory:
    """This process's segment and bell, and what it has published."""

    def __init__(self) -> None:
        self.own = OwnSegment()
        self.bell = Bell()
        self.arena = own_arena()
        self.published: dict[Key, SharedAttempt] = {}
        """Small operations that may be counted on by others, although this peer has not returned."""
        self._sleepers = 0
        self._lock = threading.Lock()

    @property
    def fds(self) -> list[int]:
        """What neighbours need to see this process's memory."""
        return [self.own.fd, self.bell.fd, self.arena.fd]

    def close_boards(self, epoch: int) -> list[Key]:
        """Freezes: from now on nobody commits with what is published here. Returns what all had published before."""
        self.own.words[CLOSED] = max(self.own.words[CLOSED], epoch)
        _fence()
        return [key for key, attempt in list(self.published.items()) if attempt.all_published()]

    def doze(self, *, asleep: bool) -> None:
        """Says that one more thread is about to sleep, or has woken."""
        with self._lock:
            self._sleepers += 1 if asleep else -1
            self.own.words[ASLEEP] = self._sleepers

    def close(self) -> None:
        """Lets go of the descriptors."""
        self.own.close_fd()
        self.bell.close_fd()


# ------------------------------------------------------------------------------------------------------ algorithms


def suits(task: Task, epoch: Epoch) -> bool:
    """Whether the operation goes through shared memory; if not, its board entry only announces it."""
    if task.recipe.header.kind in (Kind.ALL_REDUCE, Kind.REDUCE):
        return True
    return max(task.recipe.shown(epoch.size)) <= SLOT_BYTES


def run(shared: SharedMemory, attempt: SharedAttempt) -> Steps:
    """The algorithm for the attempt."""
    return _express(shared, attempt) if attempt.publishes else _blocks(attempt)


def _express(shared: SharedMemory, attempt: SharedAttempt) -> Steps:
    task, epoch, number = attempt.task, attempt.epoch, attempt.key[1]
    yield from attempt.claim()
    shown = task.recipe.shown(epoch.size)
    size = shown[epoch.rank]
    fault_points.reach("before_show")
    show(task, attempt.host.own.slot(attempt.at, number, size))
    shared.published[attempt.key] = attempt  # before anyone can count on it
    fault_points.reach("before_publish")
    attempt.post(PUBLISHED)
    fault_points.reach("published")
    yield from attempt.wait_entered()
    fault_points.reach("reading_slots")
    collect(task, epoch.rank, slots(attempt))
    fault_points.reach("before_commit")
    yield from attempt.commit()
    fault_points.reach("committed")
    attempt.tx = size * (epoch.size - 1)
    attempt.rx = sum(shown) - size


def slots(attempt: SharedAttempt) -> list[Bytes]:
    """What every rank has published; also a dead one's, whose memory stays mapped."""
    tag, number = attempt.key
    found = []
    for segment, size in zip(attempt.host.segments, attempt.task.recipe.shown(attempt.epoch.size), strict=True):
        at = segment.find(tag)
        assert at is not None
        found.append(segment.slot(at, number, size))
    return found


class _Round:
    """Which elements a round covers, and which of them are whose slice."""

    def __init__(self, first: int, last: int, size: int, align: int) -> None:
        self.first, self.last = first, last
        slice_ = -(-(last - first) // size)
        slice_ = -(-slice_ // align) * align
        self.bounds = [min(first + rank * slice_, last) for rank in range(size + 1)]
        self.bounds[size] = last


def _rounds(attempt: SharedAttempt) -> list[_Round]:
    task, size, count = attempt.task, attempt.epoch.size, attempt.task.recipe.header.count
    if task.recipe.quantizer is not None:
        align = BLOCK
        each = max(1, PART_BYTES // task.recipe.quantizer.block_bytes // size) * size * BLOCK
    else:
        align = max(1, ALIGNMENT // task.recipe.dtype.itemsize)
        each = PART_BYTES // task.recipe.dtype.itemsize // (size * align) * (size * align)
    return [_Round(first, min(first + each, count), size, align) for first in range(0, count, each)]


def _blocks(attempt: SharedAttempt) -> Steps:
    task, epoch, host = attempt.task, attempt.epoch, attempt.host
    committed = False
    yield from attempt.claim()
    offset = offset_in_own(task.send) if task.send is not None and task.recipe.quantizer is None else None
    host.own.words[attempt.at + SOURCE] = 0 if offset is None else offset + 1
    attempt.post(ENTERED)
    yield from attempt.wait_entered()
    yield from _agree_on_window(attempt)
    try:
        passage = _Packed(attempt) if task.recipe.quantizer is not None else _Plain(attempt)
        rounds = _rounds(attempt)
        passage.copy_in(0, rounds[0])
        attempt.reach(FIRST_ROUND)
        for index, round_ in enumerate(rounds):
            stage = FIRST_ROUND + 2 * index
            fault_points.reach("round")
            yield from attempt.wait_all(stage)
            passage.reduce(index % PARTS, round_)
            attempt.reach(stage + 1)
            if index + 1 < len(rounds):
                # Three parts: this one was last read in a round that everyone has left, as they reached `stage`.
                passage.copy_in((index + 1) % PARTS, rounds[index + 1])
                attempt.reach(stage + 2)
            yield from attempt.wait_all(stage + 1)
            if task.out is not None:
                passage.copy_out(index % PARTS, round_)
        attempt.prepare()
        fault_points.reach("prepared")
        attempt.reach(PREPARED)
        fault_points.reach("told_prepared")
        yield from attempt.wait_all(PREPARED)
        yield from attempt.commit()
        fault_points.reach("committed")
        committed = True
    finally:
        if epoch.rank == 0 and attempt.window >= 0:
            with host.lock:
                if committed:
                    host.windows.append(attempt.window)
                else:  # others may not know yet, and still use it
                    attempt.withdraw()
                    host.lent.append((attempt.window, *attempt.key))


def _agree_on_window(attempt: SharedAttempt) -> Steps:
    """Rank 0 chooses, once all have entered: so windows never go to operations that can't finish."""
    host, tag = attempt.host, attempt.key[0]
    if attempt.epoch.rank == 0:
        while True:
            with host.lock:
                host.reclaim()
                if host.windows:
                    attempt.window = host.windows.pop()
                    break
            yield
        host.own.words[attempt.at + WINDOW] = attempt.window
        attempt.reach(GRANTED)
    else:
        leader = host.segments[0]
        while (at := leader.is_at_least(tag, attempt.ident, attempt.key[1], GRANTED)) is None:
            yield
        attempt.window = leader.words[at + WINDOW]


class _Plain:
    """Elements pass through the window as they are."""

    def __init__(self, attempt: SharedAttempt) -> None:
        self._task, self._rank, self._attempt = attempt.task, attempt.epoch.rank, attempt
        window, dtype = attempt.window, attempt.task.recipe.dtype
        self._parts: list[list[Array]] = [
            [segment.part(window, part).view(dtype) for part in range(PARTS)] for segment in attempt.host.segments
        ]
        assert attempt.task.send is not None
        self._send = attempt.task.send
        self._whole = [self._source(rank) for rank in range(attempt.epoch.size)]
        """The inputs that lie in an arena, whole; None for those that pass through the window."""

    def _source(self, rank: int) -> Array | None:
        neighbour = self._attempt.host.neighbours[rank]
        at = neighbour.segment.find(self._attempt.key[0])
        assert at is not None
        offset = neighbour.segment.words[at + SOURCE] - 1
        if offset < 0:
            return None
        size = self._task.recipe.header.count * self._task.recipe.dtype.itemsize
        return neighbour.arena.bytes[offset : offset + size].view(self._task.recipe.dtype)

    def _input(self, rank: int, part: int, round_: _Round, low: int, high: int) -> Array:
        whole = self._whole[rank]
        if whole is not None:
            return whole[low:high]
        return self._parts[rank][part][low - round_.first : high - round_.first]

    def copy_in(self, part: int, round_: _Round) -> None:
        if self._whole[self._rank] is not None:
            return
        window, first = self._parts[self._rank][part], round_.first
        low, high = round_.bounds[self._rank], round_.bounds[self._rank + 1]
        np.copyto(window[: low - first], self._send[first:low])
        np.copyto(window[high - first : round_.last - first], self._send[high : round_.last])
        self._attempt.tx += (low - first + round_.last - high) * self._task.recipe.dtype.itemsize

    def reduce(self, part: int, round_: _Round) -> None:
        low, high = round_.bounds[self._rank], round_.bounds[self._rank + 1]
        if low == high:
            return
        arrays = [self._input(rank, part, round_, low, high) for rank in range(len(self._parts))]
        arrays[self._rank] = self._send[low:high]
        shown = self._parts[self._rank][part][low - round_.first : high - round_.first]
        if self._task.out is None:
            reduce_arrays(self._task, arrays, shown)
        else:
            result = self._task.out[low:high]
            reduce_arrays(self._task, arrays, result)
            np.copyto(shown, result)

    def copy_out(self, part: int, round_: _Round) -> None:
        assert self._task.out is not None
        for rank, parts in enumerate(self._parts):
            low, high = round_.bounds[rank], round_.bounds[rank + 1]
            if rank != self._rank and low < high:
                np.copyto(self._task.out[low:high], parts[part][low - round_.first : high - round_.first])
                self._attempt.rx += (high - low) * self._task.recipe.dtype.itemsize


class _Packed:
    """Quantised blocks pass through the window; every rank's own contribution is quantised, too."""

    def __init__(self, attempt: SharedAttempt) -> None:
        assert attempt.task.recipe.quantizer is not None and attempt.task.send is not None
        self._task, self._rank, self._attempt = attempt.task, attempt.epoch.rank, attempt
        self._quantizer, self._send = attempt.task.recipe.quantizer, attempt.task.send
        window = attempt.window
        self._parts = [[segment.part(window, part) for part in range(PARTS)] for segment in attempt.host.segments]

    def _place(self, part: Bytes, round_: _Round, low: int, high: int) -> Bytes:
        start = self._quantizer.packed_size(low - round_.first)
        return part[start : start + self._quantizer.packed_size(high - low)]

    def copy_in(self, part: int, round_: _Round) -> None:
        packed = self._place(self._parts[self._rank][part], round_, round_.first, round_.last)
        self._quantizer.quantize(self._send[round_.first : round_.last], packed)
        self._attempt.tx += len(packed)

    def reduce(self, part: int, round_: _Round) -> None:
        low, high = round_.bounds[self._rank], round_.bounds[self._rank + 1]
        if low == high:
            return
        inputs = [self._place(parts[part], round_, low, high) for parts in self._parts]
        shown = inputs[self._rank]
        out = None if self._task.out is None else self._task.out[low:high]
        reduce_packed(self._task, inputs, high - low, shown, out)

    def copy_out(self, part: int, round_: _Round) -> None:
        assert self._task.out is not None
        for rank, parts in enumerate(self._parts):
            low, high = round_.bounds[rank], round_.bounds[rank + 1]
            if rank != self._rank and low < high:
                packed = self._place(parts[part], round_, low, high)
                self._quantizer.store(packed, self._task.out[low:high])
                self._attempt.rx += len(packed)
