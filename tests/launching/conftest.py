"""A file that is good, and what becomes of it when something in it is changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ray_pccl.launching.command import ray_schema
from ray_pccl.launching.validating import Checked, check

EXAMPLES = Path(__file__).parents[2] / "examples" / "cluster"
LOCAL = """\
cluster_name: ours
provider:
    type: local
    head_ip: 10.0.0.1
    worker_ips: [10.0.0.2, 10.0.0.3]
auth:
    ssh_user: someone
    ssh_private_key: ~/.ssh/key
min_workers: 2
max_workers: 2
file_mounts:
    ~/.ray/auth_token: ~/.ray/auth_token
setup_commands:
    - pip install ray-pccl
    - echo 'export RAY_AUTH_MODE=token' >> ~/.bashrc
head_start_ray_commands:
    - ray stop
    - ray start --head --port=6379 --autoscaling-config=~/ray_bootstrap_config.yaml
    - ray-pccl start-master
worker_start_ray_commands:
    - ray stop
    - ray start --address=$RAY_HEAD_IP:6379
"""


def checked(text: str, exists: Callable[[str], bool] = lambda _name: True) -> Checked:
    return check(text, schema=ray_schema(), exists=exists)


def fatal(text: str, exists: Callable[[str], bool] = lambda _name: True) -> list[str]:
    """What is wrong with a text, without advice."""
    return [str(problem) for problem in checked(text, exists).problems if problem.fatal]


def advice(text: str) -> list[str]:
    return [str(problem) for problem in checked(text).problems if not problem.fatal]


@pytest.fixture
def local_with() -> Callable[[str, str], str]:
    """The good file with a part of it replaced; the part has to be there."""

    def replace(old: str, new: str) -> str:
        assert old in LOCAL
        return LOCAL.replace(old, new)

    return replace
