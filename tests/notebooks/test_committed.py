"""What is committed of the notebooks: outputs that are there, are of this code, and tell nothing of a machine."""

from __future__ import annotations

import base64
import re
import socket
import sys

import pytest

from tests.notebooks.saved import FOLDER, Saved, texts

NAMES = ("tour", "fault_lab", "benchmark")
MACHINE = re.compile(
    r"/(home|root|tmp|work|usr|opt|var|mnt|srv|Users|private)/"  # its folders
    r"|\b(?!127\.)\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}\b"  # its addresses
    r"|\b(vm|ip)-[0-9a-f]"  # its name, as clouds give it
)
MOST_BYTES = 600_000
MOST_LINES = 40


@pytest.fixture(params=NAMES)
def notebook(request: pytest.FixtureRequest) -> Saved:
    return Saved(FOLDER / f"{request.param}.ipynb")


def test_the_notebooks_are_those_that_are_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(NAMES)


def test_every_cell_was_run_once_from_top_to_bottom_and_without_error(notebook: Saved) -> None:
    assert [cell.execution_count for cell in notebook.code] == list(range(1, len(notebook.code) + 1))
    outputs = [output for cell in notebook.code for output in cell.outputs]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output.text for output in outputs if output.get("name") == "stderr"]


def test_outputs_are_of_the_code_that_is_there_and_of_the_long_form(
    notebook: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import execute

    assert notebook.content.metadata.ray_pccl == {
        "sources": execute.sources_digest(notebook.content),
        "short": False,
    }, "the notebook's code, lab.py or pictures.py has changed since it was run: `make notebooks`"
    sys.modules.pop("execute")


def test_pictures_are_there_and_of_modest_size(notebook: Saved) -> None:
    pictures = [
        base64.b64decode(output.data["image/png"])
        for cell in notebook.code
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]
    assert len(pictures) >= 3
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert notebook.path.stat().st_size < MOST_BYTES


def test_outputs_tell_nothing_of_the_machine_and_hold_no_warnings(notebook: Saved) -> None:
    for text in (text for cell in notebook.code for text in texts(cell)):
        assert not MACHINE.search(text), text
        assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", text), text
        assert "Warning" not in text and "\x1b[" not in text


def test_cells_are_short_enough_to_be_read(notebook: Saved) -> None:
    assert max(len(cell.source.splitlines()) for cell in notebook.code) <= MOST_LINES


@pytest.mark.parametrize("text", ["/tmp/ray/session", "at 10.0.3.7:48148", "peer vm-5ab1-4711", "/home/me/x.py"])
def test_what_would_tell_of_a_machine_is_found(text: str) -> None:
    assert MACHINE.search(text)
