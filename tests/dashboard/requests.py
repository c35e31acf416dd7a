"""Requests to a page, byte by byte where it matters."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE_S = 10


def ask(
    port: int, path: str, *, method: str = "GET", host: str = "127.0.0.1", **headers: str
) -> http.client.HTTPResponse:
    """The answer to one request, with its body read into ``.body``."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", host)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        answer.body = answer.read()  # type: ignore[attr-defined]
        return answer
    finally:
        connection.close()


def begin_stream(port: int, query: str = "", *, buffer: int | None = None) -> socket.socket:
    """A connection that asked for the stream, and has read nothing yet."""
    sock = socket.socket()
    if buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    sock.settimeout(PATIENCE_S)
    sock.connect(("127.0.0.1", port))
    sock.sendall(f"GET /api/stream{query} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return sock


def reports(sock: socket.socket) -> Iterator[dict[str, Any]]:
    """The reports of a stream, as they come."""
    with sock.makefile("rb") as file:
        status = file.readline()
        assert b"200" in status, status
        for line in file:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


@contextmanager
def stream(port: int, query: str = "") -> Iterator[Iterator[dict[str, Any]]]:
    """The reports of a stream, until the block is left."""
    sock = begin_stream(port, query)
    try:
        yield reports(sock)
    finally:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)  # the file that it is read through holds it open
        sock.close()
