"""The cluster of examples/cluster/on-premise.yaml, brought up, used, hurt and taken down again, on hosts of our own.

Four hosts with networks, processes and files of their own: a desk, from which everything is done over SSH, and three
machines. The file is the example's own; only addresses, user, key, and the command that installs the package from an
index are replaced: what is to be installed is there already.
"""

from __future__ import annotations

import contextlib
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from ray_pccl.testing.hosts import Host, Lan, lan
from ray_pccl.testing.namespaces import NotPermitted
from ray_pccl.testing.waiting import eventually

EXAMPLES = Path(__file__).parents[2] / "examples" / "cluster"
STEP = re.compile(
    r"step (?P<step>\d+): \d+ contributors \[(?P<who>.+)\], average (?P<average>\S+), right, (?P<ms>\d+) ms"
)
STEPS = 40
ENOUGH_BEFORE = 5
RAY_NOTICES_S = 15.0
"""Ray takes longer than this to notice that a node is cut off, the master about a second."""
UP_S = 150.0
JOB_S = 120.0
DOWN_S = 60.0
RAYS = ("raylet", "gcs_server", "ray::", "ray/dashboard", "ray/autoscaler", "ray.util.client")


class Desk:
    """Who launches: a machine that is not in the cluster, with the package and SSH."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._path = f"PATH={Path(sys.executable).parent}:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

    def command(self, *command: str) -> list[str]:
        ours = [
            "env",
            self._path,
            "RAY_USAGE_STATS_ENABLED=0",
            "RAY_AUTH_MODE=token",
            "COLUMNS=200",
            "PYTHONUNBUFFERED=1",
        ]
        return self._host.inside(*ours, *command)

    def run(self, *command: str, timeout: float) -> str:
        """What the command says; it must succeed."""
        began = time.monotonic()
        done = subprocess.run(
            self.command(*command), capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
        )
        took_s = time.monotonic() - began
        print(f"\n$ {' '.join(command)}\n{done.stdout}{done.stderr}-> {done.returncode} ({took_s:.1f} s)")
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


class Lines:
    """What a process says, line by line, with a deadline for all of it."""

    def __init__(self, process: subprocess.Popen[str], within_s: float) -> None:
        self.process = process
        self.seen: list[str] = []
        self._deadline = time.monotonic() + within_s
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip())
        self._lines.put(None)

    def __iter__(self) -> Iterator[str]:
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, self._deadline - time.monotonic()))
            except queue.Empty:
                pytest.fail("it did not end in time; it said\n" + "\n".join(self.seen))
            if line is None:
                return
            print(line)
            self.seen.append(line)
            yield line


def example_for(net: Lan) -> str:
    """The example's file, for these hosts."""
    _, head, *workers = net.hosts
    config = yaml.safe_load((EXAMPLES / "on-premise.yaml").read_text())
    config["provider"].update(head_ip=head.address, worker_ips=[worker.address for worker in workers])
    config["auth"].update(ssh_user="root", ssh_private_key=str(net.key))
    assert config["setup_commands"][0].endswith("pip install ray-pccl")
    config["setup_commands"][0] = f"ln -sfn {Path(sys.executable).parents[1]} ~/ray-pccl"
    return yaml.safe_dump(config)


def rays_on(host: Host) -> list[str]:
    return [line for line in host.processes() if any(word in line for word in RAYS)]


def ours_on_this_machine(directory: str) -> list[str]:
    """Processes of this machine that have something to do with our hosts."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if (
                entry.name.isdigit()
                and directory.encode() in (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            ):
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(400)
def test_a_launched_cluster_runs_a_job_through_the_loss_of_a_node_and_goes_down_without_a_trace() -> None:
    if absent := [program for program in ("rsync", "uptime") if not shutil.which(program)]:
        pytest.skip(f"`ray up` needs what is not installed: {', '.join(absent)}")
    with contextlib.ExitStack() as stack:
        try:
            net = stack.enter_context(lan("desk", "head", "one", "two", shared=[EXAMPLES]))
        except NotPermitted as why:
            pytest.skip(f"no hosts can be made here: {why}")
        directory = str(net.key.parent)
        _, head, one, two = net.hosts
        desk = Desk(net.hosts[0])
        file = net.hosts[0].home / "cluster.yaml"
        file.write_text(example_for(net))
        desk.run("ray", "get-auth-token", "--generate", timeout=60)

        told = desk.run("ray-pccl", "launch", str(file), "--yes", f"--timeout={UP_S}", timeout=UP_S + 30)
        assert "nodes up 3/3, master yes" in told
        assert f"master: {head.address}:" in told, "the master is to be on the head"
        assert all(host.address in told for host in (head, one, two))
        assert f'"host":"{head.address}"' in desk.run(
            "ray", "exec", str(file), "ray-pccl status --json", timeout=60
        ).replace(" ", "")

        tunnel = desk.start("ray", "dashboard", str(file))
        try:
            reaches = desk.command("bash", "-c", "</dev/tcp/127.0.0.1/8265")
            eventually(lambda: subprocess.run(reaches, capture_output=True).returncode == 0, 30, "a tunnel", 0.2)
            took_s = submit(desk, net, two)
        finally:
            tunnel.terminate()
            tunnel.wait(10)
        print(f"the step in which a node was cut off took {took_s:.1f} s")
        assert took_s < RAY_NOTICES_S

        desk.run("ray", "down", "--yes", str(file), timeout=DOWN_S)
        assert rays_on(head) == []
    assert ours_on_this_machine(directory) == []
    assert not Path(directory).exists()
    assert not list(Path("/run/netns").glob(f"{net.switch.removesuffix('-switch')}-*"))


def submit(desk: Desk, net: Lan, victim: Host) -> float:
    """Runs the job, and cuts a node off in the midst of it; how many seconds the step took in which that happened."""
    job = ["--working-dir", str(EXAMPLES), "--", "python", "job.py", f"--steps={STEPS}", "--pause=0.2"]
    lines = Lines(desk.start("ray", "job", "submit", "--address", "http://127.0.0.1:8265", *job), JOB_S)
    steps: list[tuple[int, list[int], float, float]] = []
    known = 0  # which step was the last that we knew of when the node was cut off; the log comes in batches
    for line in lines:
        if found := STEP.search(line):
            who = [int(each) for each in found["who"].split(", ")]
            steps.append((int(found["step"]), who, float(found["average"]), float(found["ms"]) / 1000))
            if not known and steps[-1][0] >= ENOUGH_BEFORE:
                net.cut(victim)
                known = steps[-1][0]
    said = "\n".join(lines.seen)
    assert lines.process.wait(10) == 0, said
    assert "succeeded" in said
    assert [number for number, *_ in steps] == list(range(STEPS)), "every step is made, once"
    whos = [who for _, who, *_ in steps]
    survivors = whos[-1]
    lost = whos.index(survivors)
    assert len(survivors) == 2 and lost > known
    assert whos == [[0, 1, 2]] * lost + [survivors] * (STEPS - lost), "one node is lost, once, and nobody else"
    for number, who, average, _ in steps:  # the actors contribute 1, 2 and 4, and the step's number
        assert average == pytest.approx(number + sum(2**each for each in who) / len(who), rel=1e-5)
    return steps[lost][3]
