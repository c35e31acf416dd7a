"""Reading notebooks: what their cells printed and drew."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: pip install 'ray-pccl[notebooks]'")

FOLDER = Path(__file__).parents[2] / "notebooks"


class Saved:
    """A notebook with its outputs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = nbformat.read(path, as_version=4)
        self.code = [cell for cell in self.content.cells if cell.cell_type == "code"]

    def tagged(self, tag: str) -> Any:
        """The one cell of this tag."""
        (cell,) = [cell for cell in self.code if tag in cell.metadata.get("tags", [])]
        return cell

    def said(self, tag: str) -> str:
        """All text that the cell of this tag printed or returned."""
        return "".join(texts(self.tagged(tag)))

    def returned(self, tag: str) -> Any:
        """The value of that cell's last line."""
        (result,) = [output for output in self.tagged(tag).outputs if output.output_type == "execute_result"]
        return ast.literal_eval(result.data["text/plain"])

    def drew(self, tag: str) -> bool:
        """Whether that cell has a picture."""
        return any("image/png" in output.get("data", {}) for output in self.tagged(tag).outputs)


def texts(cell: Any) -> list[str]:
    """What a cell put out, pictures aside."""
    found: list[str] = []
    for output in cell.outputs:
        found.append(output.get("text", ""))
        found += [value for kind, value in output.get("data", {}).items() if not kind.startswith("image/")]
        found += [*output.get("traceback", [])]
    return found
