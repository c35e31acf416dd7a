"""A thousand members: no task of the page over 50 ms, at least 30 frames a second, while a report comes each second."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.dashboard.made_up import MadeUpMaster, thousand
from tests.dashboard.stage import Stage, staged

pytestmark = pytest.mark.slow

ATTEMPTS = 2
WATCHED_MS = 3000
LONGEST_TASK_MS = 50
FEWEST_FRAMES_PER_S = 30
WATCH = """
window.tasks = [];
new PerformanceObserver((list) => { for (const entry of list.getEntries()) window.tasks.push(entry.duration); })
  .observe({ type: "longtask", buffered: true });
window.frames_seen = 0;
const count = () => { window.frames_seen += 1; requestAnimationFrame(count); };
requestAnimationFrame(count);
"""


@contextmanager
def _living(master: MadeUpMaster, stage: Stage) -> Iterator[None]:
    """The master lives on, second by second, with a death in each third one."""
    ended = threading.Event()

    def live() -> None:
        number = 0
        while not ended.wait(1.0):
            number += 1
            stage.run(master.second)
            if number % 3 == 0:
                stage.run(lambda: master.kill(500))

    thread = threading.Thread(target=live)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _watched(page: Any) -> tuple[float, float]:
    """The longest task in ms, and frames per second, while somebody uses the page."""
    page.evaluate("window.tasks.length = 0; window.frames_seen = 0; window.began = performance.now()")
    box = page.locator("#ring").bounding_box()
    page.locator("#ring").focus()
    for step in range(WATCHED_MS // 100):
        page.mouse.move(box["x"] + box["width"] * (0.2 + 0.015 * step), box["y"] + 60 + step)
        page.keyboard.press("ArrowRight")
        page.evaluate("document.querySelector('.grid-view').scrollTop += 200")
        page.wait_for_timeout(70)
    return page.evaluate(
        "[Math.max(0, ...window.tasks), window.frames_seen / (performance.now() - window.began) * 1000]"
    )


def _opened(open_page: Any, stage: Stage) -> Any:
    page = open_page(stage.page.url, script=WATCH)
    page.wait_for_selector('#connection[data-state="live"]')
    page.wait_for_timeout(300)
    return page


def _longest_by_processor_time(browser: Any, open_page: Any, stage: Stage) -> float:
    """The longest task in ms of the processor: what others take of it is not counted."""
    browser.start_tracing(categories=["devtools.timeline", "disabled-by-default-devtools.timeline"])
    page = _opened(open_page, stage)
    _watched(page)
    events = json.loads(browser.stop_tracing())["traceEvents"]
    page.close()
    ours = {event["pid"] for event in events if f":{stage.port}/static/" in json.dumps(event.get("args", {}))}
    mains = {
        (event["pid"], event["tid"])
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"] == "CrRendererMain" and event["pid"] in ours
    }
    tasks = [
        event["tdur"] / 1000
        for event in events
        if event["name"] == "RunTask" and (event["pid"], event["tid"]) in mains and "tdur" in event
    ]
    assert len(tasks) > 100, "the trace has the page's tasks"
    return max(tasks)


@pytest.mark.parametrize("hosts", [125, 1000])
def test_a_thousand_members_stay_smooth(browser: Any, open_page: Any, hosts: int) -> None:
    master = thousand(hosts)
    most_frames = 0.0
    with staged(master.report) as stage, _living(master, stage):
        for _ in range(ATTEMPTS):
            page = _opened(open_page, stage)
            opening = page.evaluate("Math.max(0, ...window.tasks)")
            longest, frames = _watched(page)
            page.close()
            print(f"{hosts} hosts: longest task {longest:.0f} ms, at first {opening:.0f} ms; {frames:.0f} frames/s")
            if max(opening, longest) <= LONGEST_TASK_MS and frames >= FEWEST_FRAMES_PER_S:
                return
            most_frames = max(most_frames, frames)
        # A machine that is busy stretches every task. Then what the tasks themselves take is what can be judged.
        longest = _longest_by_processor_time(browser, open_page, stage)
        print(f"{hosts} hosts: longest task {longest:.0f} ms of the processor; at best {most_frames:.0f} frames/s")
        assert longest <= LONGEST_TASK_MS
        assert most_frames >= FEWEST_FRAMES_PER_S


def test_a_thousand_members_stay_legible(open_page: Any) -> None:
    master = thousand()
    with staged(master.report) as stage:
        page = open_page(stage.page.url)
        page.wait_for_selector('#connection[data-state="live"]')
        page.wait_for_timeout(300)
        # Only what is seen exists, all of it can be reached, and a thousand joins are one entry.
        assert page.locator(".grid-rows .grid-row").count() < 40
        assert page.locator("#members").get_attribute("aria-rowcount") == "1001"
        assert page.locator('.event[data-kind="joined"]').count() == 1
        page.locator(".grid-view").focus()
        page.keyboard.press("End")
        page.keyboard.press("Enter")
        page.wait_for_timeout(200)
        assert page.locator("#detail-title").inner_text() == "Rank 999"
        assert page.locator(".grid-row.active").inner_text().startswith("999")
