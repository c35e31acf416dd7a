"""The code of the guides is true: it runs where it says so, and names nothing that does not exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import DOCS, ROOT, Block, blocks, pages, prose
from tests.docs.naming import Reader, unknown_in_prose

READ = [page for page in pages() if "design" not in page.parts]
"""Design pages speak of what is inside."""
_PATH = re.compile(r"\b(?:examples|benchmarks|tests|docs|notebooks)/[\w/.-]+\.(?:py|md|json|ipynb|yaml)\b")


def name_of(page: Path) -> str:
    return str(page.relative_to(DOCS))


def runnable(*, with_ray: bool) -> list[Any]:
    """Pages whose blocks are run, with those blocks; each page as a whole with Ray or without."""
    found = [[block for block in blocks(page) if block.runs] for page in pages()]
    return [
        pytest.param(those, id=name_of(those[0].page))
        for those in found
        if those and any(block.needs_ray for block in those) == with_ray
    ]


def run(those: list[Block]) -> None:
    # A name that no module has: so whatever is defined travels to actors with its code.
    names: dict[str, Any] = {"__name__": "guide"}
    for block in those:
        # The lines count from the top of the page.
        exec(compile("\n" * (block.line - 1) + block.code, str(block.page), "exec"), names)


@pytest.mark.parametrize("those", runnable(with_ray=False))
def test_what_is_marked_as_running_runs(those: list[Block]) -> None:
    run(those)


@pytest.mark.ray
@pytest.mark.parametrize("those", runnable(with_ray=True))
def test_what_is_marked_as_running_on_ray_runs(
    those: list[Block], ray_local: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_local, "init", lambda: None)  # it runs already
    run(those)


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_code_names_only_what_there_is(page: Path) -> None:
    reader = Reader()
    wrong = {str(block): unknown for block in blocks(page) if (unknown := reader.unknown(block.code))}
    assert not wrong


@pytest.mark.parametrize("page", READ, ids=name_of)
def test_sentences_name_only_what_there_is(page: Path) -> None:
    wrong = [unknown for words in re.findall(r"`([^`\n]+)`", prose(page)) for unknown in unknown_in_prose(words)]
    assert not wrong


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_files_that_are_named_exist(page: Path) -> None:
    missing = {path for path in _PATH.findall(page.read_text()) if not (ROOT / path).exists()}
    assert not missing


def test_enough_is_run() -> None:
    assert len(runnable(with_ray=False)) >= 6 and len(runnable(with_ray=True)) >= 2


@pytest.mark.parametrize(
    ("code", "unknown"),
    [
        ("from ray_pccl import Communicatr", ["ray_pccl.Communicatr"]),
        ("import ray_pccl\nray_pccl.all_reduce_refs([])", ["ray_pccl.all_reduce_refs"]),
        ("comm.allreduce(x)", ["comm.allreduce"]),
        ("comm.all_reduce(x, operation=1)", ["comm.all_reduce(operation=)"]),
        ("comm.store.put('k', 'v')", []),  # what an attribute holds is not known
        ("import ray_pccl.util.collective as col\ncol.all_reduce(x)", ["col.all_reduce"]),
        ("from ray_pccl import Settings\nSettings(op_timeout=1)", ["Settings(op_timeout=)"]),
        ("state.revision += 1\nstate.push_revision()", ["state.push_revision"]),
        ("from ray_pccl.testing import eventually\neventually(f, timeout=1)", []),
    ],
)
def test_a_name_that_does_not_exist_is_found(code: str, unknown: list[str]) -> None:
    assert Reader().unknown(code) == unknown


@pytest.mark.parametrize(
    ("words", "unknown"),
    [
        ("ray_pccl.allreduce_ref", ["ray_pccl.allreduce_ref"]),
        ("Communicator.topology()", []),
        ("Communicator.topologie()", ["Communicator.topologie"]),
        ("connect(timeout=60)", []),
        ("PeerGoneError", ["PeerGoneError"]),
        ("TimeoutError", []),
        ("comm.optimise_topology()", ["comm.optimise_topology"]),
        ("make test", []),
    ],
)
def test_a_name_in_a_sentence_that_does_not_exist_is_found(words: str, unknown: list[str]) -> None:
    assert unknown_in_prose(words) == unknown
