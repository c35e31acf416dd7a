"""The receiver's side: pulls the pieces that it needs from all sources at once, and verifies each on arrival.

One thread for each source, and two requests under way in each: while one bundle is verified, the next is being made.
A source that fails, or does not answer, is tried again for as long as it is a source; the others take over its share
meanwhile. Nothing here touches the user's tensors.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from ray_pccl.errors import PCCLError, ProtocolError
from ray_pccl.ring import dialing, fault_points, handover
from ray_pccl.ring.dialing import Meeting
from ray_pccl.state.hashing import digest_of
from ray_pccl.state.pieces import Bundle, Piece, Pool, bundled, size_of
from ray_pccl.state.supplying import INDEX, REQUEST
from ray_pccl.state.tensors import Bytes

log = logging.getLogger("ray_pccl.state")

REQUESTS_UNDER_WAY = 2
MAX_SOURCES = 64
PATIENCE_S = 30.0
"""How long a source may send nothing. Others have long been asked for what it owes."""
LOOK_S = 0.05
REDIAL_S = 0.1
Dial = Callable[[str, float], Meeting]
"""A connection to the service of a peer, and how long to wait on it."""


class Puller:
    """Gets pieces. `wanted` are the digests that they must have, one for each piece of the state."""

    def __init__(self, sync: bytes, pieces: Sequence[Piece], wanted: Bytes, dial: Dial) -> None:
        self._sync = sync
        self._pieces = pieces
        self._wanted = wanted
        self._dial = dial
        self._pool = Pool((), (), pieces)
        self._changed = threading.Condition()
        self._threads: dict[str, threading.Thread] = {}
        self._meetings: dict[str, Meeting] = {}
        self._untrue: dict[str, int] = {}
        """Sources that sent something else than was announced, and which piece."""
        self._over = False
        self.arrived: dict[int, Bytes] = {}
        """The verified pieces."""
        self.rx_bytes = 0
        self.spoilt = -1
        """A piece that a source sent otherwise than it was announced; -1 while there is another source to ask."""
        self.last_arrival = time.monotonic()

    def want(self, needed: Iterable[int], wanted: Bytes, sources: Mapping[str, Bytes]) -> None:
        """Which pieces are needed, and the digests of those that the sources have, from now on.

        What arrived and is still wanted stays.
        """

        def holds(source: str, bundle: Bundle) -> bool:
            indices = list(bundle)
            return np.array_equal(sources[source][indices], wanted[indices])

        with self._changed:
            changed = np.nonzero((self._wanted != wanted).any(axis=1))[0]
            for index in changed:
                self.arrived.pop(int(index), None)
            self._wanted = wanted
            asked = [source for source in sources if source not in self._untrue][:MAX_SOURCES]
            lacking = (index for index in needed if index not in self.arrived)
            self._pool = Pool(bundled(lacking, self._pieces), asked, self._pieces, holds)
            for source in self._pool.sources:
                if source not in self._threads:
                    name = f"ray_pccl-pull-{source}"
                    thread = threading.Thread(target=self._pull, args=(source,), name=name, daemon=True)
                    self._threads[source] = thread
                    thread.start()
            self._changed.notify_all()

    @property
    def wanted(self) -> Bytes:
        """The digests that the pieces must have."""
        return self._wanted

    @property
    def sources(self) -> tuple[str, ...]:
        """Who is asked at the moment."""
        with self._changed:
            return self._pool.sources

    @property
    def missing(self) -> int:
        """Bytes to come."""
        with self._changed:
            return sum(size_of(bundle, self._pieces) for bundle in self._pool.missing)

    def drop(self, source: str) -> None:
        """A source is lost: the others take over."""
        with self._changed:
            self._leave_out(source)
            meeting = self._meetings.get(source)
            if meeting is not None:
                _shut(meeting)
            self._changed.notify_all()

    def _leave_out(self, source: str) -> None:
        self._pool.drop(source)
        if self._untrue and not self._pool.sources:
            self.spoilt = next(iter(self._untrue.values()))

    def wait(self, timeout_s: float) -> bool:
        """Whether everything is there, at the latest after so many seconds."""
        with self._changed:
            if self._pool.missing:
                self._changed.wait(timeout_s)
            return not self._pool.missing

    def stop(self) -> None:
        """Ends all threads, soon; none of them knows the user's tensors. What has arrived stays."""
        with self._changed:
            self._over = True
            for meeting in self._meetings.values():
                _shut(meeting)
            self._changed.notify_all()

    # -------------------------------------------------------------------------------------- a thread per source

    def _pull(self, source: str) -> None:
        while self._goes_on(source):
            try:
                meeting = self._dial(source, PATIENCE_S)
            except (OSError, PCCLError) as error:
                log.info("peer %s can't be reached for shared state: %s", source, error)
                self._pause()
                continue
            try:
                with meeting.sock:
                    self._take_from(source, meeting)
            except (OSError, ProtocolError) as error:
                log.info("peer %s did not send all of its shared state: %s", source, error)
                self._pause()
            except Exception:
                log.exception("shared state from peer %s could not be taken", source)
                self._pause()

    def _goes_on(self, source: str) -> bool:
        with self._changed:
            if self._over or source not in self._pool.sources:
                self._threads.pop(source, None)
                return False
            return True

    def _pause(self) -> None:
        with self._changed:
            if not self._over:
                self._changed.wait(REDIAL_S)

    def _take_from(self, source: str, meeting: Meeting) -> None:
        under_way: deque[tuple[Pool, Bundle]] = deque()
        with self._changed:
            self._meetings[source] = meeting
        try:
            while True:
                while len(under_way) < REQUESTS_UNDER_WAY and (asked := self._ask(source, meeting)) is not None:
                    under_way.append(asked)
                if under_way:
                    pool, bundle = under_way[0]
                    data = self._receive(meeting, size_of(bundle, self._pieces))
                    self._keep(pool, bundle, source, data)
                    under_way.popleft()
                elif not self._await_work(source):
                    return
        finally:
            with self._changed:
                if self._meetings.get(source) is meeting:
                    del self._meetings[source]
                for pool, bundle in under_way:
                    pool.failed(bundle, source)
                self._changed.notify_all()

    def _ask(self, source: str, meeting: Meeting) -> tuple[Pool, Bundle] | None:
        with self._changed:
            if self._over:
                return None
            pool = self._pool
            bundle = pool.take(source, time.monotonic())
        if bundle is None:
            return None
        try:
            meeting.sock.sendall(REQUEST.pack(self._sync, len(bundle)) + b"".join(map(INDEX.pack, bundle)))
        except BaseException:
            with self._changed:
                pool.failed(bundle, source)
            raise
        return pool, bundle

    def _await_work(self, source: str) -> bool:
        """There is nothing to ask this source for: waits a moment. False if there will be nothing."""
        with self._changed:
            if self._over or source not in self._pool.sources:
                return False
            self._changed.wait(LOOK_S)
            return True

    def _receive(self, meeting: Meeting, due: int) -> Bytes:
        what, size, fds = handover.receive_head(meeting)
        try:
            if what == handover.MISSING:
                raise ConnectionError("it takes part in another sync, or in none")
            if size != due:
                raise ProtocolError(f"{size} bytes came, where {due} were asked for")
            if what == handover.HERE:
                if not fds:
                    raise ProtocolError("the memory did not come along")
                return handover.map_sealed(fds[0], size)
            memory = np.empty(size, np.uint8)
            handover.receive_into(meeting.sock, memory)
            return memory
        finally:
            dialing.close_all(fds)

    def _keep(self, pool: Pool, bundle: Bundle, source: str, data: Bytes) -> None:
        fault_points.reach("state_arrived")
        parts, start = {}, 0
        for index in bundle:
            parts[index] = data[start : start + self._pieces[index].length]
            start += self._pieces[index].length
        wanted = self._wanted
        wrong = [index for index, part in parts.items() if digest_of(part) != wanted[index].tobytes()]
        with self._changed:
            if wrong and pool is self._pool:
                log.error("peer %s sent piece %d of the shared state otherwise than announced", source, wrong[0])
                self._untrue[source] = wrong[0]
                self._leave_out(source)
            elif not wrong and pool.arrived(bundle, source, time.monotonic()) and pool is self._pool:
                self.arrived.update(parts)
                self.rx_bytes += len(data)
                self.last_arrival = time.monotonic()
            self._changed.notify_all()


def _shut(meeting: Meeting) -> None:
    with contextlib.suppress(OSError):
        meeting.sock.shutdown(socket.SHUT_RDWR)
