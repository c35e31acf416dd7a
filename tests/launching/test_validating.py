"""Each mistake in a cluster's file is told once, with its line, its field and a cure, before anything is started."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_pccl.launching.expecting import expected
from tests.launching.conftest import EXAMPLES, LOCAL, advice, checked, fatal

With = Callable[[str, str], str]


def test_a_good_file_has_no_problems() -> None:
    assert checked(LOCAL).problems == ()


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("    head_ip: 10.0.0.1\n", "", 2, "provider.head_ip is missing: add the address"),
        ("    worker_ips: [10.0.0.2, 10.0.0.3]\n", "", 2, "provider.worker_ips is missing: list the addresses"),
        ("10.0.0.3]", "10.0.0.2]", 5, "provider.worker_ips[1] names 10.0.0.2 again: list each machine once"),
        ("10.0.0.3]", "10.0.0.1]", 5, "provider.worker_ips[1] is the head's address, too: list only"),
        ("10.0.0.3]", "7]", 5, "provider.worker_ips[1] is 7: write an address"),
        ("10.0.0.1", "192.0.2.10", 4, "provider.head_ip is 192.0.2.10, as in the example: write yours"),
        ("type: local", "type: locla", 3, "provider.type is 'locla': did you mean local?"),
        ("type: local", "type: mars", 3, "provider.type is 'mars': There are local, aws, gcp"),
        ("    type: local\n", "", 2, "provider.type is missing: say one of local, aws"),
        ("    ssh_user: someone\n", "", 6, "auth.ssh_user is missing: say who logs in"),
        ("min_workers: 2", "min_workers: 3", 9, "min_workers is 3, but worker_ips lists 2: list more machines"),
        ("max_workers: 2", "max_workers: 1", 9, "min_workers is 2, more than max_workers: make it 1 or less"),
        ("min_workers: 2", "min_workers: two", 9, "min_workers is 'two': it must be a number, 0 or more"),
        ("max_workers: 2", "max_workers: two", 10, "max_workers is 'two': it must be of the type integer"),
        ("max_workers: 2", "max_worker: 2", 10, "max_worker is unknown: did you mean max_workers?"),
        ("cluster_name: ours\n", "", 1, "cluster_name is missing: add it"),
        (
            "cluster_name: ours",
            "cluster_name: ours\nfrobnicate: 1",
            2,
            "frobnicate is unknown: Ray knows no such field",
        ),
        ("cluster_name: ours", "cluster_name: ours\ncluster_name: 2", 2, "cluster_name stands there twice, on line 1"),
        ("    - ray-pccl start-master\n", "", 16, "head_start_ray_commands do not start the master: add `ray-pccl"),
        (" --autoscaling-config=~/ray_bootstrap_config.yaml", "", 16, "head_start_ray_commands would start no workers"),
        ("ray start --head", "ray begin --head", 16, "head_start_ray_commands do not start Ray: add `ray start --head"),
        ("    - ray stop\n    - ray start --head", "    - ray-pccl start-master\n    - ray start --head", 16, "before"),
        ("    - ray stop\n", "    - 7\n", 17, "head_start_ray_commands[0] is 7: it must be of the type string"),
        (
            "min_workers: 2",
            "available_node_types: {a: {}}\nmin_workers: 2",
            9,
            "available_node_types is not for machines",
        ),
    ],
)
def test_a_mistake_is_told_with_its_line_and_a_cure(local_with: With, old: str, new: str, line: int, said: str) -> None:
    found = fatal(local_with(old, new))
    assert any(said in problem and problem.startswith(f"line {line}, ") for problem in found), found


def test_several_mistakes_are_told_at_once_in_the_order_of_their_lines() -> None:
    text = (
        LOCAL.replace("10.0.0.1", "192.0.2.1").replace("    ssh_user: someone\n", "").replace("ray-pccl start", "echo")
    )
    assert [problem.split(" ")[2] for problem in fatal(text)] == [
        "provider.head_ip",
        "auth.ssh_user",
        "head_start_ray_commands",
    ]


def test_a_key_that_is_not_there_is_told() -> None:
    (said,) = fatal(LOCAL, exists=lambda name: name != "~/.ssh/key")
    assert said.startswith("line 8, auth.ssh_private_key is ~/.ssh/key, which is not there: name the private key")


def test_a_token_that_is_not_there_is_told_with_the_command_that_makes_one() -> None:
    (said,) = fatal(LOCAL, exists=lambda name: not name.endswith("auth_token"))
    assert said.endswith("which is not there: run `ray get-auth-token --generate` first")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds nothing, not the fields of a cluster"),
        ("- a\n- b", "holds a list"),
        ("just words", "holds a text"),
        ("a: [1, 2\nb: 3", "is no YAML"),
        ("a: 1\n\tb: 2", "line 2, the file is no YAML"),
        ("a: 'open", "is no YAML"),
    ],
)
def test_what_is_no_cluster_at_all_is_told_in_one_line(text: str, said: str) -> None:
    (problem,) = fatal(text)
    assert said in problem and "\n" not in problem
    assert not checked(text).is_good


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "x", "local", "aws", "ray.io/v1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "a", "0"]), inner, max_size=3),
    max_leaves=5,
)
FILES = [LOCAL, (EXAMPLES / "aws.yaml").read_text(), (EXAMPLES / "kuberay.yaml").read_text()]


def _fields(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in steps:
        yield (*path, step)
        yield from _fields(inner, (*path, step))


@settings(deadline=None)
@given(st.data())
def test_no_junk_in_any_field_makes_the_check_itself_fail(data: st.DataObject) -> None:
    config = yaml.safe_load(data.draw(st.sampled_from(FILES)))
    *way, last = data.draw(st.sampled_from(list(_fields(config))))
    place = config
    for step in way:
        place = place[step]
    place[last] = data.draw(JUNK)
    result = checked(yaml.safe_dump(config))
    assert all("\n" not in str(problem) and problem.line > 0 for problem in result.problems)
    if result.is_good and not result.is_kuberay:
        assert expected(result.config).nodes >= 1  # what is good can be used


def test_a_cloud_without_what_ray_asks_the_cloud_for_is_good_only_where_ray_does_so() -> None:
    text = LOCAL.replace("type: local", "type: {0}\n    region: r\n    availability_zone: a\n    project_id: p")
    text = text.replace("    head_ip: 10.0.0.1\n    worker_ips: [10.0.0.2, 10.0.0.3]\n", "").replace(
        "min_workers: 2\n", ""
    )
    text += "head_node_type: big\navailable_node_types:\n    big: {{node_config: {{}}, min_workers: {1}}}\n"
    text = text.replace("$RAY_HEAD_IP", "head")
    assert fatal(text.format("aws", 0)) == []
    assert "available_node_types.big.resources is missing" in fatal(text.format("gcp", 0))[0]
    assert "max_workers is less than all min_workers, 3: make it 3 or more" in fatal(text.format("aws", 3))[0]
    assert "head_node_type is 'big'" in fatal(text.format("aws", 0).replace("    big:", "    small:"))[0]
    assert "provider.region is missing" in fatal(text.format("aws", 0).replace("    region: r\n", ""))[0]
    assert "provider.project_id is missing" in "".join(fatal(text.format("gcp", 0).replace("    project_id: p\n", "")))


def test_machines_that_may_have_the_package_already_get_advice_only(local_with: With) -> None:
    without = local_with("    - pip install ray-pccl\n", "")
    assert fatal(without) == []
    assert "setup_commands do not install ray-pccl on the nodes: add `pip install ray-pccl`" in advice(without)[0]
    head_only = without + "head_setup_commands: [pip install ray-pccl]\n"
    assert "on the workers" in advice(head_only)[0]
    assert advice(head_only + "worker_setup_commands: [uv pip install 'ray_pccl==0.1.0']\n") == []


def test_an_open_cluster_is_advised_against(local_with: With) -> None:
    text = local_with("    - echo 'export RAY_AUTH_MODE=token' >> ~/.bashrc\n", "")
    assert fatal(text) == []
    assert "let in everybody who reaches the cluster's ports: set RAY_AUTH_MODE=token" in advice(text)[0]


def test_advice_does_not_hide_a_mistake_of_the_same_field(local_with: With) -> None:
    text = local_with("    - echo 'export RAY_AUTH_MODE=token' >> ~/.bashrc\n", "").replace(
        "ray-pccl start-master", "echo"
    )
    assert len(fatal(text)) == len(advice(text)) == 1


@pytest.mark.parametrize(
    "start",
    ["ray-pccl start-master", "ray-pccl --debug start-master", "python -m ray_pccl.cli start-master"],
)
def test_the_ways_to_start_the_master_are_known(local_with: With, start: str) -> None:
    assert fatal(local_with("ray-pccl start-master", start)) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cluster_name: a\nnull: 1\n7: 2\n", "line 2, the file has a field without a name: null is no text: put it"),
        ("available_node_types: {1: {}}\n", "line 1, the file has a field without a name: 1 is no text"),
        ("provider: &p {type: local, again: *p}\n", "line 1, the file has a part that contains itself: write it out"),
        ("cluster_name: 2020-13-45\n", "the file holds what YAML can't read (month must be in 1..12): put it into"),
        ("max_workers: !!int many\n", "the file holds what YAML can't read"),
        ("a: " + "[" * 3000 + "]" * 3000, "the file holds what YAML can't read"),
    ],
)
def test_what_no_cluster_has_is_told_of_as_well(text: str, said: str) -> None:
    [problem] = checked(text).problems
    assert problem.fatal and str(problem).startswith(said)
