"""A peer in a process of its own, as a test holds it."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection, wait
from typing import Any

from ray_pccl.testing import peer_process
from ray_pccl.testing.functions import dumps, loads
from ray_pccl.testing.ownership import Ownership
from ray_pccl.testing.peer_process import StampedEvent
from ray_pccl.testing.relay import Relay

CALL_TIMEOUT_S = 60.0
EXIT_TIMEOUT_S = 15.0
_PROGRAM = "from ray_pccl.testing.peer_process import main; main()"


class PeerProcessEndedError(ConnectionError):
    """The peer's process ended, so it can't answer."""


class PeerProcess:
    """One peer: a fresh interpreter that holds one `Communicator`.

    Whatever the communicator raises there is raised here, with its type and the peer's traceback as a note. A peer that
    was stopped answers nothing before it is continued; one that was killed makes every call raise
    `PeerProcessEndedError`. `within` is put before its command line, to start it in a network namespace for instance.
    """

    def __init__(
        self,
        communicator: Mapping[str, Any],
        ownership: Ownership,
        *,
        environment: Mapping[str, str] | None = None,
        relay: Relay | None = None,
        within: Sequence[str] = (),
    ) -> None:
        self.relay = relay
        """What this peer's messages pass through, if it was started with ``relay=True``."""
        self.joined: Future[None] = Future()
        """Ends with the peer's first `connect()`."""
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._peer_id = ""
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(filter(None, sys.path))
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603
                [*within, sys.executable, "-c", _PROGRAM, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=ownership.environment() | {"PYTHONPATH": path} | dict(environment or {}),
            )
        self._pipe = Connection(ours.detach())
        self._pipe.send_bytes(dumps(dict(communicator)))
        self._reader = threading.Thread(target=self._read, name=f"peer-{self.pid}", daemon=True)
        self._reader.start()

    def __repr__(self) -> str:
        return f"<PeerProcess {self._peer_id or self.pid}>"

    # ---------------------------------------------------------------------------------------------------- who it is

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether its process is there; a stopped one is."""
        return self._process.poll() is None

    @property
    def peer_id(self) -> str:
        """Its `peer_id`, as it was when it last answered: known of the dead and the stopped too."""
        return self._peer_id

    @property
    def rank(self) -> int:
        """Its rank now."""
        rank: int = self.call("rank")
        return rank

    @property
    def world_size(self) -> int:
        """The size of its epoch."""
        size: int = self.call("world_size")
        return size

    @property
    def epoch(self) -> int:
        """Its epoch now."""
        epoch: int = self.call("epoch")
        return epoch

    @property
    def members(self) -> tuple[str, ...]:
        """The `peer_id` of every member of its epoch."""
        members: tuple[str, ...] = self.call("members")
        return members

    def events(self) -> list[StampedEvent]:
        """All membership events that its callback had so far, oldest first."""
        found: list[StampedEvent] = self.result_of(self.ask(peer_process.events), CALL_TIMEOUT_S, "events()")
        return found

    # --------------------------------------------------------------------------------------------- what it shall do

    def call(self, name: str, /, *args: Any, timeout: float = CALL_TIMEOUT_S, **kwargs: Any) -> Any:
        """Calls a method of its communicator, such as ``update_topology`` or ``store.set``, or reads an attribute.

        Args:
            name: The attribute; dots lead further down.
            args: The method's arguments. The method's own timeout is given by position.
            timeout: How long the test waits for the answer, in seconds.
            kwargs: The method's keyword arguments.

        Raises:
            TimeoutError: The peer has not answered in time; its call goes on.
        """
        return self.result_of(self.call_async(name, *args, **kwargs), timeout, f"{name}()")

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Starts a method of its communicator, in a thread of its own there; the future is the method's."""
        return self.ask(peer_process.call, name, args, kwargs)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = CALL_TIMEOUT_S) -> Any:
        """Runs ``function(communicator, *args)`` in the peer's process and returns what it returns.

        Local functions and lambdas may be sent too: see `ray_pccl.testing.functions`.
        """
        return self.result_of(self.run_async(function, *args), timeout, getattr(function, "__name__", "run()"))

    def run_async(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Starts `run`; the future is the function's."""
        return self.ask(peer_process.run, function, args)

    def wait_epoch(self, epoch: int, timeout: float = 10.0) -> int:
        """Returns the peer's epoch once it is `epoch` or later; `AssertionError` after `timeout` seconds."""
        request = self.ask(peer_process.wait_epoch, epoch, timeout)
        reached: int = self.result_of(request, timeout + CALL_TIMEOUT_S, "wait_epoch()")
        return reached

    def cut(self) -> None:
        """Breaks its control connection, as a network would. The communicator dials anew by itself."""
        self.result_of(self.ask(peer_process.cut), CALL_TIMEOUT_S, "cut()")

    def connect(self) -> None:
        """Starts its first `connect()`, which ends `joined`."""
        self.call_async("connect").add_done_callback(self._connected)

    def _connected(self, connected: Future[None]) -> None:
        error = connected.exception()
        if error is None:
            self.joined.set_result(None)
        else:
            self.joined.set_exception(error)

    def exit(self, timeout: float = EXIT_TIMEOUT_S) -> int:
        """Ends the process in an orderly way: it leaves its group. Returns its exit code."""
        with (
            contextlib.suppress(OSError),
            socket.fromfd(self._pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end,
        ):
            end.shutdown(socket.SHUT_WR)
        return self._process.wait(timeout)

    def end(self) -> None:
        """Ends the process with SIGKILL, whatever it is in, and lets go of it. Does nothing if it has ended."""
        self._process.kill()
        self._process.wait(EXIT_TIMEOUT_S)
        self._reader.join(EXIT_TIMEOUT_S)
        if self.relay is not None:
            self.relay.close()

    # -------------------------------------------------------------------------------------------------- the pipe

    def ask(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Has the peer's process call a function of `peer_process`; never blocks for long."""
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()  # what the peer does can't be taken back
        request = dumps((function, args))
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = answer
            try:
                self._pipe.send_bytes(dumps((number, request)))
            except OSError:
                del self._waiting[number]
                answer.set_exception(self._ended_error())
        return answer

    def result_of(self, answer: Future[Any], timeout: float, what: str) -> Any:
        """Waits for a future of this peer; the error of one that is late says who has not answered what."""
        try:
            return answer.result(timeout)
        except TimeoutError:
            if answer.done():
                raise
            raise TimeoutError(f"{self!r} has not answered {what} within {timeout:g} s") from None

    def _read(self) -> None:
        # A forked child of the peer may hold the pipe open: the end of the process itself is watched too.
        handle = os.pidfd_open(self.pid)
        try:
            while self._pipe in wait([self._pipe, handle]):
                number, self._peer_id, result, error, trace = loads(self._pipe.recv_bytes())
                answer = self._waiting.pop(number)
                if error is None:
                    answer.set_result(loads(result))
                else:
                    answer.set_exception(_with_note(loads(error), f"in {self!r}:\n{trace}"))
        except (EOFError, OSError):
            pass
        finally:
            os.close(handle)
            with self._lock:
                self._pipe.close()
                unanswered, self._waiting = self._waiting, {}
            for answer in unanswered.values():
                answer.set_exception(self._ended_error())

    def _ended_error(self) -> PeerProcessEndedError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        return PeerProcessEndedError(f"the process of {self!r} ended with code {self._process.returncode}")


def _with_note(error: BaseException, note: str) -> BaseException:
    error.add_note(note)
    return error
