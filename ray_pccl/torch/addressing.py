"""Where a torch program is told to find its master: an argument, a command line, the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ray_pccl.control.endpoint import DEFAULT_PORT, Endpoint
from ray_pccl.errors import SettingsError

MASTER_VARIABLE = "RAY_PCCL_MASTER"
"""``host:port#key``, or ``host:port`` with the key in `KEY_VARIABLE`."""
KEY_VARIABLE = "RAY_PCCL_KEY"
"""The master's key, in hexadecimal."""


def read_endpoint(text: str = "", key: str = "", environ: Mapping[str, str] | None = None) -> Endpoint | None:
    """The endpoint that `text` and `key` name, with what they leave out from the environment.

    `text` is ``host:port#key``, ``host:port``, ``host`` (the port is then the usual one), or empty for the master of
    the environment. None if neither names a master. `SettingsError` if one is named, but not its key.
    """
    environ = os.environ if environ is None else environ
    known = environ.get(MASTER_VARIABLE, "").strip()
    address, _, written_key = (text.strip() or known).partition("#")
    if not address:
        return None
    if ":" not in address.rpartition("]")[2]:
        address = f"{address}:{DEFAULT_PORT}"
    known_address, _, known_key = known.partition("#")
    own_key = known_key if known_key and known_address == address else ""
    key = written_key or key.strip() or environ.get(KEY_VARIABLE, "").strip() or own_key
    if not key:
        raise SettingsError(
            f"the master at {address} has a key, which is missing: write {address}#key, or set {KEY_VARIABLE}, or "
            f"{MASTER_VARIABLE}={address}#key, or for torchrun --rdzv-conf=key=..."
        )
    return Endpoint.parse(f"{address}#{key}")
