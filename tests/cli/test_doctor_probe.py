"""The probe itself: what it sees on this machine, and that it runs where ray_pccl is not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ray_pccl.cli.doctor import probe
from ray_pccl.cli.doctor.collecting import names_of
from ray_pccl.cli.doctor.probe import Probe, dial


@pytest.fixture
def shut_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_two_probes_reach_one_another() -> None:
    told = Probe("127.0.0.1").look()
    assert Probe("127.0.0.1").dial([("127.0.0.1", told["port"], told["token"])]) == [""]


def test_who_is_not_there_and_who_is_another_is_told(shut_port: int) -> None:
    told = Probe("127.0.0.1").look()
    assert "refused" in dial("127.0.0.1", shut_port, told["token"])
    assert dial("127.0.0.1", told["port"], "00" * 16) == "somebody else answers there"
    with socket.create_server(("127.0.0.1", 0)) as mute:
        assert dial("127.0.0.1", mute.getsockname()[1], "") == ""  # without a token, connecting is enough


def test_an_address_that_is_not_this_nodes_is_an_error_and_no_crash() -> None:
    told = Probe("192.0.2.77").look()
    assert told["port"] == 0 and told["listen_error"]


def test_this_machine_is_seen_as_it_is() -> None:
    facts = probe.facts()
    assert facts["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["versions"]["ray-pccl"] == __import__("ray_pccl").__version__
    assert facts["memfd_error"] == facts["proc_error"] == ""
    assert facts["files_soft"] > 0 and facts["shm"][0] > 0
    assert facts["memory"]["total"] >= facts["memory"]["available"] > 0


def test_the_kernel_without_the_seal_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(probe.fcntl, "fcntl", refuse)
    assert "F_SEAL_FUTURE_WRITE" in probe.memfd_error()
    monkeypatch.delattr(os, "memfd_create")
    assert "no memfd_create" in probe.memfd_error()


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        ("0::/a/b\n", {"/sys/fs/cgroup/a/b/memory.max": "max", "/sys/fs/cgroup/a/memory.max": "1000"}, 1000),
        ("0::/a\n", {"/sys/fs/cgroup/a/memory.max": "500", "/sys/fs/cgroup/memory.max": "1000"}, 500),
        ("0::/a\n", {"/sys/fs/cgroup/a/memory.max": "1000", "/sys/fs/cgroup/memory.max": "500"}, 500),
        ("0::/\n", {"/sys/fs/cgroup/memory.max": "2000"}, 2000),
        ("3:cpu:/x\n4:memory:/x\n", {"/sys/fs/cgroup/memory/x/memory.limit_in_bytes": "3000"}, 3000),
        ("4:memory:/x\n", {"/sys/fs/cgroup/memory/x/memory.limit_in_bytes": str((1 << 63) - 4096)}, None),
        ("0::/../../outside\n", {"/sys/fs/cgroup/memory.max": "4000"}, 4000),
        ("", {}, None),
    ],
)
def test_the_containers_limit_is_the_tightest_of_all_above(
    membership: str, files: dict[str, str], limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {"/proc/self/cgroup": membership, **files}
    monkeypatch.setattr(probe, "read", lambda path: texts.get(path, ""))
    assert probe.memory()["limit"] == limit


def test_it_runs_where_ray_pccl_is_not_installed(tmp_path: Path) -> None:
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(probe)
    try:
        (tmp_path / "probe").write_bytes(cloudpickle.dumps(Probe))
    finally:
        cloudpickle.unregister_pickle_by_value(probe)
    script = """
import pickle, sys
sys.modules["ray_pccl"] = None
from importlib import util
find = util.find_spec
util.find_spec = lambda name, *rest: None if name == "ray_pccl" else find(name, *rest)
told = pickle.load(open(sys.argv[1], "rb"))("127.0.0.1").look()
print(told["versions"]["ray-pccl"], told["port"] > 0)
"""
    where = str(Path(cloudpickle.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "probe")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
        env={**os.environ, "PYTHONPATH": where},
    )
    assert done.stdout == "None True\n", done.stderr


def test_nodes_that_share_an_address_are_told_apart() -> None:
    nodes: list[dict[str, Any]] = [
        {"NodeID": "aaaaaaaa", "NodeManagerAddress": "10.0.0.1"},
        {"NodeID": "bbbbbbbb", "NodeManagerAddress": "10.0.0.1"},
        {"NodeID": "cccccccc", "NodeManagerAddress": "10.0.0.2"},
    ]
    assert list(names_of(nodes).values()) == ["10.0.0.1 (aaaaaa)", "10.0.0.1 (bbbbbb)", "10.0.0.2"]
