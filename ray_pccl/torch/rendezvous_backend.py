"""Torch's own rendezvous with its state at the master: what `DynamicRendezvousHandler` needs of a backend."""

from __future__ import annotations

import secrets
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, create_handler

from ray_pccl.control.endpoint import Endpoint
from ray_pccl.errors import PCCLError
from ray_pccl.settings import Settings
from ray_pccl.torch.store import PCCLStore

CONNECT_TIMEOUT = timedelta(seconds=60)
NONCE_BYTES = 16
_NEVER = b"never"
"""What no state is equal to, being shorter than a nonce."""


class PCCLRendezvousBackend(RendezvousBackend):
    """Keeps the state of one run under one key of a store.

    A state is stored with a nonce of its writer, and the two together are its fencing token: a writer that read an
    older state is refused, even if a newer one has the same bytes; and one whose write was answered by somebody else's
    equal state is not told that it was its own.

    Args:
        store: Shared by the agents of the run.
        run_id: Names the run.
        name: Under which torch knows the backend.
    """

    def __init__(self, store: PCCLStore, run_id: str, name: str = "pccl-dynamic") -> None:
        if not run_id:
            raise ValueError("the run id must be a non-empty string")
        self._store = store
        self._key = f"rendezvous/{run_id}"
        self._name = name

    @property
    def name(self) -> str:
        """Under which torch knows the backend."""
        return self._name

    def get_state(self) -> tuple[bytes, Any] | None:
        """The state and its fencing token; None if there is none yet."""
        # A get would wait for the key. This writes nothing, and brings back what is there.
        return self._read(self._compare_set(_NEVER, b""))

    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None:
        """Writes the state if the present one's token is still `token` (None: if there is none yet).

        Returns the state that holds then, its token, and whether it is the one given here; None if none holds.
        """
        if token is not None and not isinstance(token, bytes):
            held = self.get_state()
            return None if held is None else (*held, False)
        written = secrets.token_bytes(NONCE_BYTES) + state
        stored = self._compare_set(b"" if token is None else token, written)
        if stored == token and token is not None and self.get_state() is None:
            return None  # the key is not there, and the store says what was expected of it
        held = self._read(stored)
        return None if held is None else (*held, stored == written)

    def _compare_set(self, expected: bytes, desired: bytes) -> bytes:
        try:
            return self._store.compare_set(self._key, expected, desired)
        except PCCLError as error:
            raise RendezvousConnectionError(f"the state of the rendezvous can't be reached: {error}") from error

    @staticmethod
    def _read(stored: bytes) -> tuple[bytes, bytes] | None:
        if stored == _NEVER:
            return None
        if len(stored) < NONCE_BYTES:
            raise RendezvousStateError(f"the state of the rendezvous is corrupt: {stored[:NONCE_BYTES]!r}")
        return stored[NONCE_BYTES:], stored


def dynamic_handler(parameters: RendezvousParameters, endpoint: Endpoint) -> RendezvousHandler:
    """Torch's `DynamicRendezvousHandler`, whose agents share an open group of the master's as their store."""
    settings = Settings.from_env(last_call_s=0.0)
    try:
        group = f"torchrun-dynamic/{parameters.run_id}"
        store = PCCLStore.connect(endpoint, group, timeout=CONNECT_TIMEOUT, settings=settings)
    except PCCLError as error:
        raise RendezvousConnectionError(str(error)) from error
    backend = PCCLRendezvousBackend(store, parameters.run_id, parameters.backend)
    return create_handler(store, backend, parameters)
