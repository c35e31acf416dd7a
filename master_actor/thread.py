"""A master in a thread of this process: what `serve`, the Ray actor and the command line all run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import TypeVar

from master_actor.core.actions import ExpectationChanged
from master_actor.dashboard.page import LivePage
from master_actor.journal import FileStorage, Journal, MemoryStorage, Storage
from master_actor.server import Server
from ray_pccl.control.endpoint import Endpoint
from ray_pccl.errors import UsageError
from ray_pccl.reports import MasterReport
from ray_pccl.settings import Settings
from ray_pccl.types import GroupStatus

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
DESCRIBE_TIMEOUT_S = 5.0
_T = TypeVar("_T")


class MasterThread:
    """Runs a `Server` on an event loop of its own.

    As a context manager it gives the `Endpoint`. Leaving it ends the master: for good if its journal ends with it, so
    that peers get `MasterStoppedError`; silently if the journal stays, so that the next master on it finds the groups
    as they were.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        storage: Storage | None = None,
        key: bytes | None = None,
        settings: Settings | None = None,
        dashboard_host: str | None = None,
        dashboard_port: int | None = None,
    ) -> None:
        self._durable = storage is not None
        self._storage = storage if storage is not None else MemoryStorage()
        self._host, self._port, self._key = host, port, key
        self._settings = settings if settings is not None else Settings.from_env()
        self._page = LivePage(dashboard_host, dashboard_port) if dashboard_host else None
        self._started: Future[Endpoint] = Future()
        self._stop: tuple[bool, str | None] = (False, None)
        self._ending: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="ray_pccl-master", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.server: Server
        self.superseded = threading.Event()

    def start(self) -> Endpoint:
        """Starts the master and returns where it listens; raises what kept it from starting."""
        if self._thread.ident is not None:
            raise UsageError("this master was started already; make a new one")
        self._thread.start()
        return self._started.result(START_TIMEOUT_S)

    def stop(self, reason: str | None = None) -> None:
        """Ends the master. With a reason it ends for good: peers are told, and the journal is erased."""
        self._end(crash=False, reason=reason)

    def crash(self) -> None:
        """Ends the master as a SIGKILL of its process would. For tests."""
        self._end(crash=True, reason=None)

    def evict(self, peer_id: str, reason: str) -> None:
        """Puts a peer out of its group; it gets `PeerEvictedError` with the reason."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.server.evict, peer_id, reason)

    def describe(self, prefix: str) -> list[GroupStatus]:
        """Every group, with what its store holds under keys of this prefix."""
        return self._ask(lambda: self.server.core.describe(prefix))

    def company(self) -> tuple[bool, bool]:
        """Whether some group has members, or peers that wait; and whether one ever had members."""

        def look() -> tuple[bool, bool]:
            groups = self.server.core.groups.values()
            here = any(group.living or len(group.room) for group in groups)
            return here, any(group.durable.epoch for group in groups)

        return self._ask(look)

    def report(self, since: int = 0) -> MasterReport:
        """All that onlookers may know, with the happenings after that number."""
        return self._ask(lambda: self.server.report(since))

    def _ask(self, question: Callable[[], _T]) -> _T:
        """What a function returns, or raises, on the server's loop."""
        assert self._loop is not None
        answer: Future[_T] = Future()

        def run() -> None:
            try:
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return answer.result(DESCRIBE_TIMEOUT_S)

    @property
    def page_url(self) -> str:
        """Where the live page is, with its token if it needs one; empty if there is none."""
        return "" if self._page is None else self._page.url

    def expect(self, group: str, number: int) -> None:
        """So many peers are to be waited for while the group forms."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.server.handle, ExpectationChanged(group, number))

    def join(self) -> None:
        """Waits until the master has ended."""
        self._thread.join()

    def __enter__(self) -> Endpoint:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(None if self._durable else "the master was stopped")

    def _end(self, *, crash: bool, reason: str | None) -> None:
        self._stop = (crash, reason)
        if self._loop is not None and self._ending is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ending = asyncio.Event()
        self.server = Server(
            Journal(self._storage),
            self._settings,
            host=self._host,
            port=self._port,
            key=self._key,
            on_superseded=self._on_superseded,
            page=self._page,
        )
        self._started.set_result(await self.server.start())
        await self._ending.wait()
        crash, reason = self._stop
        await (self.server.crash() if crash else self.server.stop(reason))

    def _on_superseded(self) -> None:
        assert self._ending is not None
        self.superseded.set()
        self._ending.set()


def serve(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    journal: str | None = None,
    key: bytes | None = None,
    settings: Settings | None = None,
    dashboard_host: str | None = None,
    dashboard_port: int | None = None,
) -> MasterThread:
    """Makes a master in a thread of this process, outside Ray; as a context manager it gives the endpoint.

    Args:
        host: The address to bind; loopback unless told otherwise.
        port: The port; 0 takes the one of the last run on this journal, or any.
        journal: A file that lets the next `serve` on it go on with the same groups, epochs, key and port.
        key: The key that peers must prove; a random one, or the journal's, if not given.
        settings: How long to wait for what; the environment's if not given.
        dashboard_host: The address to bind the live page to, such as 127.0.0.1; there is none if not given. Elsewhere
            than on loopback it asks for a token, which is in the address that `report().dashboard` tells.
        dashboard_port: The page's port; if not given the one of the last run on this journal, or 48149, or any.
    """
    storage = None if journal is None else FileStorage(journal)
    return MasterThread(
        host=host,
        port=port,
        storage=storage,
        key=key,
        settings=settings,
        dashboard_host=dashboard_host,
        dashboard_port=dashboard_port,
    )
