"""The files of examples/cluster are good as they are, but for what only the user knows."""

from __future__ import annotations

import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from ray_pccl.launching.command import ray_schema
from tests.launching.conftest import EXAMPLES, advice, checked, fatal

OURS = {"192.0.2.10": "10.0.0.1", "192.0.2.11": "10.0.0.2", "192.0.2.12": "10.0.0.3", "your-project-id": "p"}
RAY_UP = ["aws.yaml", "gcp.yaml", "on-premise.yaml"]


def filled_in(name: str) -> str:
    text = (EXAMPLES / name).read_text()
    for placeholder, value in OURS.items():
        text = text.replace(placeholder, value)
    return text


@pytest.mark.parametrize("name", [*RAY_UP, "kuberay.yaml"])
def test_it_is_good_once_the_marked_lines_are_changed(name: str) -> None:
    assert checked(filled_in(name)).problems == ()
    assert checked(filled_in(name)).is_kuberay == (name == "kuberay.yaml")


@pytest.mark.parametrize("name", RAY_UP)
def test_ray_itself_accepts_it(name: str) -> None:
    """Ray's own code, as far as it goes without a cloud: its defaults filled in, and its schema."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((EXAMPLES / name).read_text())
    validate_config(prepare_config(config))
    config.pop("min_workers", None)  # of local machines: Ray takes it out
    jsonschema.validate(config, ray_schema())


@pytest.mark.parametrize("name", ["gcp.yaml", "on-premise.yaml"])
def test_what_only_the_user_knows_is_asked_for_on_lines_that_are_marked(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    asked = [problem for problem in checked(text).problems if problem.fatal]
    assert asked
    for problem in asked:
        assert "# <--" in text.splitlines()[problem.line - 1]


@pytest.mark.parametrize("name", [*RAY_UP, "kuberay.yaml"])
def test_without_its_token_or_its_master_it_is_no_longer_good(name: str) -> None:
    text = filled_in(name)
    open_to_all = re.sub(r"RAY_AUTH_MODE=token|RAY_AUTH_MODE|mode: token", "x", text)
    assert any("let in everybody" in said for said in advice(open_to_all))
    assert any("not start the master" in said for said in fatal(text.replace("start-master", "true")))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("    name: ray-pccl\n", "", "metadata.name is missing"),
        ("apiVersion: ray.io/v1", "apiVersion: v1", "apiVersion is 'v1': write ray.io/v1"),
        ("kind: RayCluster", "kind: RayJob", "kind is 'RayJob': write RayCluster"),
        ("groupName: workers", "groupname: workers", "spec.workerGroupSpecs[0].groupName is missing"),
        ("minReplicas: 2", "minReplicas: 3", "replicas is 2, not between minReplicas and maxReplicas"),
        ("headGroupSpec:", "headGroup:", "spec.headGroupSpec is missing"),
        ("workerGroupSpecs:", "workers:", "spec.workerGroupSpecs is missing"),
        ("containers:", "container:", "template.spec.containers is missing"),
        ("image: rayproject", "picture: rayproject", "containers[0].image is missing"),
        (
            "$KUBERAY_GEN_RAY_START_CMD\n                      ports",
            "true\n                      ports",
            "never starts Ray",
        ),
    ],
)
def test_a_mistake_in_a_file_for_kubernetes_is_told(old: str, new: str, said: str) -> None:
    text = (EXAMPLES / "kuberay.yaml").read_text()
    assert old in text
    assert any(said in problem for problem in fatal(text.replace(old, new))), fatal(text.replace(old, new))


def test_the_readme_names_every_file() -> None:
    text = (EXAMPLES / "README.md").read_text()
    assert all(file.name in text for file in Path(EXAMPLES).iterdir() if file.suffix in (".yaml", ".py"))
