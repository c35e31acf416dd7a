"""The page as the master holds it: a port from the beginning, an HTTP server as soon as that is loaded.

Whatever goes wrong with it is one warning in the log: the master serves its peers all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import socket
from typing import TYPE_CHECKING

from master_actor.core.records import Booted
from master_actor.dashboard.access import Gate, is_loopback, token_of, url_of
from master_actor.dashboard.feed import Report
from master_actor.listening import bind

if TYPE_CHECKING:
    from master_actor.dashboard.serving import PageServer

log = logging.getLogger("ray_pccl.master")

DEFAULT_PAGE_PORT = 48149
CLOSE_TIMEOUT_S = 1.0
_WILDCARDS = {"0.0.0.0", "::"}  # noqa: S104


class LivePage:
    """The page of one master: `bind`, `open`, `close`, in this order, on its event loop. None of them raises."""

    def __init__(self, host: str, port: int | None) -> None:
        self._host, self._port = host, port
        self._socket: socket.socket | None = None
        self._opening: asyncio.Task[None] | None = None
        self._server: PageServer | None = None
        self.url = ""
        """Where the page is, with its token if it needs one; empty if there is none."""

    def bind(self, old: Booted | None) -> int:
        """Takes a port and returns it, 0 if there is none to have.

        The one asked for; else the one of the boot before, so that pages that are open find the master again; else the
        usual one; else any.
        """
        if importlib.util.find_spec("aiohttp") is None:
            log.warning("there is no live page: aiohttp is not installed")
            return 0
        for port in self._candidates(old):
            with contextlib.suppress(OSError, OverflowError, UnicodeError):
                if (listening := bind(self._host, port)) is not None:
                    self._socket = listening
                    return int(listening.getsockname()[1])
        wanted = f"{self._host}:{self._port}" if self._port else self._host
        log.warning("there is no live page: %s can't be had, the port is taken or the address is not ours", wanted)
        return 0

    def _candidates(self, old: Booted | None) -> list[int]:
        if self._port:
            return [self._port]
        usual = [DEFAULT_PAGE_PORT] if self._port is None else []
        return [*([old.dashboard_port] if old is not None and old.dashboard_port else []), *usual, 0]

    def open(self, identity: Booted, report: Report) -> None:
        """Begins to serve what `report` tells; it is called on this event loop."""
        if self._socket is None:
            return
        address, port = self._socket.getsockname()[:2]
        gate = Gate(address, port, token_of(identity.key))
        self.url = url_of(self._shown(identity), port, None if gate.open_to_all else gate.token)
        life = f"{identity.master_id}.{identity.boot}"  # happenings are numbered anew in each
        self._opening = asyncio.get_running_loop().create_task(self._open(self._socket, gate, life, report))

    async def _open(self, listening: socket.socket, gate: Gate, life: str, report: Report) -> None:
        try:
            # Loading takes a fifth of a second, in which peers are to be served; who dials meanwhile has to wait.
            server = await asyncio.get_running_loop().run_in_executor(None, _load)
            self._server = server(gate, life, report)
            await self._server.start(listening)
            log.info("live page on %s", self.url.partition("?")[0])
        except Exception as error:
            self.url = ""
            listening.close()
            log.warning("there is no live page: %s: %s", type(error).__name__, error)

    async def close(self) -> None:
        """Closes the port, and drops whoever looks."""
        self.url = ""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        if self._socket is not None:
            with contextlib.suppress(OSError):  # for all who hold it, forked children too
                self._socket.shutdown(socket.SHUT_RDWR)
        if self._server is not None:
            try:
                await asyncio.wait_for(self._server.stop(), CLOSE_TIMEOUT_S)
            except Exception as error:
                log.warning("the live page did not end cleanly: %s: %s", type(error).__name__, error)
        if self._socket is not None:
            self._socket.close()

    def _shown(self, identity: Booted) -> str:
        """A host to reach the page by: where it listens everywhere, the master's own, or this machine's name."""
        if self._host not in _WILDCARDS:
            return self._host
        own = identity.host
        return own if own not in _WILDCARDS and not is_loopback(own) else socket.gethostname()


def _load() -> type[PageServer]:
    from master_actor.dashboard.serving import PageServer

    return PageServer
