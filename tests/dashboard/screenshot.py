"""``python -m tests.dashboard.screenshot [FILE]``: the picture of the live page in the README, of a made-up group.

Eight members on three hosts, one of which died, was recovered from, and replaced. It is the real page of the real
server in Chromium; only the reports are made up. The type is what this machine has: with the font Inter it looks best.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.dashboard.made_up import MadeUpMaster
from tests.dashboard.stage import staged

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "live-page.png"
SIZE = {"width": 1440, "height": 1090}
DIED_AT, REPLACED_AT, SECONDS = 190, 236, 292


def group() -> MadeUpMaster:
    """A group with five minutes of history, and what there was in it."""
    master = MadeUpMaster(past=False)
    end, master.now = master.now, master.now - SECONDS
    for second in range(SECONDS):
        master.second()
        if second == DIED_AT:
            master.kill(4, took_ms=11.8)
        if second == REPLACED_AT:
            master.join(1)
    master.now = end
    return master


def main() -> None:
    """Takes the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=PICTURE)
    parser.add_argument("--dark", action="store_true")
    arguments = parser.parse_args()
    master = group()
    chosen = master.ring[2].peer_id
    with staged(master.report) as stage, sync_playwright() as driver:
        program = shutil.which("chromium") or shutil.which("google-chrome")
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport=SIZE, color_scheme="dark" if arguments.dark else "light")
        page.goto(stage.page.url)
        page.locator(f'.grid-row:has([title="{chosen}"])').click()
        page.mouse.move(0, 0)
        page.wait_for_timeout(1500)
        arguments.file.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=arguments.file)
        browser.close()
    print(f"{arguments.file}: {arguments.file.stat().st_size // 1024} KB")


if __name__ == "__main__":
    main()
