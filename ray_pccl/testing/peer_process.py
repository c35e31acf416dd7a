"""The peer's end of `ray_pccl.testing.peers`: a process that holds one communicator and does what the test asks.

Each request is a function and its arguments, and runs in a thread of its own with the `Peer` as first argument, so that
a test can look at a peer that is blocked in a call. The process ends when the test's end of the pipe closes.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from ray_pccl.errors import NotConnectedError
from ray_pccl.peer.communicator import Communicator
from ray_pccl.testing.functions import dumps, loads
from ray_pccl.types import MembershipEvent

_LOOK_EVERY_S = 0.02


@dataclass(frozen=True, slots=True)
class StampedEvent:
    """A membership event and when the peer's callback had it: `time.monotonic()`, one clock for a whole host."""

    at: float
    """In seconds."""
    event: MembershipEvent
    """What the callback was given."""


class Peer:
    """What requests work on."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.events: list[StampedEvent] = []
        self.changed = threading.Condition()
        # Before it connects, so that the epoch that admits it is seen as well.
        communicator.on_membership(self._record)

    def _record(self, event: MembershipEvent) -> None:
        stamped = StampedEvent(time.monotonic(), event)
        with self.changed:
            self.events.append(stamped)
            self.changed.notify_all()

    def epoch(self) -> int:
        """The peer's epoch, 0 if it was not admitted yet; raises what ended its membership."""
        try:
            return self.communicator.epoch
        except NotConnectedError:
            return 0


# ---------------------------------------------------------------------------------------------- what a test can ask


def call(peer: Peer, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The communicator's attribute of this (dotted) name, called if it can be."""
    found: Any = peer.communicator
    for part in name.split("."):
        found = getattr(found, part)
    return found(*args, **kwargs) if callable(found) else found


def run(peer: Peer, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What the test's own function returns for the communicator and these arguments."""
    return function(peer.communicator, *args)


def events(peer: Peer) -> list[StampedEvent]:
    """All membership events so far."""
    with peer.changed:
        return list(peer.events)


def wait_epoch(peer: Peer, epoch: int, timeout: float) -> int:
    """The peer's epoch, once it is at least this one."""
    deadline = time.monotonic() + timeout
    with peer.changed:
        while (now_in := peer.epoch()) < epoch:
            left = deadline - time.monotonic()
            if left <= 0:
                raise AssertionError(f"peer {peer.communicator.peer_id} is in epoch {now_in} after {timeout:g} s")
            peer.changed.wait(min(left, _LOOK_EVERY_S))
    return now_in


def cut(peer: Peer) -> None:
    """Breaks the connection to the master."""
    connection = peer.communicator._connection
    if connection is None:
        raise NotConnectedError("there is no connection to cut")
    connection.cut()


# ------------------------------------------------------------------------------------------------------ the process


def main() -> None:
    """Serves the test at the other end of the pipe whose descriptor is the program's argument."""
    pipe = Connection(int(sys.argv[1]))
    peer = Peer(Communicator(**loads(pipe.recv_bytes())))
    sending = threading.Lock()

    def serve(number: int, request: bytes) -> None:
        outcome = _outcome(peer, request)
        reply = (number, peer.communicator.peer_id, *outcome)  # the request may have changed its name
        # The test may have ended meanwhile, and this process is about to.
        with sending, contextlib.suppress(OSError):
            pipe.send_bytes(dumps(reply))

    while True:
        try:
            number, request = loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        threading.Thread(target=serve, args=(number, request), daemon=True).start()


def _outcome(peer: Peer, request: bytes) -> tuple[bytes | None, bytes | None, str]:
    """The result or the error, pickled, and the error's traceback."""
    try:
        function, args = loads(request)
        return dumps(function(peer, *args)), None, ""
    except BaseException as error:
        trace = traceback.format_exc()
        try:
            # Some exceptions pickle, but can't be made anew from what was pickled.
            loads(travelling := dumps(error))
        except Exception:
            travelling = dumps(RuntimeError(f"{type(error).__name__}: {error}"))
        return None, travelling, trace
