"""One attempt over links: everyone enters, data moves, everyone is prepared. Lives in the mesh's thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ray_pccl.errors import ProtocolError
from ray_pccl.peer.ledger import FrozenError
from ray_pccl.ring import fault_points
from ray_pccl.ring.link import Link
from ray_pccl.ring.programs import Program, program_for
from ray_pccl.ring.task import Attempt
from ray_pccl.ring.wire import PIECE_BYTES, Frame, Type


@dataclass(slots=True)
class Early:
    """What the others have sent of an operation that this peer has not entered."""

    headers: dict[int, bytes] = field(default_factory=dict)
    pieces: list[tuple[int, Frame, memoryview]] = field(default_factory=list)


class LinkedAttempt:
    """Drives a program by the frames that arrive, and tells the others how far this rank is."""

    def __init__(
        self, attempt: Attempt, flush: Callable[[Link], None], on_end: Callable[[LinkedAttempt], None]
    ) -> None:
        self.attempt = attempt
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self._links: Mapping[int, Link] = {}
        self._flush = flush
        self._on_end = on_end
        self._entered: set[int] = {attempt.epoch.rank}
        self._heard: set[int] = set()
        self._held: dict[int, list[tuple[Frame, memoryview]]] = {}
        self._headers: dict[int, bytes] = {}
        self._program = self._new_program()

    def _new_program(self) -> Program:
        return program_for(self.attempt.task, self.attempt.epoch, self)

    # ------------------------------------------------------------------------------------------ for the program

    def send(self, rank: int, slot: int, offset: int, view: memoryview) -> None:
        """Sends memory in pieces, once the receiver has entered."""
        epoch, (tag, number) = self.attempt.epoch.number, self.attempt.key
        for start in range(0, view.nbytes, PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            frame = Frame(Type.DATA, piece.nbytes, epoch, tag, number, slot, offset + start)
            if rank in self._entered or self._program.eager:
                self._links[rank].send_data(frame, piece, self, around=self._program.rings)
            else:
                self._held.setdefault(rank, []).append((frame, piece))
        self.attempt.tx += view.nbytes
        self._flush(self._links[rank])

    def scratch(self, rank: int, length: int) -> memoryview:
        """Memory for one piece."""
        return self._links[rank].scratch(length)

    # -------------------------------------------------------------------------------------------- what happens

    def begin(self, links: Mapping[int, Link], early: Early) -> None:
        """Enters: tells all, and takes into account what those who were faster have sent."""
        self._links = links
        if self._stopped():
            return
        self._tell(Type.ENTER, self.attempt.packed)
        try:
            self._program.begin()
        except Exception as error:
            self.end(error)
            return
        for rank, header in early.headers.items():
            self.enter(rank, header)
        for rank, frame, piece in early.pieces:
            self.replay(rank, frame, piece)
        self._advance()

    def enter(self, rank: int, header: bytes) -> None:
        """Another member has entered. What could not begin, for a link was missing, has nobody to answer to."""
        if self.ended.is_set() or rank not in self._links:
            return
        self._headers[rank] = header
        if header != self.attempt.packed:
            self.end(self.attempt.mismatch(rank, header))
            return
        self._entered.add(rank)
        for frame, piece in self._held.pop(rank, ()):
            self._links[rank].send_data(frame, piece, self, around=self._program.rings)
        self._flush(self._links[rank])
        self._advance()

    def destination(self, rank: int, frame: Frame) -> memoryview | None:
        """Where a piece goes."""
        if self.ended.is_set():
            return None
        if not frame.length:
            raise ProtocolError("a piece without data")
        return self._program.destination(rank, frame.slot, frame.offset, frame.length)

    def data(self, rank: int, frame: Frame, body: memoryview) -> None:
        """A piece has come."""
        if self.ended.is_set() or self._stopped():
            return
        self.attempt.rx += body.nbytes
        try:
            self._program.arrived(rank, frame.slot, frame.offset, body)
        except ProtocolError:
            raise
        except Exception as error:
            self.end(error)
            return
        self._advance()

    def replay(self, rank: int, frame: Frame, piece: memoryview) -> None:
        """A piece that came before this peer had entered."""
        place = None if self.ended.is_set() or rank not in self._entered else self.destination(rank, frame)
        if place is not None:
            place[:] = piece
            self.data(rank, frame, place)

    def prepared(self, rank: int) -> None:
        """Another member is prepared."""
        self._heard.add(rank)
        self._advance()

    def _advance(self) -> None:
        if self.ended.is_set() or self._stopped():
            return
        attempt = self.attempt
        size = attempt.epoch.size
        try:
            if not attempt.prepared and not self._program.due and len(self._entered) == size:
                self._program.finish()
                fault_points.reach("before_commit")
                attempt.prepare()
                fault_points.reach("prepared")
                self._tell(Type.PREPARED)
                self._heard.add(attempt.epoch.rank)
                fault_points.reach("told_prepared")
            if attempt.prepared and len(self._heard) == size:
                attempt.ledger.commit(attempt.key, time.monotonic(), epoch=attempt.epoch.number)
                fault_points.reach("committed")
                self.end(None)
        except Exception as error:
            self.end(error)

    def tick(self, now: float) -> None:
        """Ends what has waited for too long, or was stopped."""
        missing = len(self._entered) < self.attempt.epoch.size
        if not self._stopped() and now >= self.attempt.deadline and missing:
            self.end(self.attempt.too_late(self._headers.get))

    def _stopped(self) -> bool:
        if self.attempt.stop is not None:
            self.end(self.attempt.stop.again())
        return self.ended.is_set()

    def end(self, error: BaseException | None) -> None:
        """Ends it, and lets go of all memory that is not the library's."""
        if self.ended.is_set():
            return
        self.error = error
        epoch, (tag, number) = self.attempt.epoch.number, self.attempt.key
        for link in self._links.values():
            if self.attempt.prepared and not isinstance(error, FrozenError):
                link.keep(self)  # others may still need what is on its way, and commit with it
            elif error is not None:
                link.release(self)
            link.drop(lambda frame: (frame.epoch, frame.tag, frame.number) == (epoch, tag, number))
        self._program.close()
        self._on_end(self)
        self.ended.set()

    def _tell(self, type_: Type, body: bytes = b"") -> None:
        frame = Frame(type_, len(body), self.attempt.epoch.number, *self.attempt.key)
        for link in self._links.values():
            link.send(frame, body)
            self._flush(link)
