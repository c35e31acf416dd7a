"""What the demo shows: a progress bar with lines of events above it, a table at the end, and a picture.

Without a terminal the bar becomes a plain line every two seconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

PLAIN_EVERY_S = 2.0
RATE_OVER_S = 1.0


class Happening(NamedTuple):
    """A line of the table at the end."""

    what: str
    until: str
    milliseconds: float
    remark: str


class Mark(NamedTuple):
    """Something to mark in the picture."""

    at: float
    label: str
    color: str
    lasted_s: float = 0.0


class Display:
    """The screen, for as long as the training runs: ``with Display(steps) as display``."""

    def __init__(self, steps: int) -> None:
        self.console = Console()
        if not self.console.is_terminal:
            self.console = Console(width=150)
        columns = (
            "step {task.completed:.0f}",
            "loss {task.fields[loss]:.3f}",
            "{task.fields[members]} members",
            "{task.fields[rate]:.0f} steps/s",
        )
        texts = [TextColumn("[bold]training"), BarColumn(30), *map(TextColumn, columns), TimeElapsedColumn()]
        self._bar = Progress(*texts, console=self.console, disable=not self.console.is_terminal, transient=True)
        self._task = self._bar.add_task("training", total=steps, start=False, loss=0.0, members=0, rate=0.0)
        self._seen: list[tuple[float, int]] = []
        self._plain_due = 0.0
        self._began = 0.0

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, text: str, style: str = "") -> None:
        """An event, with the seconds since the training began."""
        since = f"{time.monotonic() - self._began:6.2f} s" if self._began else " " * 8
        self.console.print(Text(f"{since}  {text}", style=style))

    def progress(self, step: int, loss: float, members: int) -> None:
        """How far the training is."""
        now = time.monotonic()
        if not self._began:
            self._began = now
            self._bar.start_task(self._task)
        self._seen = [(at, had) for at, had in self._seen if now - at <= RATE_OVER_S] + [(now, step)]
        since, had = self._seen[0]
        elapsed = now - since
        rate = (step - had) / elapsed if elapsed else 0.0
        self._bar.update(self._task, completed=step, loss=loss, members=members, rate=rate)
        if self._bar.disable and now >= self._plain_due and elapsed:
            self._plain_due = now + PLAIN_EVERY_S
            self.say(f"step {step}, loss {loss:.3f}, {members} members, {rate:.0f} steps/s")

    def table(self, happenings: Sequence[Happening], title: str) -> None:
        """What happened, with milliseconds."""
        table = Table(title=title, title_justify="left", title_style="bold")
        table.add_column("what happened")
        table.add_column("until", overflow="fold")
        table.add_column("ms", justify="right", style="bold")
        table.add_column("and", overflow="fold")
        for what, until, milliseconds, remark in happenings:
            table.add_row(what, until, f"{milliseconds:,.1f}", remark)
        self.console.print()
        self.console.print(table)


def draw(
    file: Path, times: Sequence[float], losses: Sequence[float], members: Sequence[int], marks: Sequence[Mark]
) -> None:
    """The loss and the number of members over time, with what happened. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    began = times[0]
    seconds = [at - began for at in times]
    figure, (top, bottom) = pyplot.subplots(
        2, 1, sharex=True, figsize=(10, 6), height_ratios=[3, 1], layout="constrained"
    )
    top.plot(seconds, losses, color="tab:blue", linewidth=1.2)
    top.set(ylabel="loss, mean of all contributors", yscale="log")
    top.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    top.yaxis.set_major_formatter(ScalarFormatter())
    top.yaxis.set_minor_formatter(NullFormatter())
    top.set_title(f"{len(times)} steps of data-parallel training on Ray actors, which never stopped", loc="left")
    bottom.step(seconds, members, where="post", color="black", linewidth=1.5)
    bottom.set(xlabel="seconds since the first step", ylabel="contributors", ylim=(0, max(members) + 1))
    bottom.set_yticks(range(max(members) + 2))
    for mark in marks:
        for axes in (top, bottom):
            axes.axvline(mark.at - began, color=mark.color, linestyle="--", linewidth=1.2)
            if mark.lasted_s:
                axes.axvspan(
                    mark.at - began, mark.at + mark.lasted_s - began, color=mark.color, alpha=0.12, linewidth=0
                )
        top.annotate(mark.label, (mark.at - began, 0.98), xycoords=("data", "axes fraction"), xytext=(4, 0),
                     textcoords="offset points", color=mark.color, va="top", fontsize=9)  # fmt: skip
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.margins(x=0.01)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
