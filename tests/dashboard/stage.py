"""The page of a made-up master, served by the real server on a loop of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from master_actor.core.records import Booted
from master_actor.dashboard.page import LivePage
from ray_pccl.reports import MasterReport
from ray_pccl.testing.waiting import eventually

KEY = b"k" * 32


class Stage:
    """A page that shows what `report` tells. `run` calls something on its loop."""

    def __init__(self, report: Callable[[int], MasterReport], *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.page = LivePage(host, port)
        self._report = report
        self.port = 0

    def run(self, call: Callable[[], Any]) -> Any:
        """Calls it on the loop; what it returns, awaited if it can be."""

        async def within() -> Any:
            answer = call()
            return await answer if asyncio.iscoroutine(answer) else answer

        return asyncio.run_coroutine_threadsafe(within(), self._loop).result(10)

    def open(self, old: Booted | None = None, boot: int = 1, key: bytes = KEY) -> str:
        """Serves the page; returns its address."""

        def begin() -> None:
            self.port = self.page.bind(old)
            identity = Booted(boot, "nonce", "9f3c2b7a11d04e58", "127.0.0.1", 1, key, self.port)
            self.page.open(identity, self._report)

        self.run(begin)
        eventually(lambda: self.page._opening is None or self.page._opening.done(), 10, "the page is served")
        return self.page.url

    def close(self) -> None:
        self.run(self.page.close)

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@contextmanager
def staged(report: Callable[[int], MasterReport], *, host: str = "127.0.0.1") -> Iterator[Stage]:
    """A page that is served while in the block."""
    stage = Stage(report, host=host)
    try:
        stage.open()
        yield stage
    finally:
        stage.close()
        stage.end()
