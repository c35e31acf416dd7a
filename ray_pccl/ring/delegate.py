"""Collectives whose data another library moves: in which order its group is asked, and when that group is replaced.

Members, detection, headers, commit and retry stay ours; see docs/design/delegated.md. The other library's group lives
as long as an epoch, in a thread of its own, and works only on memory of this library: it may be left alone with that
memory for as long as it likes, while its members go on in the next epoch. Nothing here imports torch.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from ray_pccl.errors import ProtocolError
from ray_pccl.peer.ledger import Key
from ray_pccl.ring import fault_points
from ray_pccl.ring.header import Header
from ray_pccl.ring.task import Array, Epoch, Recipe
from ray_pccl.ring.wire import Type

log = logging.getLogger("ray_pccl.ring")

KEY_TIMEOUT_S = 20.0
"""How long a member may take to say where the other library listens there."""
MARGIN_S = 5.0
"""How much longer than it was told to an operation of the other library may take."""
_ABORT_AGAIN_S, _ABORT_AT_LEAST_EVERY_S = 0.05, 1.0
_KEPT_GHOSTS = 1024
_encoder = msgspec.msgpack.Encoder()
_entries: msgspec.msgpack.Decoder[tuple[str, bytes]] = msgspec.msgpack.Decoder(tuple[str, bytes])


class Job(Protocol):
    """One operation in memory of the library's own."""

    def deliver(self, out: Array) -> None:
        """Copies the result, once it is there, to where this rank's result is built."""


class TorchGroup(Protocol):
    """The other library's group of one epoch. `abort` may be called by any thread, at any time, more than once."""

    def build(self) -> None:
        """Connects the members. Blocks; raises what went wrong."""

    def run(self, job: Any) -> None:
        """Does an operation. Blocks; raises what went wrong."""

    def abort(self) -> None:
        """Has `build` and `run` end soon, here and elsewhere."""


class Backend(Protocol):
    """A library that can reduce."""

    name: str
    number: int
    """What it is known by in headers: members of two backends do not agree on any operation."""

    def takes(self, header: Header) -> bool:
        """Whether it can do such an operation; a function of the header, so that all members choose the same."""

    def job(self, recipe: Recipe, epoch: Epoch, send: Array | None) -> Job:
        """A copy of this rank's input, and room for its result. Without `send`: of any values."""

    def group(self, epoch: Epoch, host: str, keys: Keys, timeout_s: float) -> TorchGroup:
        """A group that is still to be built; no wait of its operations may be longer than `timeout_s`."""


class Keys:
    """What the members of a group that is being built tell each other: written once, waited for by name."""

    def __init__(self, tell: Callable[[str, bytes], None]) -> None:
        self._tell = tell
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._over = False

    def publish(self, key: str, value: bytes) -> None:
        """Tells all members, this one too."""
        self.arrived(key, value)
        self._tell(key, value)

    def arrived(self, key: str, value: bytes) -> None:
        """A member has published a key."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def wait(self, key: str, timeout_s: float) -> bytes:
        """The value, as soon as there is one. `TimeoutError`; `ConnectionAbortedError` once the epoch is over."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while key not in self._values or self._over:
                if self._over:  # also for a key that is there: whoever tries again to build a group is to give up
                    raise ConnectionAbortedError("the epoch is over")
                if not self._changed.wait(deadline - time.monotonic()):
                    raise TimeoutError(f"timeout: no member has published {key!r} within {timeout_s:g} s")
            return self._values[key]

    def has(self, key: str) -> bool:
        """Whether it is there now."""
        return key in self._values

    def end(self) -> None:
        """Ends all waits."""
        with self._changed:
            self._over = True
            self._changed.notify_all()


Done = Callable[[Exception | None], None]


class Session:
    """One group of the other library, its thread, and what it is asked to do, one after the other."""

    def __init__(self, group: TorchGroup, keys: Keys, name: str) -> None:
        self._group = group
        self._keys = keys
        self._jobs: queue.SimpleQueue[tuple[Job, Done] | None] = queue.SimpleQueue()
        self._over = threading.Event()
        self._running: tuple[Job, float] | None = None
        """What is done now, and since when."""
        self._thread = threading.Thread(target=self._work, name=f"ray_pccl-{name}", daemon=True)
        self._thread.start()

    def submit(self, job: Job, done: Done) -> None:
        """Has it done after all those before. `done` is called in the session's thread, whatever becomes of it."""
        self._jobs.put((job, done))

    def running_since(self, job: Job) -> float | None:
        """When the library began with it; None if it does something else."""
        running = self._running
        return running[1] if running is not None and running[0] is job else None

    def end(self) -> None:
        """Ends it, whatever it does now; returns at once."""
        if not self._over.is_set():
            self._over.set()
            self._jobs.put(None)
            self._keys.end()
            try:
                threading.Thread(target=self._abort, name="ray_pccl-abort", daemon=True).start()
            except RuntimeError:  # the epoch freezes nevertheless
                log.exception("no thread is to be had to abort a group of the other library: it ends by its timeout")

    def _abort(self) -> None:
        # Again and again: a group that is being built may have made one more connection meanwhile.
        pause = _ABORT_AGAIN_S
        while True:
            try:
                self._group.abort()
            except Exception:
                log.exception("a group of the other library could not be aborted")
            self._thread.join(pause)
            if not self._thread.is_alive():
                return
            pause = min(2 * pause, _ABORT_AT_LEAST_EVERY_S)

    def _work(self) -> None:
        broken: Exception | None = None
        try:
            fault_points.reach("delegate_building")
            self._group.build()
        except Exception as error:
            broken = error
        while (item := self._jobs.get()) is not None:
            job, done = item
            if broken is None and not self._over.is_set():
                try:
                    fault_points.reach("delegate_running")
                    self._running = job, time.monotonic()
                    self._group.run(job)
                    fault_points.reach("delegate_done")
                except Exception as error:
                    broken = error
                    self._group.abort()  # so that the others learn of it, too
            if self._over.is_set():  # what was made of it, if anything, does not count
                broken = broken or ConnectionAbortedError("the group was given up")
            self._running = None
            done(broken)
            del item, job, done


class Delegate:
    """A communicator's dealings with the other library. For the mesh's thread, where nothing else is said.

    All members have to ask the library for the same operations in the same order, though users launch them in any.
    Rank 0 gives the order: it *grants* an operation when it has heard all enter it, and links keep the order of grants.
    What was granted is done on every member, even where it failed meanwhile: no other waits for it in vain.
    """

    def __init__(
        self, backend: Backend, host: str, call: Callable[[Callable[[], None]], None], tell: Callable[..., None]
    ) -> None:
        self.backend = backend
        self.timeout_s = 300.0
        """How long a wait inside the other library may last."""
        self.grace_s = 1.0
        """How long the news of a death may take after the library has noticed that a connection broke."""
        self._host = host
        self._call = call
        self._tell = tell
        self._epoch: Epoch | None = None
        self._generation = 0
        """Of the group that is used, or will be: another one is made in the same epoch if one breaks."""
        self._broken = -1
        """The last generation that broke."""
        self._session: Session | None = None
        self._keys: dict[int, Keys] = {}
        self._ghosts: OrderedDict[Key, Recipe] = OrderedDict()
        """Operations that ended here before they were granted: others may have been granted them."""
        self._lock = threading.Lock()
        self._stopped = 0
        """The last epoch that is over."""

    def stop(self, epoch: int) -> None:
        """The epoch is over: whatever the library does in it is given up. For any thread; returns at once."""
        with self._lock:
            self._stopped = max(self._stopped, epoch)
            session, self._session = self._session, None
        if session is not None:
            session.end()

    def move(self, epoch: Epoch) -> None:
        """A new epoch has begun."""
        self.stop(epoch.number - 1)
        self._epoch = epoch
        self._generation, self._broken = 0, -1
        self._keys.clear()
        self._ghosts.clear()

    def grant(self, job: Job, done: Done) -> int:
        """Rank 0 hands an operation over; the generation of the group that does it, for the others."""
        self._submit(job, done)
        return self._generation

    def granted(self, generation: int, job: Job, done: Done) -> None:
        """Rank 0 has handed an operation over, and this rank follows."""
        if generation <= self._broken:
            done(ConnectionAbortedError("the group broke before the operation's turn came"))
            return
        if generation > self._generation:
            self._replace(generation)
        self._submit(job, done)

    def granted_ghost(self, key: Key, generation: int) -> None:
        """An operation was granted that has ended here: it is done nevertheless, with any values."""
        epoch, recipe = self._epoch, self._ghosts.pop(key, None)
        if epoch is None:
            return
        if recipe is None:
            log.warning("operation %s was granted, which nobody entered here: the group is replaced", key)
            self.broken(generation)
            return
        self.granted(generation, self.backend.job(recipe, epoch, None), lambda _error: None)

    def ended(self, key: Key, recipe: Recipe) -> None:
        """An operation has ended that was not granted, as far as this rank knows."""
        self._ghosts[key] = recipe
        if len(self._ghosts) > _KEPT_GHOSTS:
            self._ghosts.popitem(last=False)

    def overdue(self, generation: int, job: Job, now: float) -> Exception | None:
        """Why an operation that was granted is not waited for any longer, if it is not.

        The library has a timeout of its own, but not everywhere: NCCL without its watchdog may block for good.
        """
        if generation < self._generation:
            return ConnectionAbortedError("the group was given up")
        session = self._session
        since = session.running_since(job) if session is not None else None
        if since is None or now <= since + self.timeout_s + MARGIN_S:
            return None
        return TimeoutError(f"it has not ended an operation within {self.timeout_s + MARGIN_S:g} s")

    def broken(self, generation: int) -> None:
        """The group is of no use any more: the next operation gets another."""
        if generation != self._generation or generation <= self._broken:
            return
        self._broken = generation
        self._replace(generation + 1)

    def _replace(self, generation: int) -> None:
        self._generation = generation
        with self._lock:
            session, self._session = self._session, None
        if session is not None:
            session.end()
        for old in [number for number in self._keys if number < generation]:
            del self._keys[old]

    def _submit(self, job: Job, done: Done) -> None:
        epoch = self._epoch
        with self._lock:
            if epoch is None or epoch.number <= self._stopped:
                return  # it froze meanwhile, and so did the operation
            if self._session is None:
                keys = self._keys_of(self._generation)
                group = self.backend.group(epoch, self._host, keys, self.timeout_s)
                self._session = Session(group, keys, self.backend.name)
            self._session.submit(job, done)

    def _keys_of(self, generation: int) -> Keys:
        epoch = self._epoch

        def tell(key: str, value: bytes) -> None:
            body = _encoder.encode((key, value))
            self._call(lambda: self._tell(Type.KEY, epoch, generation, body))

        if generation not in self._keys:
            self._keys[generation] = Keys(tell)
        return self._keys[generation]

    def key(self, generation: int, body: bytes) -> None:
        """A member has published a key of a group that is being built."""
        try:
            key, value = _entries.decode(body)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"a key that can't be read: {error}") from None
        if generation >= self._generation:
            self._keys_of(generation).arrived(key, value)
