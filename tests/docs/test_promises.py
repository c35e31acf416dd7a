"""The page of promises is true of the tests: each one named there exists, and each promise has enough of them."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.blocks import DOCS, ROOT

PAGE = DOCS / "promises.md"
PROMISES = 6
TESTS_A_PROMISE, TESTS_A_CLAIM = 3, 2
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@cache
def names_in(path: Path) -> frozenset[str]:
    """The names of a module's tests, read without importing it."""
    tree = ast.parse(path.read_text())
    return frozenset(
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    )


def sections(text: str) -> dict[str, str]:
    """What stands below each numbered heading."""
    parts = re.split(r"^## (\d\. .*)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], (part.partition("\n## ")[0] for part in parts[2::2]), strict=True))


def missing(text: str) -> list[str]:
    """The tests that a text names and that do not exist."""
    return [
        f"{path}::{name}"
        for path, name in _TEST.findall(text)
        if not (ROOT / path).exists() or name not in names_in(ROOT / path)
    ]


def test_every_test_that_is_named_exists() -> None:
    assert missing(PAGE.read_text()) == []


def test_there_is_nothing_else_that_looks_like_a_test() -> None:
    text = PAGE.read_text()
    assert text.count("::test_") == len(_TEST.findall(text))


def test_each_of_the_promises_is_there_with_enough_tests() -> None:
    found = sections(PAGE.read_text())
    assert [title[0] for title in found] == [str(number + 1) for number in range(PROMISES)]
    counts = {title: len(set(_TEST.findall(text))) for title, text in found.items()}
    assert min(counts.values()) >= TESTS_A_PROMISE, counts


@pytest.mark.parametrize("title", sections(PAGE.read_text()))
def test_every_claim_has_tests_of_its_own(title: str) -> None:
    parts = re.split(r"^\*\*(.*?)\*\*$", sections(PAGE.read_text())[title], flags=re.MULTILINE | re.DOTALL)
    counts = {claim: len(_TEST.findall(tests)) for claim, tests in zip(parts[1::2], parts[2::2], strict=True)}
    assert counts and min(counts.values()) >= TESTS_A_CLAIM, counts


def test_the_promises_are_those_of_the_guide() -> None:
    guide = re.findall(r"^(\d)\. \*\*(.*?)\*\*", (DOCS / "guides" / "faults.md").read_text(), flags=re.MULTILINE)
    page = [(title[0], title[3:]) for title in sections(PAGE.read_text())]
    assert [(number, said.removesuffix(".")) for number, said in guide] == [
        (number, {"5": "A mistake is an error on every peer"}.get(number, said)) for number, said in page
    ]


def test_a_test_that_does_not_exist_is_found() -> None:
    assert missing("`tests/docs/test_promises.py::test_nothing_of_the_kind`") != []
    assert missing("`tests/docs/test_nowhere.py::test_nothing`") != []
    assert missing("`tests/docs/test_promises.py::test_a_test_that_does_not_exist_is_found`") == []
