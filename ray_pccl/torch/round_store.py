"""The store that the nodes of a round share, for as long as the round lasts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from ray_pccl.errors import PCCLError, StoreTimeoutError
from ray_pccl.peer.communicator import Communicator
from ray_pccl.torch.store import PCCLStore, Value

LOOK_EVERY_S = 0.1
"""How often a wait looks whether the round still stands."""


class RoundBrokenError(PCCLError, dist.DistStoreError):
    """A node of the round is gone, or the rendezvous was closed: what is waited for will not come."""


class RoundStore(PCCLStore):
    """A `PCCLStore` whose waits end with their round, instead of lasting until their timeout.

    Args:
        communicator: The node's membership.
        broken: Says why the round stands no more; empty while it does.
    """

    def __init__(self, communicator: Communicator, broken: Callable[[], str]) -> None:
        super().__init__(communicator)
        self._broken = broken
        self._written: set[str] = set()

    def forget(self) -> None:
        """Removes what this node has written. To be called when all nodes have left the round."""
        with contextlib.suppress(PCCLError):
            for key in self._written:
                self._communicator.store.delete(key)
        self._written.clear()
        self.close()

    def set(self, key: str, value: Value) -> None:
        """Stores a value."""
        super().set(key, value)
        self._written.add(key)

    def add(self, key: str, value: int) -> int:
        """Adds to the number in the key and returns the sum."""
        total = super().add(key, value)
        self._written.add(key)
        return total

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Stores several values."""
        super().multi_set(keys, values)
        self._written.update(keys)

    def _await(self, keys: list[str], timeout_s: float) -> None:
        self._in_slices(lambda slice_s: super(RoundStore, self)._await(keys, slice_s), timeout_s)

    def _fetch(self, keys: list[str], timeout_s: float) -> list[bytes]:
        self._await(keys, timeout_s)
        return super()._fetch(keys, 0.0)

    def _in_slices(self, wait: Callable[[float], None], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            # Asked before the wait: what was stored before the round broke is still to be found.
            why, left = self._broken(), deadline - time.monotonic()
            try:
                return wait(max(0.0, min(left, LOOK_EVERY_S)))
            except StoreTimeoutError:
                if why:
                    raise RoundBrokenError(f"the round is over: {why}") from None
                if left <= LOOK_EVERY_S:
                    raise
