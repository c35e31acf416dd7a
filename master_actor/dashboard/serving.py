"""The HTTP server of the page: a few files, the report as JSON, and a stream of it. All of it is read-only.

It shares the master's event loop with the watch over the peers. So nothing here may pile up or take long: connections
and streams are limited in number, files come from memory, and a browser that does not read what it is sent is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from master_actor.dashboard.access import Gate
from master_actor.dashboard.feed import Feed, Report, Update
from ray_pccl.reports import to_json

log = logging.getLogger("ray_pccl.master")

TICK_S = 1.0
MAX_STREAMS = 16
MAX_CONNECTIONS = 96
WRITE_TIMEOUT_S = 10.0
"""A browser that takes longer to read one message is dropped; it dials anew by itself, if it still lives."""
WRITE_BUFFER = 1 << 18
STATIC = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'self'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_COOKIE_AGE_S = 30 * 86400
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class _File:
    data: bytes
    type: str
    tag: str


def _files() -> dict[str, _File]:
    files = {}
    for path in STATIC.iterdir():
        if (kind := TYPES.get(path.suffix)) is not None:
            data = path.read_bytes()
            files[path.name] = _File(data, kind, hashlib.sha256(data).hexdigest()[:16])
    return files


class _TurnedAway(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class PageServer:
    """Serves the page on a socket that listens already."""

    def __init__(self, gate: Gate, life: str, report: Report) -> None:
        self._gate, self._life, self._report = gate, life, report
        self._files = _files()
        self._feed = Feed(report)
        self._turn = asyncio.Lock()
        self._streams: set[asyncio.BaseProtocol] = set()
        """The connections that a stream goes out on."""
        self._connections: dict[asyncio.BaseProtocol, bool] = {}
        """All there are, oldest first, and whether the server knows them yet: it is told a moment after us."""
        self._ticked: asyncio.Future[Update] | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._listener: asyncio.Server | None = None
        app = web.Application(middlewares=[self._guard], client_max_size=1024)
        app.router.add_get("/", self._index)
        app.router.add_get("/favicon.ico", self._icon)
        app.router.add_get("/static/{name}", self._static)
        app.router.add_get("/api/report", self._report_once)
        app.router.add_get("/api/stream", self._stream)
        self._runner = web.AppRunner(
            app, access_log=None, keepalive_timeout=15.0, shutdown_timeout=0.1, handler_cancellation=True
        )

    async def start(self, listening: socket.socket) -> None:
        """Begins to accept connections."""
        await self._runner.setup()
        self._listener = await asyncio.get_running_loop().create_server(self._connect, sock=listening)

    async def stop(self) -> None:
        """Drops every connection, and accepts none any more."""
        if self._listener is not None:
            self._listener.close()
        if self._ticking is not None:
            self._ticking.cancel()
        for connection in list(self._connections):
            _abort(connection)
        await self._runner.cleanup()

    def _connect(self) -> asyncio.BaseProtocol:
        """The handler of one more connection. If there are too many, the oldest that is no stream has to go."""
        assert self._runner.server is not None
        living = set(self._runner.server.connections)
        self._connections = {one: made for one, made in self._connections.items() if one in living or not made}
        if len(self._connections) >= MAX_CONNECTIONS:
            oldest = next((one for one in self._connections if one in living and one not in self._streams), None)
            if oldest is None:
                return _TurnedAway()
            del self._connections[oldest]
            _abort(oldest)
        connection = self._runner.server()
        self._connections[connection] = False
        # Before anybody else is accepted it is among the living, or has come and gone.
        asyncio.get_running_loop().call_soon(self._made, connection)
        return connection

    def _made(self, connection: asyncio.BaseProtocol) -> None:
        if connection in self._connections:
            self._connections[connection] = True

    # ------------------------------------------------------------------------------------------------- requests

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        if (refusal := self._gate.refusal(request.headers, request.query.get("token"))) is not None:
            # Without a token one gets the form that asks for it, and its style: our files are no secret.
            if refusal.status == 401 and request.path == "/":
                return self._file("token.html", request, status=401)
            if refusal.status != 401 or not request.path.startswith("/static/"):
                return web.Response(status=refusal.status, text=refusal.reason + "\n", headers=HEADERS)
        try:
            return await handler(request)
        except web.HTTPException as error:
            error.headers.update(HEADERS)
            raise

    def _file(self, name: str, request: web.Request, *, status: int = 200) -> web.Response:
        file = self._files[name]
        if status == 200 and any(tag.value == file.tag for tag in request.if_none_match or ()):
            return web.Response(status=304, headers=HEADERS | {"ETag": f'"{file.tag}"'})
        response = web.Response(body=file.data, content_type=file.type, charset="utf-8", status=status, headers=HEADERS)
        response.headers["Cache-Control"] = "no-cache"
        response.headers["ETag"] = f'"{file.tag}"'
        return response

    async def _index(self, request: web.Request) -> web.Response:
        response = self._file("index.html", request)
        if not self._gate.open_to_all and "token" in request.query:
            # The page itself, and no redirection to it: a browser that came by a link from elsewhere would not show a
            # strict cookie there. The page's script takes the token out of the address line.
            response.set_cookie(
                self._gate.cookie, self._gate.token, httponly=True, samesite="Strict", path="/", max_age=_COOKIE_AGE_S
            )
        return response

    async def _icon(self, request: web.Request) -> web.Response:
        return self._file("favicon.svg", request)

    async def _static(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self._files:
            raise web.HTTPNotFound(text="there is no such file\n")
        return self._file(name, request)

    async def _report_once(self, request: web.Request) -> web.Response:
        since = _number(request, "since")
        async with self._turn:
            await asyncio.sleep(0)  # whoever asks, and how often: between two reports the peers are listened to
            data = to_json(self._report(since))
        headers = HEADERS | {"Cache-Control": "no-store"}
        return web.Response(body=data, content_type="application/json", charset="utf-8", headers=headers)

    # -------------------------------------------------------------------------------------------------- streams

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: a whole report, then each second what is new. Ends when the browser does not read."""
        if len(self._streams) >= MAX_STREAMS:
            text = f"{MAX_STREAMS} pages are open already: close one\n"
            return web.Response(status=503, text=text, headers=HEADERS)
        since = _number(request, "since") if request.query.get("life") == self._life else 0
        headers = HEADERS | {
            "Content-Type": "text/event-stream",
            "Cache-Control": "no-store",
            "X-Accel-Buffering": "no",
        }
        response = web.StreamResponse(headers=headers)
        self._streams.add(request.protocol)
        if self._ticking is None or self._ticking.done():
            self._feed.advance()  # nobody has looked for a while, and what was kept for the last one is old
            self._ticking = asyncio.get_running_loop().create_task(self._tick())
        try:
            await response.prepare(request)
            if request.transport is not None:
                request.transport.set_write_buffer_limits(high=WRITE_BUFFER)
            await self._follow(response, since)
        except (TimeoutError, ConnectionError):
            log.info("a page that does not read is dropped")
            _abort(request.protocol)
        finally:
            self._streams.discard(request.protocol)
        return response

    async def _follow(self, response: web.StreamResponse, since: int) -> None:
        update = self._feed.whole(since)
        while True:
            tick, last = update.tick, update.last
            frame = b"data: %b\n\n" % update.data
            await asyncio.wait_for(response.write(frame), WRITE_TIMEOUT_S)
            update = await self._next_tick()
            if update.tick != tick + 1:  # it was reading for longer than a tick, and has missed one
                update = self._feed.whole(last)

    async def _next_tick(self) -> Update:
        if self._ticked is None or self._ticked.done():
            self._ticked = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._ticked)

    async def _tick(self) -> None:
        """While anybody looks, a report a second."""
        while self._streams:
            await asyncio.sleep(TICK_S)
            if not self._streams:
                return
            try:
                update = self._feed.advance()
            except Exception:
                log.exception("the live page could not be told the news")
                continue
            if self._ticked is not None and not self._ticked.done():
                self._ticked.set_result(update)


def _number(request: web.Request, name: str) -> int:
    with contextlib.suppress(ValueError):
        return max(0, int(request.query.get(name, "0")))
    raise web.HTTPBadRequest(text=f"{name} has to be a number\n")


def _abort(connection: asyncio.BaseProtocol) -> None:
    transport = getattr(connection, "transport", None)
    if transport is not None:
        transport.abort()
