"""What the program does with its arguments, before there is any cluster: one line, and an exit code."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ray_pccl
from ray_pccl import errors
from ray_pccl.cli import application, cluster, status
from ray_pccl.cli.application import run
from ray_pccl.cli.errors import NoClusterError, NotFoundError, NotInTimeError, WrongResultError
from ray_pccl.cli.exit_codes import MEANINGS, ExitCode, code_of
from ray_pccl.cli.master import parse_settings

COMMANDS = ["status", "start-master", "stop", "evict", "doctor", "bench", "launch"]
NOBODY = ["--address", "127.0.0.1:1"]
HELP_S = 0.5


def program(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ray_pccl.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nope"], "No such command 'nope'"),
        (["status", "--nope"], "No such option: --nope"),
        (["evict"], "Missing argument 'PEER_ID'"),
        (["bench", "--actors", "1"], "--actors"),
        (["bench", "--sizes", "4x"], "'4x' is no size"),
        (["bench", "--sizes", ","], "needs at least one size"),
        (["bench", "--sizes", "4", "--dtype", "float64"], "less than one element"),
        (["bench", "--plot", "/nonexistent/a.png"], "no directory /nonexistent"),
        (["bench", "--op", "xor"], "--op"),
        (["status", "--interval", "0.01"], "--interval must be"),
        (["start-master", "--set", "x"], "name=value"),
        (["start-master", "--set", "nope=1"], "no such setting: nope"),
        (["start-master", "--set", "heartbeat_timeout_s=soon"], "must be a number"),
        (["start-master", "--set", "heartbeat_timeout_s=-1"], "from 0.05 to 3600"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == ExitCode.USAGE
    out, line = capsys.readouterr()
    assert not out
    assert told in line and line.startswith("ray-pccl: error: ") and line.count("\n") == 1


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "ray://127.0.0.1:1", "[::1]:1", "nonsense", "http://127.0.0.1:8265"]
)
def test_without_a_cluster_it_ends_at_once_with_3(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    assert run(["status", "--address", address]) == ExitCode.NO_CLUSTER
    assert time.monotonic() - began < 5
    line = capsys.readouterr().err
    assert line.startswith("ray-pccl: error: ") and address in line and "--address" in line and line.count("\n") == 1


@pytest.mark.parametrize("arguments", [[*NOBODY, "status"], ["status", *NOBODY]])
def test_shared_options_stand_before_or_after_the_command(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:2")
    assert run(arguments) == ExitCode.NO_CLUSTER
    assert "127.0.0.1:1 " in capsys.readouterr().err


def test_ray_address_is_taken_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:2")
    assert run(["status"]) == ExitCode.NO_CLUSTER
    assert "127.0.0.1:2 " in capsys.readouterr().err


def test_debug_shows_the_traceback_and_nothing_else_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*NOBODY, "--debug", "status"]) == ExitCode.NO_CLUSTER
    assert "Traceback" in capsys.readouterr().err
    assert run([*NOBODY, "status"]) == ExitCode.NO_CLUSTER
    assert "Traceback" not in capsys.readouterr().err


def test_a_machine_without_ray_is_told_so() -> None:
    class NoRay:
        @staticmethod
        def init(**_: object) -> None:
            raise ConnectionError("Could not find any running Ray instance.\nPlease specify the one to connect to.")

    with pytest.raises(NoClusterError, match="no Ray cluster runs on this machine: give the cluster's address"):
        cluster._connect(NoRay, "auto")  # type: ignore[arg-type]
    with pytest.raises(NoClusterError, match=r"can't be joined: Could not find any running Ray instance.$"):
        cluster._connect(NoRay, "10.0.0.1:6379")  # type: ignore[arg-type]


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_a_reader_that_has_seen_enough_is_no_error(arguments: list[str]) -> None:
    script = """
import sys
from ray_pccl.cli import options, status
from ray_pccl.cli.application import run
from tests.cli import made_up
import contextlib, ray_pccl
status.connected = contextlib.nullcontext
ray_pccl.report = lambda *_, **__: made_up.report(made_up.group(members=3))
code = run(["status", *sys.argv[1:]])
sys.stderr.write(str(code))
"""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert done.stderr == "0"


def test_a_mute_listener_is_not_waited_for(tmp_path: Path) -> None:
    """Its port answers, but not as Ray does: Ray itself would wait for a minute, in native code."""
    script = """
import socket, sys
from ray_pccl.cli import cluster
from ray_pccl.cli.application import run
cluster.CONNECT_TIMEOUT_S = 2
server = socket.create_server(("127.0.0.1", 0))
sys.exit(run(["status", "--address", "127.0.0.1:%d" % server.getsockname()[1]]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == ExitCode.NO_CLUSTER
    assert done.stderr.startswith("ray-pccl: error: what listens at 127.0.0.1:") and done.stderr.count("\n") == 1


def test_a_cluster_that_wants_a_token_is_told_of_at_once() -> None:
    """Ray writes that it was refused, and tries again for longer than we wait."""
    script = """
import os, socket, sys, time
from ray_pccl.cli import cluster
from ray_pccl.cli.application import run
def refused(ray, address):
    os.write(2, b"Unauthenticated: RPC error: InvalidAuthToken: Authentication token is missing or incorrect\\n")
    time.sleep(60)
cluster._connect = refused
server = socket.create_server(("127.0.0.1", 0))
sys.exit(run(["status", "--address", "127.0.0.1:%d" % server.getsockname()[1]]))
"""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == ExitCode.NO_CLUSTER
    assert "wants its token: set RAY_AUTH_MODE=token" in done.stderr and done.stderr.count("\n") == 1
    assert time.monotonic() - began < cluster.CONNECT_TIMEOUT_S


@pytest.mark.parametrize("keep", [False, True])
def test_what_ray_writes_by_itself_is_dropped_unless_debugging(keep: bool, capfd: pytest.CaptureFixture[str]) -> None:
    with cluster._dropped_stderr(keep=keep):
        os.write(2, b"chatter")
    os.write(2, b".")
    assert capfd.readouterr().err == ("chatter." if keep else ".")


def test_what_nobody_expected_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def surprise(_shared: object) -> None:
        raise ZeroDivisionError("division\nby zero")

    monkeypatch.setattr(status, "connected", surprise)
    assert run(["status"]) == ExitCode.FAILED
    assert capsys.readouterr().err == "ray-pccl: error: ZeroDivisionError: division by zero (--debug shows where)\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (WrongResultError("w"), 1),
        (errors.SettingsError("s"), 2),
        (errors.PlottingUnavailableError("p"), 2),
        (NoClusterError("c"), 3),
        (errors.MasterNotFoundError("m"), 4),
        (errors.MasterUnreachableError("m"), 4),
        (NotFoundError("n"), 5),
        (errors.NotAMemberError("n"), 5),
        (NotInTimeError("t"), 6),
        (errors.RendezvousTimeoutError("t"), 6),
        (errors.PCCLError("p"), 7),
        (RuntimeError("r"), 7),
    ],
)
def test_every_kind_of_error_has_its_code(error: BaseException, code: int) -> None:
    assert code_of(error) == code


def test_the_help_names_every_command_and_every_code() -> None:
    text = " ".join(program("--help", COLUMNS="200", NO_COLOR="1").stdout.split())
    assert all(command in text for command in COMMANDS)
    assert all(f"{code.value} = {MEANINGS[code]}" in text for code in ExitCode)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command: str) -> None:
    assert run([command, "--help"]) == ExitCode.OK


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == ExitCode.OK
    assert capsys.readouterr().out == f"ray-pccl {ray_pccl.__version__}\n"


def test_help_is_quick_since_nothing_heavy_is_loaded() -> None:
    script = "import sys, ray_pccl.cli.application; print([m for m in ('ray', 'numpy', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
    before = os.times()
    assert program("--help").returncode == 0
    after = os.times()
    # The processor's time, not the clock's: other processes may have the cores.
    assert after.children_user + after.children_system - before.children_user - before.children_system < HELP_S


@pytest.mark.parametrize(
    ("words", "found"), [("ray-pccl st", ["status", "start-master", "stop"]), ("ray-pccl ev", ["evict"])]
)
def test_the_shell_completes_commands(words: str, found: list[str]) -> None:
    done = program(_RAY_PCCL_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD="1")
    assert done.stdout.split() == found


def test_the_shell_completes_options_and_choices() -> None:
    line = "ray-pccl bench --op m"
    done = program(_RAY_PCCL_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD="3")
    assert done.stdout.split() == ["max", "min"]
    line = "ray-pccl status --wa"
    done = program(_RAY_PCCL_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD="2")
    assert done.stdout.split() == ["--watch"]


def test_completion_can_be_shown_for_installing() -> None:
    done = program("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "_RAY_PCCL_COMPLETE=complete_bash" in done.stdout and done.returncode == 0


def test_settings_are_read_as_names_and_values() -> None:
    assert parse_settings(["heartbeat_timeout_s=0.5", " sentinel = no "]) == {
        "heartbeat_timeout_s": 0.5,
        "sentinel": False,
    }


def test_launch_hands_everything_over_and_returns_the_launchers_code(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def begin(file: Path, **given: object) -> int:
        calls.append((file, given.pop("console") is not None, given))
        return 6

    monkeypatch.setattr("ray_pccl.launching.command.launch", begin)
    assert application.run(["launch", "c.yaml", "--yes", "--timeout", "7", "--no-wait"]) == 6
    assert calls == [(Path("c.yaml"), True, {"yes": True, "timeout_s": 7.0, "wait": False})]
