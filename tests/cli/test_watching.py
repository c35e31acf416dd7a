"""The live table, on a terminal that is not one: what is shown while the master answers, and while it does not."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator

import pytest
from rich.console import Console

from ray_pccl.cli import watching
from ray_pccl.cli.errors import NotFoundError
from ray_pccl.cli.watching import Watching
from ray_pccl.errors import MasterNotFoundError, MasterUnreachableError
from ray_pccl.reports import MasterReport, from_json
from ray_pccl.testing import eventually
from tests.cli import made_up

REPORT = made_up.report(made_up.group())


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    out = io.StringIO()
    monkeypatch.setattr(
        watching,
        "console",
        lambda: Console(file=out, force_terminal=True, width=80, height=24, highlight=False, no_color=True),
    )
    monkeypatch.setattr(watching, "AWAY_S", 0.2)
    monkeypatch.setattr(watching, "REDRAW_S", 0.02)
    return out


def watch(ask: Callable[[], MasterReport], until: Callable[[], bool]) -> None:
    """Watches until a condition holds; then comes Ctrl-C."""
    watcher = Watching(ask, 0.05)
    wait = watcher._next

    def wait_or_be_interrupted(patience_s: float | None) -> None:
        if until():
            raise KeyboardInterrupt
        wait(patience_s)

    watcher._next = wait_or_be_interrupted  # type: ignore[method-assign]
    watcher.run()


def test_it_takes_the_whole_screen_and_gives_it_back(screen: io.StringIO) -> None:
    watch(lambda: REPORT, lambda: "4 members" in screen.getvalue())
    text = screen.getvalue()
    assert text.startswith("\x1b[?1049h") and "\x1b[?1049l" in text


def test_it_survives_a_master_that_is_away(screen: io.StringIO) -> None:
    answers: Iterator[MasterReport | Exception] = iter([REPORT, *[MasterUnreachableError("away")] * 20])
    back = made_up.report(made_up.group(), boot=3)

    def ask() -> MasterReport:
        answer = next(answers, back)
        if isinstance(answer, Exception):
            raise answer
        return answer

    watch(ask, lambda: "start 3" in screen.getvalue())
    assert "away for" in screen.getvalue()
    assert screen.getvalue().index("away for") < screen.getvalue().index("start 3")


def test_without_a_master_at_first_there_is_nothing_to_watch(screen: io.StringIO) -> None:
    def ask() -> MasterReport:
        raise MasterNotFoundError("none")

    with pytest.raises(MasterNotFoundError):
        watch(ask, lambda: False)


def test_a_group_that_is_gone_ends_it(screen: io.StringIO) -> None:
    answers: Iterator[MasterReport] = iter([REPORT])

    def ask() -> MasterReport:
        try:
            return next(answers)
        except StopIteration:
            raise NotFoundError("gone", candidates=()) from None

    with pytest.raises(NotFoundError):
        watch(ask, lambda: False)
    assert "\x1b[?1049l" in screen.getvalue()  # the screen was given back first


def test_large_groups_are_cut_to_the_screen(screen: io.StringIO) -> None:
    large = made_up.report(*(made_up.group(f"group-{number}", members=40) for number in range(2)))
    watch(lambda: large, lambda: "group-1" in screen.getvalue())
    assert "more; --all shows them" in screen.getvalue()


def test_elsewhere_each_report_is_a_line_of_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = threading.Event()
    reports = iter([REPORT, REPORT])

    def ask() -> MasterReport:
        try:
            return next(reports)
        except StopIteration:
            asked.set()
            raise NotFoundError("gone", candidates=()) from None

    with pytest.raises(NotFoundError):
        Watching(ask, 0.05, as_json=True).run()
    eventually(asked.is_set, 5)
    assert [from_json(line) for line in capsys.readouterr().out.splitlines()] == [REPORT, REPORT]
