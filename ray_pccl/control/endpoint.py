"""Where a master listens, and the key that proves who may talk to it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from ray_pccl.errors import SettingsError

DEFAULT_PORT = 48148
KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A master's address and key. As a string ``host:port#key``; it pickles.

    The key is a secret: who has it can join groups. ``repr`` does not show it; ``str`` does, because that is the form
    to hand to another process.
    """

    host: str
    """A name or an address, of IPv4 or IPv6."""
    port: int
    """From 1 to 65535."""
    key: bytes = field(repr=False)
    """What both sides prove that they hold."""

    def __post_init__(self) -> None:
        if not self.host or not 0 < self.port < 65536 or not self.key:
            raise SettingsError(f"an endpoint needs a host, a port from 1 to 65535 and a key, not {self!r}")

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}#{self.key.hex()}"

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """The endpoint that `text` describes, in the form that ``str(endpoint)`` gives."""
        address, _, key = text.partition("#")
        host, _, port = address.rpartition(":")
        try:
            return cls(host.removeprefix("[").removesuffix("]"), int(port), bytes.fromhex(key))
        except ValueError:
            shown = address + ("#..." if key else "")
            raise SettingsError(
                f"a master's endpoint reads host:port#key (the key in hexadecimal), not {shown!r}"
            ) from None


def new_key() -> bytes:
    """A fresh random key."""
    return secrets.token_bytes(KEY_BYTES)
