"""Anchors at hand: making one takes half a millisecond, so a few are made ahead."""

from __future__ import annotations

import collections
import logging
import threading
from typing import Any

from ray_pccl.driver import internals

log = logging.getLogger("ray_pccl.objects")

SPARE = 8


class Anchors:
    """Hands out anchors, and makes new ones behind the caller's back."""

    def __init__(self) -> None:
        self._spare: collections.deque[Any] = collections.deque()
        self._wanted = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def take(self) -> Any:
        """An ObjectRef of this process whose end is told (`internals.register`)."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._refill, name="ray_pccl-anchors", daemon=True)
                self._thread.start()
        self._wanted.set()
        try:
            return self._spare.popleft()
        except IndexError:
            return internals.new_anchor()

    def _refill(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            while len(self._spare) < SPARE:
                try:
                    self._spare.append(internals.new_anchor())
                except Exception as error:  # whatever Ray raises while it shuts down
                    log.debug("no more anchors are made ahead: %s", error)
                    return
