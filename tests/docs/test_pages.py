"""What pages list is complete, and what was made by a script is up to date."""

from __future__ import annotations

import inspect
import re
import runpy
import sys
from pathlib import Path

import pytest

import ray_pccl
from ray_pccl import errors, metrics
from tests.docs.blocks import DOCS, pages

FAULTS = DOCS / "guides" / "faults.md"
OBSERVING = DOCS / "guides" / "observing.md"


def test_the_table_of_settings_is_up_to_date() -> None:
    table = runpy.run_path(str(DOCS / "settings_table.py"))
    page = (DOCS / "guides" / "tuning.md").read_text()
    assert table["with_table"](page) == page, "run python docs/settings_table.py"
    for name in ray_pccl.Settings.__dataclass_fields__:
        assert page.count(f"| `{name}` |") == 1


def test_the_pictures_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(DOCS / "pictures"), *sys.path])
    drawn = runpy.run_path(str(DOCS / "pictures" / "draw.py"))["drawn"]()
    there = {path.name: path.read_text() for path in (DOCS / "pictures").glob("*.svg")}
    assert drawn == there, "run python docs/pictures/draw.py"


def test_every_picture_is_shown_and_has_words_for_who_does_not_see_it() -> None:
    shown = {
        (page.parent / path).resolve(): words
        for page in pages()
        for words, path in re.findall(r"!\[(.*?)\]\((\S+?)\)", page.read_text())
    }
    assert all(words for words in shown.values())
    drawn = {path.resolve() for path in (DOCS / "pictures").glob("*.svg") if not path.stem.endswith("-dark")}
    assert drawn <= set(shown)


def test_every_error_is_in_the_guide_to_faults() -> None:
    classes = [name for name, cls in vars(errors).items() if inspect.isclass(cls) and issubclass(cls, errors.PCCLError)]
    page = FAULTS.read_text()
    assert [name for name in classes if f"`{name}`" not in page] == []


def test_every_metric_is_in_the_guide_to_observing() -> None:
    page = OBSERVING.read_text()
    listed = {name.removeprefix("ray_").removesuffix("_total") for name in re.findall(r"`(ray_pccl_\w+)` \|", page)}
    assert listed == set(metrics.NAMES)


def test_no_page_needs_anything_from_elsewhere_to_show_its_pictures() -> None:
    for page in pages():
        text = Path(page).read_text()
        assert "```mermaid" not in text, f"{page}: mermaid is loaded from a CDN; draw it in docs/pictures"
        assert not re.findall(r"!\[.*?\]\(https?:", text)
