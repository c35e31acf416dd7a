"""A wire between a peer and the master that can be slow, or dead, without being closed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future

from ray_pccl.control.endpoint import Endpoint

_CHUNK_BYTES = 1 << 16
_START_TIMEOUT_S = 10.0
_NO_LINGER = struct.pack("ii", 1, 0)
"""For SO_LINGER: the close of a connection resets it."""


class Relay:
    """Listens on loopback and passes on what comes, both ways, to and from one master. Runs in a thread of its own.

    It is a wire, not a peer of TCP: bytes are never lost in the middle of a connection, as TCP loses none. While it is
    partitioned nothing gets through, neither data nor the end of a connection, and new connections hear nothing. When
    it is healed, what TCP would have sent again arrives, unless the connections are reset.
    """

    def __init__(self, target: Endpoint, *, delay_s: float = 0.0) -> None:
        self._target = target
        self._delay_s = delay_s
        self._open = asyncio.Event()
        self._open.set()
        self._wires: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}
        self._over = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._listening: Future[int] = Future()
        self._thread = threading.Thread(target=self._run, name="ray_pccl-relay", daemon=True)
        self._thread.start()
        port = self._listening.result(_START_TIMEOUT_S)
        self.endpoint = Endpoint("127.0.0.1", port, target.key)
        """The master's endpoint, as seen through the relay."""

    def delay(self, seconds: float) -> None:
        """From now on, what comes is passed on this much later, in order."""

        def change() -> None:
            self._delay_s = seconds

        self._on_loop(change)

    def partition(self) -> None:
        """From now on, nothing gets through."""
        self._on_loop(self._open.clear)

    def heal(self, *, reset: bool = False) -> None:
        """Lets everything through again. With `reset`, connections from before break, as when TCP has given up."""

        def change() -> None:
            if reset:
                for wire, ends in self._wires.items():
                    for end in ends:
                        end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
                    wire.cancel()
            self._open.set()

        self._on_loop(change)

    def close(self) -> None:
        """Ends the relay and all connections through it."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join(_START_TIMEOUT_S)

    # ------------------------------------------------------------------------------------------------- the loop

    def _on_loop(self, function: Callable[[], object]) -> None:
        """Returns when the loop has done it: a fault has happened when its call returns."""
        done: Future[None] = Future()

        def carry_out() -> None:
            function()
            done.set_result(None)

        self._loop.call_soon_threadsafe(carry_out)
        done.result(_START_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self._listening.set_result(server.sockets[0].getsockname()[1])
        await self._over.wait()
        server.close()
        wires = list(self._wires)
        for wire in wires:
            wire.cancel()
        await asyncio.gather(*wires, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = asyncio.current_task()
        assert wire is not None
        self._wires[wire] = writers = [writer]
        try:
            await self._open.wait()
            far_reader, far_writer = await asyncio.open_connection(self._target.host, self._target.port)
            writers.append(far_writer)
            async with asyncio.TaskGroup() as directions:
                directions.create_task(self._pump(reader, far_writer))
                directions.create_task(self._pump(far_reader, writer))
        except (OSError, ExceptionGroup, asyncio.CancelledError):
            pass  # one end is gone, or the wire was cut: both ends find out
        finally:
            del self._wires[wire]
            for end in writers:
                end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes on one direction until its end, and then ends the wire."""
        underway: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                due, data = await underway.get()
                await asyncio.sleep(due - self._loop.time())
                await self._open.wait()
                if not data:
                    raise ConnectionResetError("the other end has closed")
                writer.write(data)
                await writer.drain()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(deliver())
            while True:
                try:
                    data = await reader.read(_CHUNK_BYTES)
                except OSError:
                    data = b""
                underway.put_nowait((self._loop.time() + self._delay_s, data))
                if not data:
                    return
