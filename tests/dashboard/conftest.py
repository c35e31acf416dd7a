"""A headless Chromium, and pages in it that may not have a single error."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

Open = Callable[..., Any]
"""``open_page(url, **options of the context)`` gives a Playwright page."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, headless. Skips where there is none."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("there is no Chromium on this machine (Debian: apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens pages, and fails the test if one of them had an error or broke its own policy."""
    contexts: list[Any] = []
    errors: list[str] = []

    def open_one(url: str, *, script: str = "", **options: Any) -> Any:
        context = browser.new_context(**({"viewport": {"width": 1440, "height": 900}} | options))
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        # A master that is away is told of in the console by the browser itself.
        page.on(
            "console",
            lambda said: (
                errors.append(said.text) if said.type == "error" and "Failed to load" not in said.text else None
            ),
        )
        if script:
            page.add_init_script(script)
        page.goto(url)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert errors == []
