"""The program as people run it: a process of its own, against a Ray of two nodes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import ray_pccl
from ray_pccl.cli.exit_codes import ExitCode
from ray_pccl.cli.report_view import short_peer
from ray_pccl.reports import MasterReport, from_json
from ray_pccl.testing import eventually
from ray_pccl.testing.cluster import ray_nodes
from tests.ray.peers import end, start

pytestmark = pytest.mark.ray
PATIENCE_S = 60


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_nodes(2) as nodes:
        yield nodes


@pytest.fixture
def no_master(cluster: Any) -> Iterator[None]:
    ray_pccl.stop_master()
    yield
    ray_pccl.stop_master()


@pytest.fixture
def a_master(cluster: Any) -> Iterator[None]:
    ray_pccl.start_master()
    yield
    ray_pccl.stop_master()


def command(cluster: Any, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "ray_pccl.cli", "--address", cluster.address, *arguments]


def program(cluster: Any, *arguments: str, code: int = ExitCode.OK) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(cluster, *arguments), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def status(cluster: Any) -> MasterReport:
    return from_json(program(cluster, "status", "--json").stdout)


class Terminal:
    """The program on a terminal of 80 columns."""

    def __init__(self, *arguments: str) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execvpe(arguments[0], arguments, {**os.environ, "TERM": "xterm"})
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self._written = b""

    def text(self) -> str:
        """All that was written so far, without colours and movements."""
        with contextlib.suppress(OSError):  # the program has ended
            while select.select([self._fd], [], [], 0)[0]:
                self._written += os.read(self._fd, 65536)
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self._written.decode(errors="replace"))

    def shows(self, words: str, timeout: float = PATIENCE_S) -> None:
        eventually(lambda: words in self.text(), timeout, lambda: f"{words!r} in {self.text()[-2000:]!r}")

    def types(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    def code(self) -> int:
        """The exit code, once it has ended."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            self.text()
            pid, state = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self._fd)
                return os.waitstatus_to_exitcode(state)
            time.sleep(0.05)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise AssertionError(f"it did not end: {self.text()[-2000:]}")


def actors_alive() -> list[str]:
    """The classes of this cluster's actors; Ray's public way to ask for them needs its dashboard."""
    from ray._private.state import actors

    return sorted(found["ActorClassName"] for found in actors().values() if found["State"] != "DEAD")


def test_without_a_master_status_says_how_to_get_one(cluster: Any, no_master: None) -> None:
    done = program(cluster, "status", code=ExitCode.NO_MASTER)
    assert not done.stdout
    assert done.stderr.count("\n") == 1 and "`ray-pccl start-master` starts one" in done.stderr


def test_a_master_is_started_once_described_and_stopped_for_good(cluster: Any, no_master: None) -> None:
    first = program(cluster, "start-master", "--set", "heartbeat_timeout_s=2", "--wait-nodes", "2")
    assert "The master is running at " in first.stdout and not first.stderr
    again = program(cluster, "start-master")
    assert "was running already" in again.stdout
    report = status(cluster)
    assert report == msgspec.structs.replace(ray_pccl.report(), at=report.at)
    assert f"{report.host}:{report.port}" in first.stdout and f"{report.host}:{report.port}" in again.stdout

    stopped = program(cluster, "stop")  # no terminal: it does not ask
    assert "was stopped" in stopped.stdout
    assert "nothing to stop" in program(cluster, "stop").stdout
    with pytest.raises(ray_pccl.MasterNotFoundError):
        ray_pccl.report()


def test_nodes_that_do_not_come_are_waited_for_no_longer_than_asked(cluster: Any, no_master: None) -> None:
    done = program(cluster, "start-master", "--wait-nodes", "3", "--timeout", "0.5", code=ExitCode.TIMEOUT)
    assert "2 of 3 nodes are alive after 0.5 s" in done.stderr


def test_a_peer_is_put_out_by_a_part_of_its_id(cluster: Any, a_master: None) -> None:
    peers = start(3, peer_group="evicted-from", min_world_size=2)
    try:
        [group] = status(cluster).groups
        assert (group.name, len(group.members)) == ("evicted-from", 3)
        text = program(cluster, "status", "--group", "evicted-from", "--events", "9").stdout
        assert "3 members on 1 host" in text and "the group formed" in text

        victim = group.members[1].peer_id
        short = short_peer(victim)
        assert short in text
        assert victim in program(cluster, "evict", short, "--reason", "a test").stdout
        eventually(lambda: [len(found.members) for found in status(cluster).groups] == [2], 20)
        assert "a test" in " ".join(happening.reason for happening in ray_pccl.report().happenings)

        unknown = program(cluster, "evict", victim, code=ExitCode.NOT_FOUND)
        assert group.members[0].peer_id in unknown.stderr and unknown.stderr.count("\n") == 1
        program(cluster, "status", "--group", "nope", code=ExitCode.NOT_FOUND)
    finally:
        end(peers)


def test_the_live_table_outlives_its_master_and_ends_with_ctrl_c(cluster: Any, a_master: None) -> None:
    terminal = Terminal(*command(cluster, "status", "--watch", "--interval", "0.2"))
    terminal.shows("No groups")
    os.kill(ray_pccl.report().pid, signal.SIGKILL)
    terminal.shows("start 2")
    terminal.types(b"\x03")
    assert terminal.code() == ExitCode.OK
    assert "Traceback" not in terminal.text()


def test_stop_asks_on_a_terminal(cluster: Any, a_master: None) -> None:
    terminal = Terminal(*command(cluster, "stop"))
    terminal.shows("Stop the master (0 groups with 0 members)? [y/N]")
    terminal.types(b"n\n")
    assert terminal.code() == ExitCode.INTERRUPTED
    assert ray_pccl.report()


def test_the_benchmark_measures_checks_and_leaves_nothing(cluster: Any, a_master: None, tmp_path: Path) -> None:
    before = actors_alive()
    written, drawn = tmp_path / "bench.json", tmp_path / "bench.png"
    files = ["--json", str(written), "--plot", str(drawn)]
    done = program(cluster, "bench", "--sizes", "4KiB,1MiB", "--iterations", "4", "--actors", "3", *files)
    assert "all-reduce SUM of float32, 3 actors on 2 nodes" in done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:]] == [["4", "KiB"], ["1", "MiB"]]
    told = json.loads(written.read_text())
    assert [result["bytes"] for result in told["results"]] == [4096, 1 << 20]
    assert all(result["iterations"] == 4 and result["median_s"] > 0 for result in told["results"])
    assert drawn.read_bytes().startswith(b"\x89PNG")
    eventually(lambda: actors_alive() == before, 10)
    assert not ray_pccl.report().groups

    slow = ["--sizes", "4KiB", "--iterations", "1", "--at-least", "1TB/s"]
    assert "Too slow" in program(cluster, "bench", *slow, code=ExitCode.FOUND_WRONG).stderr


def test_a_benchmark_that_is_interrupted_leaves_nothing_either(cluster: Any, no_master: None) -> None:
    before = actors_alive()
    terminal = Terminal(*command(cluster, "bench", "--sizes", "16MiB", "--iterations", "100000"))
    terminal.shows("/100000")
    assert len(actors_alive()) == len(before) + 3
    terminal.types(b"\x03")
    assert terminal.code() == ExitCode.INTERRUPTED
    assert "Traceback" not in terminal.text()
    eventually(lambda: actors_alive() == before, 10)


def test_a_program_that_is_told_to_end_undoes_what_it_began_and_is_quiet(cluster: Any, no_master: None) -> None:
    before = actors_alive()
    arguments = command(cluster, "bench", "--sizes", "4KiB", "--iterations", "10000000")
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as running:
        eventually(lambda: len(actors_alive()) == len(before) + 3, PATIENCE_S)
        running.terminate()
        assert running.wait(PATIENCE_S) == 128 + signal.SIGTERM
        assert running.stderr is not None and "SIGTERM" not in running.stderr.read()
    eventually(lambda: actors_alive() == before, 10)


def test_the_doctor_finds_a_healthy_cluster_healthy(cluster: Any, a_master: None) -> None:
    told = json.loads(program(cluster, "doctor", "--json").stdout)
    assert {
        finding["check"]: finding["severity"] for finding in told["findings"] if finding["severity"] == "problem"
    } == {}
    assert len(told["facts"]["nodes"]) == 2 and told["facts"]["pairs"] == 1
    assert not told["facts"]["silent"] and told["facts"]["master"]["where"]


def test_the_doctor_names_a_node_that_is_frozen(cluster: Any, no_master: None) -> None:
    frozen = next(node for node in cluster.list_all_nodes() if not node.head)
    [raylet] = frozen.all_processes["raylet"]
    os.kill(raylet.process.pid, signal.SIGSTOP)
    try:
        done = program(cluster, "doctor", "--timeout", "8", code=ExitCode.FOUND_WRONG)
    finally:
        os.kill(raylet.process.pid, signal.SIGCONT)
    assert frozen.node_id[:6] in done.stdout and "does not run tasks" in done.stdout
    assert "1 problem" in done.stdout, done.stdout
