"""The Ray and the actors that the tests of this directory share."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ray_pccl.testing.cluster import local_ray

if TYPE_CHECKING:
    from tests.driver.workers import Gate


@pytest.fixture(scope="package")
def ray_local() -> Iterator[Any]:
    """The plugin's, for all modules of this directory: starting one takes seconds."""
    with local_ray() as ray:
        yield ray


@pytest.fixture(scope="package")
def workers(ray_local: Any) -> list[Any]:
    """Three plain actors, in no group but those that tests make of them. Not to be killed."""
    from tests.driver.workers import start

    return start(3)


@pytest.fixture(autouse=True)
def no_group_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Destroys the groups that a test left behind when it failed, so that the next one does not meet them."""
    if request.node.get_closest_marker("ray") is None:
        yield
        return
    from ray_pccl.driver.creating import _groups

    before = list(_groups.values())
    yield
    for group in [group for group in _groups.values() if group not in before]:
        group.destroy()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A group's name that no other test has."""
    return re.sub(r"\W", "_", request.node.name)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """A gate that holds actors; opened at the end, so that none is held any longer than its test."""
    from tests.driver.workers import Gate

    gate = Gate(tmp_path)
    yield gate
    gate.open()
