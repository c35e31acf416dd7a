"""A group's key-value store as a `torch.distributed.Store`."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store as _Store

from ray_pccl.control.endpoint import Endpoint
from ray_pccl.errors import PCCLError, StoreError, StoreTimeoutError
from ray_pccl.peer.communicator import Communicator
from ray_pccl.settings import Settings
from ray_pccl.torch.addressing import read_endpoint
from ray_pccl.torch.admitting import Doorman

Value = bytes | bytearray | str
DEFAULT_TIMEOUT = timedelta(seconds=300)
"""What torch's own stores begin with."""
MULTI_SET_BYTES = 4 << 20
"""What is set at once, so that it fits into one message to the master."""


class StoreWaitTimeoutError(StoreTimeoutError, dist.DistStoreError):
    """A key did not appear in time: what torch's own stores raise, and ours."""


class StoreRefusedError(StoreError, dist.DistStoreError):
    """The store refused a request, such as ``add`` on a value that is no number."""


class StoreUnavailableError(PCCLError, dist.DistNetworkError):
    """This process can't use the store: it is no member of the group, or there is no master. The cause says more."""


class PCCLStore(_Store):
    """The key-value store of a communicator's group, for torch.

    It does what `TCPStore` does, with the same results, and goes on through restarts of the master: a request that was
    under way counts once. All members of the group share it, and it lasts as long as the group has a member. `wait`,
    `get` and `multi_get` raise `StoreWaitTimeoutError` (a `dist.DistStoreError`) when their time is up. A value is at
    most 4 MiB. Queues and `list_keys` are not there, as for every store that is written in Python: torch's C++ side
    does not ask it for them.

    C++ keeps only the C++ half of a store; a Python half that nobody holds would be gone, and with it every method. So
    the process holds each `PCCLStore`, and each clone, until its `close()`; and with it its communicator.

    Args:
        communicator: A connected communicator. It stays the caller's: `close()` does not close it.
        timeout: How long waits last, unless told otherwise or by `set_timeout`.
    """

    def __init__(self, communicator: Communicator, *, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        super().__init__()
        self._communicator = communicator
        self._doorman: Doorman | None = None
        self._owns = False
        self.set_timeout(timeout)
        _held[id(self)] = self

    @classmethod
    def connect(
        cls,
        master: Endpoint | str | None = None,
        group: str = "torch.store",
        *,
        world_size: int = 1,
        timeout: timedelta = DEFAULT_TIMEOUT,
        settings: Settings | None = None,
        namespace: str | None = None,
    ) -> PCCLStore:
        """A store with a membership of its own, in a group that is nothing but a store.

        Blocks until `world_size` processes have connected. The group stays open: members admit by themselves whoever
        connects later. A process that was taken for dead joins again with its next call. `close()` leaves the group;
        with its last member the store is gone.

        Args:
            master: An endpoint or its string; else ``RAY_PCCL_MASTER``; else the master of the Ray this process is in.
            group: Who names the same one shares the store.
            world_size: The same on all who connect.
            timeout: For the connecting, and for waits unless told otherwise.
            settings: From ``RAY_PCCL_*`` variables if not given.
            namespace: The Ray namespace of the master, if not the default one.

        Raises:
            StoreUnavailableError: No master, or not enough others in time.
        """
        where = read_endpoint(master or "") if not isinstance(master, Endpoint) else master
        settings = settings if settings is not None else Settings.from_env(last_call_s=0.0)
        communicator = Communicator(
            group, master=where, min_world_size=world_size, settings=settings, namespace=namespace
        )
        doorman = Doorman(communicator)
        try:
            with _as_torch_errors():
                communicator.connect(timeout.total_seconds())
        except BaseException:
            doorman.close()
            communicator.close()
            raise
        doorman.start()
        store = cls(communicator, timeout=timeout)
        store._doorman, store._owns = doorman, True
        return store

    def close(self) -> None:
        """Ends this store, for C++ too. If `connect()` made it, its clones too, and leaves. Safe to call twice."""
        _held.pop(id(self), None)
        if self._owns and self._doorman is not None:
            self._doorman.close()
            self._communicator.close()
            for store in [store for store in list(_held.values()) if store._communicator is self._communicator]:
                _held.pop(id(store), None)

    @property
    def communicator(self) -> Communicator:
        """The membership behind the store."""
        return self._communicator

    @property
    def timeout(self) -> timedelta:
        """How long waits last, unless told otherwise. C++ holds it, where a `PrefixStore` reads and sets it, too."""
        held: timedelta = super().timeout  # type: ignore[misc, unused-ignore]
        return held

    # ------------------------------------------------------------------------------------- one key, or several

    def set(self, key: str, value: Value) -> None:
        """Stores a value."""
        with self._usable():
            self._communicator.store.set(_key(key), _bytes(value))

    def get(self, key: str) -> bytes:
        """The key's value, as soon as there is one."""
        return self.multi_get([key])[0]

    def add(self, key: str, value: int) -> int:
        """Adds to the number in the key (0 if there is none) and returns the sum. Atomic."""
        with self._usable():
            return self._communicator.store.add(_key(key), operator.index(value))

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        """Stores `desired_value` if the key holds `expected_value`, and returns what it holds then. Atomic.

        A key that does not exist matches an empty `expected_value`; with any other it stays absent, and
        `expected_value` is returned.
        """
        with self._usable():
            return self._communicator.store.compare_set(_key(key), _bytes(expected_value), _bytes(desired_value))

    def append(self, key: str, value: Value) -> None:
        """Adds bytes to the end of the key's value. Atomic."""
        with self._usable():
            self._communicator.store.append(_key(key), _bytes(value))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there now."""
        with self._usable():
            return self._communicator.store.check(_keys(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        """Returns when all keys are there."""
        with self._usable():
            self._await(_keys(keys), self._seconds(timeout))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys, as soon as all are there."""
        with self._usable():
            return self._fetch(_keys(keys), self._seconds(None))

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Stores several values; at once, up to 4 MiB of them."""
        names, contents = _keys(keys), [_bytes(value) for value in values]
        if len(names) != len(contents):
            raise StoreRefusedError(f"multi_set of {len(names)} keys and {len(contents)} values: give one for each")
        with self._usable():
            for batch in _batches(dict(zip(names, contents, strict=True))):
                self._communicator.store.multi_set(batch)

    def delete_key(self, key: str) -> bool:
        """Removes a key; tells whether it was there."""
        with self._usable():
            return self._communicator.store.delete(_key(key))

    def num_keys(self) -> int:
        """How many keys there are, whoever set them."""
        with self._usable():
            return self._communicator.store.num_keys()

    def has_extended_api(self) -> bool:
        """Yes: `append`, `multi_get` and `multi_set` are there."""
        return True

    def clone(self) -> PCCLStore:
        """Another handle on the same store, with a timeout of its own. Ends with its own `close()`."""
        twin = PCCLStore(self._communicator, timeout=self.timeout)
        twin._doorman = self._doorman
        return twin

    # The names under which C++ looks for what Python spells otherwise.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    # -------------------------------------------------------------------------------------------------- inside

    def _await(self, keys: list[str], timeout_s: float) -> None:
        """Blocks until all keys are there."""
        self._communicator.store.wait(keys, timeout_s)

    def _fetch(self, keys: list[str], timeout_s: float) -> list[bytes]:
        """The values of all keys, as soon as they are there."""
        try:
            return self._communicator.store.multi_get(keys, timeout_s)
        except StoreTimeoutError:
            raise
        except StoreError:  # they are there, but too much for one answer
            if len(keys) == 1:
                raise
            return [self._communicator.store.get(key, 0.0) for key in keys]

    def _seconds(self, timeout: timedelta | float | None) -> float:
        given = self.timeout if timeout is None else timeout
        return given.total_seconds() if isinstance(given, timedelta) else float(given)

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        """Around every request: a membership of our own that was lost is made anew; errors become torch's."""
        with _as_torch_errors():
            if self._doorman is not None:  # nothing of this call was sent yet, so nothing can count twice
                self._doorman.rejoin(self.timeout.total_seconds())
            yield


_held: dict[int, PCCLStore] = {}


@contextlib.contextmanager
def _as_torch_errors() -> Iterator[None]:
    try:
        yield
    except dist.DistError:  # it is one already
        raise
    except StoreTimeoutError as error:
        raise StoreWaitTimeoutError(str(error), **error.details) from None
    except StoreError as error:
        raise StoreRefusedError(str(error), **error.details) from error
    except PCCLError as error:
        raise StoreUnavailableError(str(error)) from error


def _bytes(value: Value) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if not isinstance(value, bytes | bytearray):
        raise TypeError(f"a store's value is bytes or a string, not {value!r}")
    return bytes(value)


def _key(key: str) -> str:
    if isinstance(key, bytes):
        return key.decode()
    if not isinstance(key, str):
        raise TypeError(f"a store's key is a string, not {key!r}")
    return key


def _keys(keys: Sequence[str]) -> list[str]:
    if isinstance(keys, str | bytes):
        raise TypeError(f"keys are a list of strings, not {keys!r}: write [{keys!r}]")
    return [_key(key) for key in keys]


def _batches(items: dict[str, bytes]) -> Iterator[dict[str, bytes]]:
    batch: dict[str, bytes] = {}
    size = 0
    for key, value in items.items():
        if batch and size + len(value) > MULTI_SET_BYTES:
            yield batch
            batch, size = {}, 0
        batch[key] = value
        size += len(value) + len(key)
    if batch:
        yield batch
