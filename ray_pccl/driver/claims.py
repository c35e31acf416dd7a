"""How long a value is kept: until nobody, in whichever process, holds a reference to its ObjectRef any more.

Only the *owner* of a ref, the process that called the method, hears from Ray when that is so. It passes a claim along
with each call. The value's own ref does not do to watch: Ray copies small objects, such as tickets, into the calls that
they are passed to, and lets go of the ref before these run. So each call has a second return, the *anchor*, whose ref
lies in the ticket: Ray counts that wherever the ticket goes.

The actor that keeps values for an owner holds one connection to it, over which it is told what is not wanted any more;
what it keeps, it tells only when it connects. *Who dies between these lines?* An owner that is gone wants nothing any
more: Ray itself gives up the objects of an owner that died. A keeper that is gone keeps nothing. A ref that is dropped
before its value is made: the keeper notes that it is not wanted, and does not keep it then.
"""

from __future__ import annotations

import collections
import itertools
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from ray_pccl.driver import internals
from ray_pccl.driver.desk import Contact, local_desk
from ray_pccl.ring import dialing

log = logging.getLogger("ray_pccl.objects")

SERVICE = "claims"
KEPT, NOT_KEPT = b"kept", b"not kept"
"""What an anchor holds: whether the actor keeps the value."""
RECONNECT_S = 10.0
"""How long a keeper tries to reach an owner whose connection broke, before it takes it for dead."""
ALIVE_EVERY_S, ALIVE_MISSED = 5, 4
"""How often a keeper on another host has its owner's kernel asked whether it is there, and how often in vain."""
BATCH_S = 0.02
"""Freeing can wait for a moment: what happens so soon after the last look is dealt with together."""
REMEMBERED = 1 << 16
"""How many claims that ended early are remembered for values that are still to come."""
_RETRY_S = 0.2
_NUMBER = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to a value that is about to be made."""

    owner: Contact
    number: int
    address: bytes = b""
    """The owner, as Ray knows it."""

    def __str__(self) -> str:
        return f"{self.owner.token}-{self.number}"


class Owner:
    """This process as the owner of refs."""

    def __init__(self) -> None:
        desk = local_desk()
        self._contact = desk.contact
        self._numbers = itertools.count()
        self._wanted: set[int] = set()
        self._names: dict[Any, str] = {}
        """What values are kept as, if they are, by the ids of the calls whose anchors somebody holds."""
        self._started: collections.deque[Any] = collections.deque()
        self._ended: collections.deque[tuple[str, int]] = collections.deque()
        self._arrived: collections.deque[_Keeper] = collections.deque()
        self._keepers: dict[str, list[_Keeper]] = {}
        self._past: collections.deque[tuple[str, int]] = collections.deque(maxlen=REMEMBERED)
        """Claims that ended lately: an actor that connects, for the first time or as another process, is told."""
        self._address = b""
        """Of this process in the Ray that it is connected to: another one, later, knows it by another."""
        self._making: list[Any] = []
        """Anchors of calls that have not ended: until then nothing but this holds them."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._woken = False
        self._left = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        desk.services[SERVICE] = self._meet
        internals.in_background.holds_refs(self._let_go)
        threading.Thread(target=self._run, name="ray_pccl-owner", daemon=True).start()

    def claim(self) -> Claim:
        """A new claim: to be made before the call that it goes along with."""
        number = next(self._numbers)
        self._wanted.add(number)
        self._address = self._address or internals.own_address()
        return Claim(self._contact, number, self._address)

    def bind(self, claim: Claim, anchor: Any, actor_id: str) -> None:
        """The claim is that of a call to this actor: it ends when the last copy of its anchor is gone."""
        number, task = claim.number, anchor.task_id()

        def end(_: bytes) -> None:
            self._names.pop(task, None)
            self.end(number, actor_id)

        self._names[task] = str(claim)
        if internals.on_out_of_scope(anchor, end):
            self._started.append(anchor)
            self._rouse()
        else:
            end(b"")

    def name_of(self, ref: Any) -> str:
        """The name under which the actor of the ref keeps its value, if it is known to keep it; else nothing.

        It does so for as long as somebody holds the ref.
        """
        name = self._names.get(ref.task_id(), "")
        return name if name and internals.second_if_ready(ref) == KEPT else ""

    def end(self, number: int, actor_id: str) -> None:
        """Nobody wants the value any more. May be called by any thread, at any moment."""
        self._ended.append((actor_id, number))
        self._rouse()

    def _meet(self, meeting: dialing.Meeting, actor_id: str) -> None:
        self._arrived.append(_Keeper(actor_id, meeting.sock))
        self._rouse()

    def _rouse(self) -> None:
        if not self._woken:
            self._woken = True
            os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        looked = 0.0
        while True:
            ready = self._selector.select(BATCH_S if self._making else None)
            time.sleep(max(0.0, looked + BATCH_S - time.monotonic()))
            looked = time.monotonic()
            for key, _ in ready:
                if key.fd == self._wake:
                    os.eventfd_read(self._wake)
                    self._woken = False  # before the look: what comes now is seen, or rouses again
            self._let_go_of_made()
            self._look()
            for key, _ in ready:
                if key.fd != self._wake and key.data.sock.fileno() >= 0:  # and not lost meanwhile
                    self._serve(key.data)

    def _let_go_of_made(self) -> None:
        """Calls that have ended have put their anchors into tickets, or have failed: those hold them from now on."""
        try:
            with internals.in_background():
                self._look_at_making()
        except Exception as error:  # Ray was shut down, or is about to be: see `_let_go`
            log.debug("calls are not waited for: %s", error)

    def _look_at_making(self) -> None:
        while self._started:
            self._making.append(self._started.popleft())
        if self._making:
            _, self._making = ray.wait(self._making, num_returns=len(self._making), timeout=0, fetch_local=False)

    def _let_go(self) -> None:
        """Ray is shut down: what this process owned is no more."""
        self._started.clear()
        self._making = []
        self._names.clear()
        self._address = b""
        self._wanted.clear()
        self._left = True  # keepers come back, tell what they hold, and hear that nobody wants it
        self._rouse()

    def _look(self) -> None:
        if self._left:
            self._left = False
            for keeper in [each for some in self._keepers.values() for each in some]:
                self._lose(keeper)
        while self._arrived:
            keeper = self._arrived.popleft()
            self._keepers.setdefault(keeper.actor_id, []).append(keeper)
            self._selector.register(keeper.sock, selectors.EVENT_READ, keeper)
            self._free(keeper, [number for actor_id, number in self._past if actor_id == keeper.actor_id])
        unwanted: dict[str, list[int]] = {}
        while self._ended:
            actor_id, number = self._ended.popleft()
            self._wanted.discard(number)
            self._past.append((actor_id, number))
            unwanted.setdefault(actor_id, []).append(number)
        for actor_id, numbers in unwanted.items():
            for keeper in list(self._keepers.get(actor_id, ())):
                self._free(keeper, numbers)

    def _serve(self, keeper: _Keeper) -> None:
        """A keeper has told what it holds, or can be told more, or is gone."""
        held = keeper.read()
        if held is None:
            self._lose(keeper)
        else:
            self._free(keeper, [number for number in held if number not in self._wanted])

    def _free(self, keeper: _Keeper, numbers: list[int]) -> None:
        if not keeper.tell(numbers):
            self._lose(keeper)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if keeper.is_behind else 0)
        if self._selector.get_key(keeper.sock).events != events:
            self._selector.modify(keeper.sock, events, keeper)

    def _lose(self, keeper: _Keeper) -> None:
        self._selector.unregister(keeper.sock)
        keeper.sock.close()
        others = [each for each in self._keepers[keeper.actor_id] if each is not keeper]
        if others:
            self._keepers[keeper.actor_id] = others
        else:
            del self._keepers[keeper.actor_id]


class _Keeper:
    """A connection to a process that keeps values for this one. Of the owner's thread alone."""

    def __init__(self, actor_id: str, sock: socket.socket) -> None:
        self.actor_id = actor_id
        self.sock = sock
        self._in = bytearray()
        self._out = bytearray()

    @property
    def is_behind(self) -> bool:
        """Whether not all could be sent yet."""
        return bool(self._out)

    def read(self) -> list[int] | None:
        """The claims whose values it says to hold; None if the connection is over."""
        try:
            data = self.sock.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        self._in += data
        return _whole_numbers(self._in)

    def tell(self, numbers: list[int]) -> bool:
        """Says what is not wanted any more, and what could not be said before; False if the connection is over."""
        self._out += b"".join(map(_NUMBER.pack, numbers))
        try:
            while self._out:
                del self._out[: self.sock.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True


def _notice_silence(sock: socket.socket) -> None:
    """Has the kernel end a connection whose other side can't be reached any more, though it never closed it."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ALIVE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ALIVE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, ALIVE_MISSED)


def _whole_numbers(data: bytearray) -> list[int]:
    """Takes all whole numbers off the data."""
    whole = len(data) // _NUMBER.size * _NUMBER.size
    numbers = [number for (number,) in _NUMBER.iter_unpack(bytes(data[:whole]))]
    del data[:whole]
    return numbers


class Duty:
    """This process as the keeper of values for one owner."""

    def __init__(self, owner: Contact, actor_id: str, free: Callable[[Claim], None]) -> None:
        self._owner = owner
        self._actor_id = actor_id
        self._free = free
        self._held: set[int] = set()
        self._unwanted: collections.OrderedDict[int, None] = collections.OrderedDict()
        """Claims that ended before their values were made."""
        self._lock = threading.Lock()
        self._sock = self._connect()
        self.over = False
        threading.Thread(target=self._run, name="ray_pccl-duty", daemon=True).start()

    def keep(self, number: int) -> bool:
        """Whether the value of this claim is still wanted; if so, its end will be told."""
        with self._lock:
            if number in self._unwanted or self.over:
                self._unwanted.pop(number, None)
                return False
            self._held.add(number)
            return True

    def _connect(self) -> socket.socket:
        meeting = self._owner.dial(SERVICE, self._actor_id)
        meeting.sock.setblocking(True)
        if not meeting.local:
            _notice_silence(meeting.sock)
        return meeting.sock

    def _run(self) -> None:
        while True:
            self._listen()
            if not self._reconnect():
                break
        with self._lock:
            self.over = True
            held, self._held = self._held, set()
        for number in held:
            self._free(Claim(self._owner, number))

    def _listen(self) -> None:
        data = bytearray()
        while True:
            try:
                more = self._sock.recv(1 << 16)
            except OSError:
                return
            if not more:
                return
            data += more
            for number in _whole_numbers(data):
                self._let_go(number)

    def _let_go(self, number: int) -> None:
        with self._lock:
            if number not in self._held:
                self._unwanted[number] = None
                if len(self._unwanted) > REMEMBERED:
                    self._unwanted.popitem(last=False)
                return
            self._held.remove(number)
        self._free(Claim(self._owner, number))

    def _reconnect(self) -> bool:
        """Whether the owner is there after all: then it is told what is kept, of which it may have ended some."""
        ends = time.monotonic() + RECONNECT_S
        while time.monotonic() < ends:
            try:
                sock = self._connect()
            except ConnectionError:
                return False  # nobody is there, or somebody else
            except OSError:
                time.sleep(_RETRY_S)
                continue
            with self._lock:
                self._sock.close()
                self._sock = sock
                try:
                    sock.sendall(b"".join(map(_NUMBER.pack, self._held)))
                except OSError:
                    continue
            return True
        return False


_owner: Owner | None = None
_making = threading.Lock()


def local_owner() -> Owner:
    """This process as an owner."""
    global _owner  # noqa: PLW0603
    with _making:
        if _owner is None:
            _owner = Owner()
        return _owner
