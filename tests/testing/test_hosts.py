"""Hosts of our own: nobody on one sees who is on another, or on this machine; and nothing of them stays."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_pccl.testing.hosts import PROCESSES, Host, Lan, lan
from ray_pccl.testing.namespaces import NotPermitted
from ray_pccl.testing.waiting import eventually


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Lan]:
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(lan("left", "right", shared=[tmp_path]))
        except NotPermitted as why:
            pytest.skip(f"no hosts can be made here: {why}")
        yield made


def ssh(net: Lan, source: Host, target: Host, command: str) -> subprocess.CompletedProcess[str]:
    options = ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "ConnectTimeout=2", "LogLevel=ERROR"]
    asked = ["ssh", "-i", str(net.key), *(f"-o{option}" for option in options), f"root@{target.address}", command]
    return subprocess.run(source.inside(*asked), capture_output=True, text=True, timeout=30, check=False)


def test_a_session_on_a_host_sees_the_processes_of_that_host_alone(net: Lan) -> None:
    left, right = net.hosts
    stays = subprocess.Popen(left.inside("sleep", "61"))
    try:
        eventually(lambda: "sleep 61" in left.processes(), 5, "it runs")
        seen = ssh(net, left, right, PROCESSES).stdout
        assert "sshd_config" in seen
        assert "sleep" not in seen and "pytest" not in seen
        assert not any("sleep" in line for line in right.processes())
        assert ssh(net, left, right, "hostname; echo ~").stdout.split() == ["right", str(right.home)]
    finally:
        stays.kill()
        stays.wait(5)


def test_what_a_host_writes_stays_there_but_for_what_is_shared(net: Lan, tmp_path: Path) -> None:
    left, right = net.hosts
    command = f"touch /tmp/a /dev/shm/a /run/a ~/a {tmp_path}/a; ls /tmp/a /dev/shm/a /run/a ~/a {tmp_path}/a | wc -l"
    assert ssh(net, right, left, command).stdout.strip() == "5"
    for host in net.hosts:
        ls = f"ls /tmp/a /dev/shm/a /run/a {right.home}/a {tmp_path}/a 2>/dev/null | wc -l"
        expected = "4" if host is left else "1"
        assert ssh(net, host, host, ls).stdout.strip() == expected
    assert (tmp_path / "a").exists()
    assert not any(Path(place).exists() for place in ("/tmp/a", "/dev/shm/a", "/run/a"))


def test_a_host_that_is_cut_off_is_not_reached_until_it_is_healed(net: Lan) -> None:
    left, right = net.hosts
    net.cut(right)
    assert ssh(net, left, right, "true").returncode == 255
    net.heal(right)
    eventually(lambda: ssh(net, left, right, "true").returncode == 0, 15, "it is back")


def test_all_that_ran_on_a_host_ends_with_it() -> None:
    try:
        with lan("left", "right") as net:
            directory = net.key.parent
            daemon = "setsid nohup sleep 62 >/dev/null 2>&1 & echo started"
            assert ssh(net, net.hosts[0], net.hosts[1], daemon).stdout.strip() == "started"
            eventually(lambda: "sleep 62" in net.hosts[1].processes(), 5, "it runs")
            assert sleepers() == 1
    except NotPermitted as why:
        pytest.skip(f"no hosts can be made here: {why}")
    assert not directory.exists()
    assert not list(Path("/run/netns").glob(f"{net.switch.removesuffix('-switch')}-*"))
    assert sleepers() == 0


def sleepers() -> int:
    """How many of them this machine sees, which sees into all hosts."""
    return subprocess.run(["sh", "-c", PROCESSES], capture_output=True, text=True).stdout.count("sleep 62")


def test_where_hosts_cannot_be_made_it_is_said_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_pccl.testing.hosts.NEEDED", ("ip", "no-such-program"))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    with pytest.raises(NotPermitted, match="the programs no-such-program are not installed"), lan("left"):
        pass
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(NotPermitted, match="it takes root"), lan("left"):
        pass
