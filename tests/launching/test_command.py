"""`launch()` itself, with a Ray of which only the command line is played: what it prints, and how it ends."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from ray_pccl import __version__
from ray_pccl.launching import command
from ray_pccl.launching.command import DONE, FAILED, FILE_IS_WRONG, NOT_FOR_RAY_UP, NOT_IN_TIME, launch
from ray_pccl.launching.expecting import Node, Seen
from ray_pccl.launching.looking import line_of
from ray_pccl.testing import eventually
from tests.launching.conftest import EXAMPLES, LOCAL

HEAD, LEFT, RIGHT = Node("10.0.0.1", is_head=True, cpus=4), *(Node(f"10.0.0.{n}", is_head=False) for n in (2, 3))
NOBODY = Seen(why="Ray does not answer: no", version=__version__)
HALF = Seen((HEAD, LEFT), "10.0.0.1:4242", version=__version__)
ALL = Seen((HEAD, LEFT, RIGHT), "10.0.0.1:4242", version=__version__)


class Play:
    """A Ray whose commands are little programs."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.file = directory / "cluster.yaml"
        self.file.write_text(LOCAL.replace("~/", f"{directory}/"))
        (directory / ".ssh").mkdir()
        (directory / ".ray").mkdir()
        (directory / ".ssh" / "key").write_text("")
        (directory / ".ray" / "auth_token").write_text("")
        self.programs = {"up": "pass", "exec": "pass"}
        self.called = directory / "called"
        patch.setattr(command, "_ray", self._ray)
        patch.setattr(command, "AGAIN_S", 0.05)
        self._console = Console(file=io.StringIO(), width=200)

    def _ray(self, *arguments: str) -> list[str]:
        with self.called.open("a") as log:
            log.write(f"{arguments}\n")
        return [sys.executable, "-c", self.programs[arguments[0]]]

    def sees(self, *what: Seen, then: str = "") -> None:
        lines = "".join(f"noise\r\n{line_of(seen)}\r\n" for seen in what)
        self.programs["exec"] = f"print({lines!r}, flush=True)\n{then}"

    def launch(self, timeout_s: float = 20.0, *, yes: bool = True, wait: bool = True) -> tuple[int, str]:
        code = launch(self.file, yes=yes, timeout_s=timeout_s, wait=wait, console=self._console)
        said = self._console.file.getvalue()  # type: ignore[attr-defined]
        return code, said


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    return Play(tmp_path, monkeypatch)


def test_it_ends_well_when_all_nodes_and_the_master_answer(play: Play) -> None:
    play.sees(NOBODY, HALF, ALL)
    code, said = play.launch()
    assert code == DONE
    told = [line for line in said.splitlines() if line.startswith("nodes up")]
    assert told == ["nodes up 0/3, master no", "nodes up 2/3, master yes", "nodes up 3/3, master yes"]
    assert "the cluster is up" in said and "master: 10.0.0.1:4242" in said
    assert f"ray down {play.file}" in said


def test_ray_is_told_that_the_answer_is_yes_only_if_we_were(play: Play) -> None:
    play.sees(ALL)
    play.launch(yes=False)
    play.launch(yes=True)
    ups = [line for line in play.called.read_text().splitlines() if line.startswith("('up'")]
    assert ["--yes" in line for line in ups] == [False, True]


def test_machines_of_ones_own_get_the_autoscaler_that_can_start_them(play: Play) -> None:
    play.programs["up"] = "import os, sys; sys.exit(int(os.environ['RAY_UP_enable_autoscaler_v2'] != '0'))"
    assert play.launch(wait=False)[0] == DONE


def test_without_waiting_the_head_is_not_asked(play: Play) -> None:
    assert play.launch(wait=False)[0] == DONE
    assert "'exec'" not in play.called.read_text()


def test_a_wrong_file_starts_nothing(play: Play) -> None:
    play.file.write_text(play.file.read_text().replace("head_ip", "head_pi"))
    code, said = play.launch()
    assert code == FILE_IS_WRONG
    assert f"error: {play.file}: line 2, provider.head_ip is missing: add the address" in said
    assert not play.called.exists()


def test_a_file_that_is_not_there_is_told_in_one_line(play: Play) -> None:
    play.file.unlink()
    code, said = play.launch()
    assert code == FILE_IS_WRONG
    assert said == f"error: {play.file} can't be read: No such file or directory\n"


def test_a_file_for_kubernetes_is_checked_and_left_to_kubectl(play: Play) -> None:
    play.file.write_text((EXAMPLES / "kuberay.yaml").read_text())
    code, said = play.launch()
    assert code == NOT_FOR_RAY_UP
    assert f"kubectl apply -f {play.file}" in said
    assert not play.called.exists()


def test_when_ray_up_fails_its_exit_code_is_told_and_nobody_is_waited_for(play: Play) -> None:
    play.programs["up"] = "raise SystemExit(3)"
    code, said = play.launch()
    assert code == FAILED
    assert "error: `ray up` failed with exit code 3: the reason is in its output above" in said
    assert "'exec'" not in play.called.read_text()


def test_a_head_that_is_never_set_up_is_given_up_in_time_with_all_that_runs_for_it(play: Play) -> None:
    child = play.directory / "child"
    play.programs["up"] = (
        "import subprocess, sys; ssh = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(child)!r}, 'w').write(str(ssh.pid)); ssh.wait()"
    )
    began = time.monotonic()
    code, said = play.launch(timeout_s=1.5)
    assert code == NOT_IN_TIME
    assert "error: the head 10.0.0.1 was not set up within 1.5 s: look whether it is up" in said
    assert time.monotonic() - began < 10
    stat = Path(f"/proc/{child.read_text()}/stat")
    eventually(lambda: not stat.exists() or ") Z " in stat.read_text(), 5, "the SSH ends, too")


def test_the_worker_that_is_missing_in_the_end_is_named(play: Play) -> None:
    play.sees(HALF, then="import time; time.sleep(60)")
    code, said = play.launch(timeout_s=1.5)
    assert code == NOT_IN_TIME
    assert "error: not up within 1.5 s: the worker 10.0.0.3: `ray exec" in said
    assert "the worker 10.0.0.2" not in said


def test_a_connection_that_breaks_is_made_again(play: Play) -> None:
    once = play.directory / "once"
    play.programs["exec"] = (
        f"import os\nif os.path.exists({str(once)!r}):\n    print({line_of(ALL)!r})\n"
        f"else:\n    open({str(once)!r}, 'w')\n    print({line_of(HALF)!r})\n    raise SystemExit(255)"
    )
    assert play.launch()[0] == DONE


def test_a_head_that_tells_nothing_has_its_words_repeated(play: Play) -> None:
    chatter = "2026-11-18 01:45:58,816\\tVINFO commands.py:388 -- Loaded"
    play.programs["exec"] = f"print('{chatter}'); print('ray_pccl is not installed on the head')"
    code, said = play.launch(timeout_s=1.0)
    assert code == NOT_IN_TIME
    assert "  ray_pccl is not installed on the head\n" in said
    assert "Loaded" not in said
    assert "error: the head did not tell within 1 s who is up: `ray exec" in said


def test_why_the_master_does_not_answer_is_told(play: Play) -> None:
    play.sees(Seen(ALL.nodes, why="there is no master in the Ray namespace 'ray_pccl'", version=__version__))
    code, said = play.launch(timeout_s=1.0)
    assert code == NOT_IN_TIME
    assert "  there is no master in the Ray namespace 'ray_pccl'\n" in said
    assert "error: not up within 1 s: the master: " in said


def test_another_version_there_is_pointed_out(play: Play) -> None:
    play.sees(Seen(ALL.nodes, ALL.master, version="9.9"))
    assert f"ray_pccl is {__version__} here and 9.9 there: install the same" in play.launch()[1]


@pytest.mark.parametrize("key", ["~nobody-of-this-name/key", "x" * 5000])
def test_a_key_that_can_be_no_file_is_a_mistake_in_the_file(play: Play, key: str) -> None:
    play.file.write_text(play.file.read_text().replace(f"{play.directory}/.ssh/key", key))
    code, said = play.launch()
    assert code == FILE_IS_WRONG
    assert "which is not there" in said
