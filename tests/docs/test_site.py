"""The site is built without a warning, leads nowhere else, and has a place for every public name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

import ray_pccl
import ray_pccl.testing
import ray_pccl.util.collective
from ray_pccl.testing import plugin
from tests.docs.blocks import ROOT

pytestmark = pytest.mark.slow

BUILD_TIMEOUT_S = 100
PARTS = ("mkdocs.yml", "docs", "ray_pccl", "master_actor")


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Builds the documentation of a directory, with warnings as errors."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(root / "mkdocs.yml")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(root)}
    return subprocess.run(
        [*command, "--site-dir", str(site)],
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        cwd=root,
        env=environment,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built once."""
    directory = tmp_path_factory.mktemp("site")
    done = build(ROOT, directory)
    assert done.returncode == 0, done.stderr
    return directory


class Page(HTMLParser):
    """What a page links to, loads, and can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attrs if value}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag == "link" and found.get("rel") != "canonical" and "href" in found:
            self.loads.append(found["href"])
        elif tag in ("script", "img", "iframe") and "src" in found:
            self.loads.append(found["src"])


def html(site: Path) -> Iterator[tuple[Path, Page]]:
    for path in sorted(site.rglob("*.html")):
        if path.name != "404.html":
            yield path, Page(path.read_text())


def test_every_link_and_anchor_leads_somewhere(site: Path) -> None:
    pages = dict(html(site))
    broken = []
    for path, page in pages.items():
        for link in page.links:
            target, fragment = urldefrag(unquote(link))
            if "://" in target or target.startswith("mailto:"):
                continue
            end = (path.parent / target).resolve() if target else path
            if not end.is_file() or (end in pages and fragment not in pages[end].anchors):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert not broken


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loads = [f"{path.name}: {load}" for path, page in html(site) for load in page.loads if "//" in load]
    assert not loads
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.findall(r"url\(\s*['\"]?(?:https?:)?//[^)]*", styles)


def test_what_is_loaded_is_there(site: Path) -> None:
    missing = [
        f"{path.name}: {load}"
        for path, page in html(site)
        for load in page.loads
        if not load.startswith("data:") and not (path.parent / urldefrag(load).url.partition("?")[0]).is_file()
    ]
    assert not missing


def inventory(site: Path) -> set[str]:
    """What the reference has a place for."""
    lines = (site / "objects.inv").read_bytes().split(b"\n", 4)
    return {line.split(" ")[0] for line in zlib.decompress(lines[4]).decode().splitlines()}


def public_names() -> set[str]:
    """Where every public name is defined."""
    names = {
        f"ray_pccl.{ray_pccl._HOME_OF.get(name, 'errors')}.{name}" for name in ray_pccl.__all__ if name != "__version__"
    }
    names |= {f"{getattr(ray_pccl.testing, name).__module__}.{name}" for name in ray_pccl.testing.__all__}
    fixtures = [name for name, value in vars(plugin).items() if type(value).__name__ == "FixtureFunctionDefinition"]
    assert fixtures
    names |= {f"ray_pccl.testing.plugin.{name}" for name in fixtures}
    drop_in = set(ray_pccl.util.collective.__all__) - {"types", "register_collective_backend"}  # the latter is Ray's
    names |= {f"{getattr(ray_pccl.util.collective, name).__module__}.{name}" for name in drop_in}
    return names | {"master_actor.thread.serve", "master_actor.thread.MasterThread"}


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    assert public_names() - inventory(site) == set()


def test_every_method_of_what_users_hold_is_in_the_reference(site: Path) -> None:
    found = inventory(site)
    holders = {
        "ray_pccl.peer.communicator.Communicator": ray_pccl.Communicator,
        "ray_pccl.driver.groups.Group": ray_pccl.Group,
        "ray_pccl.peer.store.Store": ray_pccl.Store,
        "ray_pccl.state.sharing.SharedState": ray_pccl.SharedState,
    }
    inherited = {name for name in vars(ray_pccl.Communicator.__mro__[1]) if not name.startswith("_")}
    missing = {
        f"{home}.{name}"
        for home, cls in holders.items()
        for name in vars(cls)
        if not name.startswith("_") and f"{home}.{name}" not in found
    } | {name for name in inherited if f"ray_pccl.peer.collectives.Collectives.{name}" not in found}
    assert not missing


def test_names_in_sentences_link_to_the_reference(site: Path) -> None:
    links = Page((site / "guides" / "faults.html").read_text()).links
    assert "../reference/errors.html#ray_pccl.errors.PeerLostError" in links
    assert "../reference/settings.html#ray_pccl.settings.Settings.heartbeat_timeout_s" in links


MISTAKES = {
    "a link": ("guides/tuning.md", "[x](nowhere.md)", "nowhere.md"),
    "an anchor": ("guides/tuning.md", "[x](faults.md#no-such-anchor)", "no-such-anchor"),
    "a page that is not in the menu": ("guides/another.md", "# Another", "another.md"),
    "a name": ("reference/settings.md", "::: ray_pccl.settings.NoSuchThing", "NoSuchThing"),
}


@pytest.mark.parametrize("mistakes", [["a link", "an anchor", "a page that is not in the menu"], ["a name"]])
def test_a_mistake_fails_the_build(tmp_path: Path, mistakes: list[str]) -> None:
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, tmp_path / part)
    for page, text, _ in map(MISTAKES.__getitem__, mistakes):
        with (tmp_path / "docs" / page).open("a") as file:
            file.write(f"\n\n{text}\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    unsaid = [mistake for mistake in mistakes if MISTAKES[mistake][2] not in done.stdout + done.stderr]
    assert not unsaid
