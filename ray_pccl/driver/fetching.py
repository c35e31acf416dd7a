"""Values that move between processes.

Not through the actor's task queue: the desk has threads of its own, so a busy actor hands out as well. On one host the
value goes across in a nameless memory file, of which the receiver becomes the only owner; elsewhere over TCP. Every
wait has an end: a holder that died closes its connections, one that is cut off or stopped runs into `PATIENCE_S`
without a byte.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ray_pccl.driver.desk import Contact, local_desk
from ray_pccl.driver.tensors import Bytes, Form, bytes_of, form_of
from ray_pccl.ring import dialing, handover

log = logging.getLogger("ray_pccl.objects")

SERVICE = "fetch"
PATIENCE_S = 30.0


def serve(find: Callable[[str], list[Any]]) -> None:
    """Hands out this process's values from now on. `find` tells the tensors of one, or raises `KeyError`."""

    def hand_out(meeting: dialing.Meeting, name: str) -> None:
        try:
            with meeting.sock:
                meeting.sock.settimeout(PATIENCE_S)
                _send(meeting, name, find)
        except OSError as error:
            log.info("a value was not handed out: %s", error)
        except Exception:  # who waits for it sees the connection close
            log.exception("a value could not be handed out")

    local_desk().services[SERVICE] = hand_out


def _send(meeting: dialing.Meeting, name: str, find: Callable[[str], list[Any]]) -> None:
    try:
        tensors = find(name)
    except KeyError:
        meeting.sock.sendall(handover.HEAD.pack(handover.MISSING, 0))
        return
    forms = [form_of(tensor) for tensor in tensors]
    size = sum(form.room for form in forms)
    if not meeting.local or not size:
        meeting.sock.sendall(handover.HEAD.pack(handover.FOLLOWS, size))
        for form, tensor in zip(forms, tensors, strict=True):
            handover.send_all(meeting.sock, bytes_of(tensor))
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
        socket.send_fds(meeting.sock, [handover.HEAD.pack(handover.HERE, size)], [fd])
    finally:
        os.close(fd)


def fetch(holder: Contact, name: str, forms: Sequence[Form]) -> list[Any]:
    """The tensors of a value that another process holds. Raises `OSError` if they can't be had."""
    meeting = holder.dial(SERVICE, name)
    with meeting.sock:
        meeting.sock.settimeout(PATIENCE_S)
        memory = _receive(meeting, sum(form.room for form in forms))
    tensors, start = [], 0
    for form in forms:
        tensors.append(form.over(memory[start : start + form.room]))
        start += form.room
    return tensors


def _receive(meeting: dialing.Meeting, due: int) -> Bytes:
    what, size, fds = handover.receive_head(meeting)
    try:
        if what == handover.MISSING:
            raise ConnectionError("its process holds it no more")
        if size != due:
            raise ConnectionError(f"its process has {size} bytes, where {due} were announced")
        if what == handover.HERE:
            if not fds or os.fstat(fds[0]).st_size != size:
                raise ConnectionError("its memory did not come along")
            return _mapped(fds[0], size)
        memory = np.empty(size, np.uint8)
        handover.receive_into(meeting.sock, memory)
        return memory
    finally:
        dialing.close_all(fds)


def _mapped(fd: int, size: int) -> Bytes:
    return np.frombuffer(mmap.mmap(fd, size), dtype=np.uint8)
