"""The examples of the driver's side, run as a user runs them: on a Ray of their own, and on a cluster of nodes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.examples.scripts import run_example

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(180)]


def _check_allreduce_refs(output: str) -> None:
    lines = output.splitlines()
    assert "4 actors apply [3.0, 3.0, 3.0, 3.0]" in lines
    assert "the sum begins with [12. 12. 12.] and [12. 12. 12.]" in lines
    (killed,) = [line for line in lines if line.startswith("one was killed: [2.0, 2.0, 2.0, '")]
    assert killed.endswith("Error']")
    assert "3 actors apply [2.0, 2.0, 2.0]" in lines


def _check_rfc(output: str) -> None:
    assert output.splitlines()[-2:] == [
        "[4, 4]",
        "[array([2., 2., 2., 2.], dtype=float32), array([2., 2., 2., 2.], dtype=float32)]",
    ]


def test_refs_are_reduced_on_one_raylet_and_a_death_is_survived() -> None:
    _check_allreduce_refs(run_example("allreduce_refs.py"))


def test_the_examples_of_the_rfc_run_on_one_raylet() -> None:
    _check_rfc(run_example("rfc_collectives.py"))


def test_the_examples_run_on_a_cluster_of_three_nodes(ray_cluster: Any) -> None:
    _check_allreduce_refs(run_example("allreduce_refs.py", "--address", ray_cluster.address))
    for _ in range(2):
        ray_cluster.add_node(num_cpus=2, num_gpus=1, include_dashboard=False)
    _check_rfc(run_example("rfc_collectives.py", "--address", ray_cluster.address))
