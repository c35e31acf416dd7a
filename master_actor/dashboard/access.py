"""Who may look at the page: on loopback everybody, elsewhere whoever has the token. It decides, without I/O."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie

TOKEN_LENGTH = 32
_PURPOSE = b"ray_pccl live page"
_LOOPBACK_NAMES = {"localhost", "ip6-localhost"}


def token_of(key: bytes) -> str:
    """The page's token. It follows from the master's key, so a restart keeps it; the key does not follow from it."""
    return hmac.new(key, _PURPOSE, hashlib.sha256).hexdigest()[:TOKEN_LENGTH]


def is_loopback(host: str) -> bool:
    """Whether this is an address, or a name, that only this machine can mean."""
    if host.lower() in _LOOPBACK_NAMES:
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def hostname_of(header: str) -> str:
    """The host in a ``Host`` header, without its port and brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0] if header.count(":") <= 1 else header


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not answered."""

    status: int
    reason: str


@dataclass(frozen=True, slots=True)
class Gate:
    """Decides on requests to a page that is bound to `address`: the one that the socket has, not a name for it."""

    address: str
    port: int
    token: str

    @property
    def open_to_all(self) -> bool:
        """Whether no token is asked for."""
        return is_loopback(self.address)

    @property
    def cookie(self) -> str:
        """The cookie that carries the token. Browsers keep cookies by host, and a host may have several masters."""
        return f"ray_pccl_page_{self.port}"

    def refusal(self, headers: Mapping[str, str], query_token: str | None) -> Refusal | None:
        """Why this request must not be answered, or None if it may be."""
        if self.open_to_all:
            # A site anywhere may let its own name point to 127.0.0.1, and would then be let in by the browser to read
            # what is here. Its name gives it away. The port is not looked at, for tunnels that end at another one.
            name = hostname_of(headers.get("Host", ""))
            if not is_loopback(name):
                return Refusal(
                    403, "this page is for this machine only: open it as http://localhost, or through an SSH tunnel"
                )
            return None
        presented = query_token or _bearer(headers.get("Authorization", "")) or self._from_cookie(headers)
        if presented is not None and hmac.compare_digest(presented.encode(errors="replace"), self.token.encode()):
            return None
        return Refusal(401, "this page needs its token: `ray-pccl status` shows the whole address")

    def _from_cookie(self, headers: Mapping[str, str]) -> str | None:
        try:
            found = SimpleCookie(headers.get("Cookie", "")).get(self.cookie)
        except CookieError:
            return None
        return None if found is None else found.value


def _bearer(header: str) -> str | None:
    kind, _, token = header.partition(" ")
    return token.strip() if kind.lower() == "bearer" and token else None


def url_of(host: str, port: int, token: str | None) -> str:
    """The address of the page, as one pastes it into a browser."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/" + ("" if token is None else f"?token={token}")
