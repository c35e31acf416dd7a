"""Values that move between processes: a counter where they are handed out, and how they are fetched there.

Not through the actor's task queue: the counter has threads of its own, so a busy actor hands out as well. On one host
the value goes across in a nameless memory file, of which the receiver becomes the only owner; elsewhere over TCP. Who
fetches proves the key that came with the ticket first. Every wait has an end: a holder that died closes its
connections, one that is cut off or stopped runs into `PATIENCE_S` without a byte.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ray_pccl.driver.tensors import Bytes, Form, bytes_of, form_of
from ray_pccl.errors import AuthenticationError, ProtocolError
from ray_pccl.ring import dialing

log = logging.getLogger("ray_pccl.objects")

PATIENCE_S = 30.0
_HEAD = struct.Struct("<Bq")
_MISSING, _HERE, _FOLLOWS = range(3)


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a value, and where it hands it out."""

    token: str
    address: str
    key: bytes


class Counter:
    """Hands out the values of this process, from its first value on."""

    def __init__(self, token: str, host: str, find: Callable[[str], list[Any]]) -> None:
        key = secrets.token_bytes(32)
        self._find = find
        self._listeners, address = dialing.listen(f"objects-{token}", host)
        self.holder = Holder(token, str(address), key)
        threading.Thread(target=self._serve, name="ray_pccl-objects", daemon=True).start()

    def _serve(self) -> None:
        while True:
            ready, _, _ = select.select(self._listeners, [], [])
            for listener in ready:
                sock, _ = listener.accept()
                threading.Thread(target=self._hand_out, args=(sock,), name="ray_pccl-object", daemon=True).start()

    def _hand_out(self, sock: socket.socket) -> None:
        try:
            meeting = dialing.accept(sock, self.holder.key, self.holder.token, [])
            with meeting.sock:
                meeting.sock.settimeout(PATIENCE_S)
                self._send(meeting)
        except (OSError, ProtocolError, AuthenticationError) as error:
            log.info("a value was not handed out: %s", error)

    def _send(self, meeting: dialing.Meeting) -> None:
        try:
            tensors = self._find(meeting.peer_id)
        except KeyError:
            meeting.sock.sendall(_HEAD.pack(_MISSING, 0))
            return
        forms = [form_of(tensor) for tensor in tensors]
        size = sum(form.room for form in forms)
        if not meeting.local or not size:
            meeting.sock.sendall(_HEAD.pack(_FOLLOWS, size))
            for form, tensor in zip(forms, tensors, strict=True):
                meeting.sock.sendall(bytes_of(tensor).data)
                meeting.sock.sendall(bytes(form.room - form.nbytes))
            return
        fd = os.memfd_create("ray_pccl-object", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            memory = _mapped(fd, size)
            start = 0
            for form, tensor in zip(forms, tensors, strict=True):
                np.copyto(memory[start : start + form.nbytes], bytes_of(tensor))
                start += form.room
            socket.send_fds(meeting.sock, [_HEAD.pack(_HERE, size)], [fd])
        finally:
            os.close(fd)


def fetch(holder: Holder, object_id: str, forms: Sequence[Form]) -> list[Any]:
    """The tensors of a value that another process holds. Raises `OSError` if they can't be had."""
    try:
        address = dialing.Address.parse(holder.address)
        meeting = dialing.dial(address, dialing.transport_from_env(), holder.key, object_id, [])
    except (ProtocolError, AuthenticationError) as error:
        raise ConnectionError(f"another process answers at its address: {error}") from None
    with meeting.sock:
        meeting.sock.settimeout(PATIENCE_S)
        memory = _receive(meeting, sum(form.room for form in forms))
    tensors, start = [], 0
    for form in forms:
        tensors.append(form.over(memory[start : start + form.room]))
        start += form.room
    return tensors


def _receive(meeting: dialing.Meeting, due: int) -> Bytes:
    head, fds, _, _ = socket.recv_fds(meeting.sock, _HEAD.size, 1) if meeting.local else (b"", [], 0, 0)
    try:
        while len(head) < _HEAD.size:
            more = meeting.sock.recv(_HEAD.size - len(head))
            if not more:
                raise ConnectionError("its process has ended")
            head += more
        what, size = _HEAD.unpack(head)
        if what == _MISSING:
            raise ConnectionError("its process holds it no more")
        if size != due:
            raise ConnectionError(f"its process has {size} bytes, where {due} were announced")
        if what == _HERE:
            if not fds or os.fstat(fds[0]).st_size != size:
                raise ConnectionError("its memory did not come along")
            return _mapped(fds[0], size)
        memory = np.empty(size, np.uint8)
        view = memory.data
        while view:
            count = meeting.sock.recv_into(view)
            if not count:
                raise ConnectionError("its process has ended")
            view = view[count:]
        return memory
    finally:
        dialing.close_all(fds)


def _mapped(fd: int, size: int) -> Bytes:
    return np.frombuffer(mmap.mmap(fd, size), dtype=np.uint8)
