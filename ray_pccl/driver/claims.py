"""How long a value is kept: until nobody, in whichever process, holds a reference to its ObjectRef any more.

Only the *owner* of a ref, the process that called the method, hears from Ray when that is so. It passes a claim along
with each call. The actor that keeps the value of a claim tells the owner so, over a connection that stays, and is told
when the value is not wanted any more. *Who dies between these lines?* An owner that is gone wants nothing any more:
Ray itself gives up the objects of an owner that died. A keeper that is gone keeps nothing. A ref that is dropped
before its value is made: the owner finds no such claim when the keeper tells it, and frees it at once.
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

from ray_pccl.driver import internals
from ray_pccl.driver.desk import Contact, local_desk
from ray_pccl.ring import dialing

log = logging.getLogger("ray_pccl.objects")

SERVICE = "claims"
RECONNECT_S = 10.0
"""How long a keeper tries to reach an owner whose connection broke, before it takes it for dead."""
BATCH_S = 0.005
"""Freeing can wait for a moment: what happens within it is dealt with at once, and disturbs the caller once."""
_RETRY_S = 0.2
_NUMBER = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to a value that is about to be made."""

    owner: Contact
    number: int

    def __str__(self) -> str:
        return f"{self.owner.token}-{self.number}"


class Owner:
    """This process as the owner of refs."""

    def __init__(self) -> None:
        desk = local_desk()
        self._contact = desk.contact
        self._numbers = itertools.count()
        self._wanted: set[int] = set()
        self._kept: dict[int, _Keeper] = {}
        self._unwanted: collections.deque[int] = collections.deque()
        self._arrived: collections.deque[_Keeper] = collections.deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        desk.services[SERVICE] = self._meet
        threading.Thread(target=self._run, name="ray_pccl-owner", daemon=True).start()

    def claim(self) -> Claim:
        """A new claim: to be made before the call that it goes along with."""
        number = next(self._numbers)
        self._wanted.add(number)
        return Claim(self._contact, number)

    def bind(self, claim: Claim, ref: Any) -> None:
        """The claim is that of this ref: it ends when the ref's last copy is gone."""
        if not internals.on_out_of_scope(ref, lambda _: self.end(claim)):
            self.end(claim)

    def end(self, claim: Claim) -> None:
        """Nobody wants the value any more. May be called by any thread, at any moment."""
        self._unwanted.append(claim.number)
        os.eventfd_write(self._wake, 1)

    def _meet(self, meeting: dialing.Meeting, _wish: str) -> None:
        self._arrived.append(_Keeper(meeting.sock))
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        while True:
            ready = self._selector.select()
            time.sleep(BATCH_S)
            for key, events in ready:
                if key.fd == self._wake:
                    os.eventfd_read(self._wake)
                    self._look()
                elif not key.data.serve(events, self._told):
                    self._lose(key.data)
                else:
                    self._selector.modify(key.fileobj, key.data.interest, key.data)

    def _look(self) -> None:
        while self._arrived:
            keeper = self._arrived.popleft()
            self._selector.register(keeper.sock, keeper.interest, keeper)
        while self._unwanted:
            number = self._unwanted.popleft()
            self._wanted.discard(number)
            keeper_of = self._kept.pop(number, None)
            if keeper_of is not None:
                self._free(keeper_of, number)

    def _told(self, keeper: _Keeper, number: int) -> None:
        """A keeper says that it holds the value of a claim."""
        if number in self._wanted:
            self._kept[number] = keeper
        else:
            self._free(keeper, number)

    def _free(self, keeper: _Keeper, number: int) -> None:
        if not keeper.send(number):
            self._lose(keeper)
        elif keeper.sock.fileno() >= 0:
            self._selector.modify(keeper.sock, keeper.interest, keeper)

    def _lose(self, keeper: _Keeper) -> None:
        if keeper.sock.fileno() >= 0:
            self._selector.unregister(keeper.sock)
            keeper.sock.close()
        for number in [number for number, holder in self._kept.items() if holder is keeper]:
            del self._kept[number]


class _Keeper:
    """A connection to a process that keeps values for this one. Of the owner's thread alone."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._in = bytearray()
        self._out = bytearray()

    @property
    def interest(self) -> int:
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)

    def serve(self, events: int, told: Callable[[_Keeper, int], None]) -> bool:
        """Reads and writes what it can; False if the connection is over."""
        try:
            if events & selectors.EVENT_READ:
                data = self.sock.recv(1 << 16)
                if not data:
                    return False
                self._in += data
            whole = len(self._in) // _NUMBER.size * _NUMBER.size
            numbers = [number for (number,) in _NUMBER.iter_unpack(self._in[:whole])]
            del self._in[:whole]
        except BlockingIOError:
            numbers = []
        except OSError:
            return False
        for number in numbers:
            told(self, number)
        return self._flush()

    def send(self, number: int) -> bool:
        """Says that a value is not wanted any more; False if the connection is over."""
        self._out += _NUMBER.pack(number)
        return self._flush()

    def _flush(self) -> bool:
        try:
            while self._out:
                del self._out[: self.sock.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True


class Duty:
    """This process as the keeper of values for one owner."""

    def __init__(self, owner: Contact, free: Callable[[Claim], None]) -> None:
        self._owner = owner
        self._free = free
        self._held: set[int] = set()
        self._lock = threading.Lock()
        self._sock = self._connect()
        self.over = False
        threading.Thread(target=self._run, name="ray_pccl-duty", daemon=True).start()

    def keep(self, number: int) -> None:
        """Tells the owner that the value of this claim is kept here."""
        with self._lock:
            self._held.add(number)
            try:
                self._sock.sendall(_NUMBER.pack(number))
            except OSError as error:  # told again when the connection is there again
                log.debug("the owner of a value can't be told: %s", error)

    def _connect(self) -> socket.socket:
        sock = self._owner.dial(SERVICE).sock
        sock.setblocking(True)
        return sock

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
        data = b""
        while True:
            try:
                more = self._sock.recv(1 << 16)
            except OSError:
                return
            if not more:
                return
            data += more
            whole = len(data) // _NUMBER.size * _NUMBER.size
            for (number,) in _NUMBER.iter_unpack(data[:whole]):
                with self._lock:
                    self._held.discard(number)
                self._free(Claim(self._owner, number))
            data = data[whole:]

    def _reconnect(self) -> bool:
        """Whether the owner is there after all: then it is told anew what is kept."""
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
