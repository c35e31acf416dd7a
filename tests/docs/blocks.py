"""The code in the pages: where it stands, and whether it is to be run.

A block of Python is run if ``<!-- run -->`` stands right above it; with ``<!-- run: ray -->`` it needs Ray. The
blocks of a page that are run share their names, in the order of the page. All others are only looked at.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_BLOCK = re.compile(
    r"(?:^[ ]*<!-- run(?P<ray>: ray)? -->\n(?P<run>))?^(?P<indent>[ ]*)```python\n(?P<code>.*?)^[ ]*```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One block of Python."""

    page: Path
    line: int
    code: str
    runs: bool
    needs_ray: bool

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Every page of the documentation."""
    return sorted(DOCS.rglob("*.md"))


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(
            page,
            text.count("\n", 0, match.start("code")) + 1,
            textwrap.dedent(match["code"]),
            runs=match["run"] is not None,
            needs_ray=match["ray"] is not None,
        )
        for match in _BLOCK.finditer(text)
    ]


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^[ ]*```.*?^[ ]*```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
