"""``ray-pccl status --watch``: the report again and again, also while the master is away."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from ray_pccl.cli import report_view
from ray_pccl.cli.errors import NotFoundError
from ray_pccl.cli.options import console
from ray_pccl.cli.status import write_json
from ray_pccl.reports import MasterReport

AWAY_S = 2.0
"""A master that has not answered for this long, beyond the interval, is away."""
REDRAW_S = 0.5
EVENTS = 6
"""How many happenings are shown where there is room for them and nobody said how many."""


class Watching:
    """Asks in a thread of its own, since a master that is being restarted may take long; and shows what came last."""

    def __init__(
        self,
        ask: Callable[[], MasterReport],
        interval_s: float,
        *,
        events: int = 0,
        every_member: bool = False,
        as_json: bool = False,
    ) -> None:
        self._ask, self._interval_s = ask, interval_s
        self._events, self._every_member, self._as_json = events, every_member, as_json
        self._answers: queue.SimpleQueue[MasterReport | Exception] = queue.SimpleQueue()
        self._over = threading.Event()
        self._console = console()
        self._last: MasterReport | None = None
        self._heard_at = time.monotonic()

    def run(self) -> None:
        """Returns at Ctrl-C. Raises what the very first answer was, if that was no report."""
        asking = threading.Thread(target=self._keep_asking, name="ray_pccl-watch", daemon=True)
        asking.start()
        try:
            first = self._answers.get()
            if isinstance(first, Exception):
                raise first
            with contextlib.suppress(KeyboardInterrupt):
                self._show(first)
        except KeyboardInterrupt:
            pass
        finally:
            self._over.set()
            asking.join(1.0)

    def _keep_asking(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            try:
                self._answers.put(self._ask())
            except Exception as error:  # away, whatever it is that Ray says of it
                self._answers.put(error)
            self._over.wait(max(0.05, self._interval_s - (time.monotonic() - began)))

    def _show(self, first: MasterReport) -> None:
        self._hear(first)
        if self._as_json or not self._console.is_terminal:
            while True:
                self._print()
                self._next(None)
        with Live(self._view(), console=self._console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(self._view(), refresh=True)
                self._next(REDRAW_S)

    def _hear(self, report: MasterReport) -> None:
        self._last, self._heard_at = report, time.monotonic()

    def _next(self, patience_s: float | None) -> None:
        """Waits for the next answer; without patience, for the next report."""
        while True:
            try:
                answer = self._answers.get(timeout=patience_s)
            except queue.Empty:
                return
            if isinstance(answer, MasterReport):
                self._hear(answer)
                return
            if isinstance(answer, NotFoundError):  # the group is gone, the master is not
                raise answer
            if patience_s is not None:
                return

    def _print(self) -> None:
        assert self._last is not None
        if self._as_json:
            write_json(self._last)
            return
        self._console.print(self._content(self._events, self._members(None)))
        self._console.print()

    # ------------------------------------------------------------------------------------------- on the whole screen

    def _view(self) -> RenderableType:
        """As many members and happenings as the screen has room for."""
        height = self._console.height - 1
        events = self._events or EVENTS
        for members, number in ((self._members(None), events), (8, events), (3, min(events, 3)), (3, 0), (1, 0)):
            content = self._content(number, members)
            if len(self._console.render_lines(content, pad=False)) < height:
                break
        return content

    def _members(self, shown: int | None) -> int | None:
        return None if self._every_member else shown if shown is not None else report_view.MEMBERS_SHOWN

    def _content(self, events: int, members: int | None) -> RenderableType:
        away_s = time.monotonic() - self._heard_at
        if self._last is None:
            return Text("waiting for the master")
        away = away_s if away_s > self._interval_s + AWAY_S else None
        width = self._console.width
        return report_view.whole(self._last, width=width, events=events, members=members, away_s=away)
