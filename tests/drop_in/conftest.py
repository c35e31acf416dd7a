"""The Ray and the actors that the tests of this directory share, and a group's name for each test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ray_pccl.testing.cluster import local_ray


@pytest.fixture(scope="package")
def ray_local() -> Iterator[Any]:
    """The plugin's, for all modules of this directory: starting one takes seconds."""
    with local_ray() as ray:
        yield ray


@pytest.fixture(scope="package")
def workers(ray_local: Any) -> Iterator[list[Any]]:
    """Four actors, in no group."""
    from tests.drop_in.workers import start

    yield start(4)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A group's name that no other test has."""
    return str(request.node.name)
