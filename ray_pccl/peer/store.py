"""The group's key-value store, as its members use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ray_pccl.control.messages import Reply, StoreOp
from ray_pccl.errors import SettingsError
from ray_pccl.settings import check_timeout

Value = bytes | str


class Requester(Protocol):
    """Sends one request to the store and waits for its answer."""

    def __call__(
        self,
        op: StoreOp,
        *,
        keys: tuple[str, ...] = (),
        values: tuple[bytes, ...] = (),
        amount: int = 0,
        timeout_s: float = 0.0,
    ) -> Reply:
        """The answer; raises what the master refused it with."""
        ...


class Store:
    """Small values that the members of a group share, kept by the master for as long as the group lives.

    Values are bytes; text is stored as UTF-8. A key is at most a few hundred characters and a value at most 4 MiB:
    tensors belong in collectives. Everything counts once, even if the master is restarted in the middle of it. Every
    call raises `NotConnectedError`, `PeerEvictedError`, `MasterStoppedError` or `MasterUnreachableError` rather than
    waiting for ever.
    """

    def __init__(self, request: Requester, default_timeout_s: Callable[[], float]) -> None:
        self._request = request
        self._default_timeout_s = default_timeout_s

    def set(self, key: str, value: Value) -> None:
        """Stores a value."""
        self._request(StoreOp.SET, keys=(key,), values=(_as_bytes(value),))

    def get(self, key: str, timeout: float | None = None) -> bytes:
        """The key's value, as soon as there is one; `StoreTimeoutError` after `timeout` seconds."""
        return self.multi_get([key], timeout)[0]

    def wait(self, keys: Sequence[str], timeout: float | None = None) -> None:
        """Returns when all keys are there; `StoreTimeoutError`, naming the missing ones, after `timeout` seconds."""
        self._request(StoreOp.WAIT, keys=_as_keys(keys), timeout_s=self._patience(timeout))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there now."""
        return self._request(StoreOp.CHECK, keys=_as_keys(keys)).flag

    def add(self, key: str, amount: int) -> int:
        """Adds to the number in the key (0 if there is none) and returns the sum. Atomic."""
        return self._request(StoreOp.ADD, keys=(key,), amount=amount).amount

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        """Stores `desired` if the key holds `expected`; returns what it holds then. Atomic.

        A key that does not exist matches an empty `expected`; with any other it stays absent, and `expected` is
        returned, as in torch.
        """
        values = (_as_bytes(expected), _as_bytes(desired))
        return self._request(StoreOp.COMPARE_SET, keys=(key,), values=values).values[0]

    def delete(self, key: str) -> bool:
        """Removes a key; tells whether it was there."""
        return self._request(StoreOp.DELETE, keys=(key,)).flag

    def append(self, key: str, value: Value) -> None:
        """Adds bytes to the end of the key's value. Atomic."""
        self._request(StoreOp.APPEND, keys=(key,), values=(_as_bytes(value),))

    def multi_get(self, keys: Sequence[str], timeout: float | None = None) -> list[bytes]:
        """The values of several keys, as soon as all are there."""
        reply = self._request(StoreOp.GET, keys=_as_keys(keys), timeout_s=self._patience(timeout))
        return list(reply.values)

    def multi_set(self, items: Mapping[str, Value]) -> None:
        """Stores several values."""
        self._request(StoreOp.SET, keys=tuple(items), values=tuple(map(_as_bytes, items.values())))

    def num_keys(self) -> int:
        """How many keys there are."""
        return self._request(StoreOp.NUM_KEYS).amount

    def _patience(self, timeout: float | None) -> float:
        return check_timeout(self._default_timeout_s() if timeout is None else timeout, "the store")


def _as_bytes(value: Value) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _as_keys(keys: Sequence[str]) -> tuple[str, ...]:
    if isinstance(keys, str):
        raise SettingsError(f"keys are a list of strings, not the string {keys!r}: write [{keys!r}]")
    return tuple(keys)
