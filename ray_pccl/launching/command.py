"""`ray-pccl launch FILE`: checks the file, runs `ray up`, and waits until all nodes and the master answer."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ray_pccl import __version__
from ray_pccl.launching.expecting import Expected, Seen, expected, missing, progress
from ray_pccl.launching.looking import seen_in
from ray_pccl.launching.validating import Checked, check

DONE = 0
FILE_IS_WRONG = 1
NOT_FOR_RAY_UP = 2
NOT_IN_TIME = 6
FAILED = 7
"""The exit codes, with the meanings that they have in all commands of `ray-pccl`."""
AGAIN_S = 2.0
END_S = 5.0
_SAID = 20
"""How many of the last lines of `ray exec` are shown when it tells nothing that we understand."""
_CHATTER = re.compile(r"\S+ \S+\s+(V*INFO|V*WARN|SUCC) |Warning: Permanently added|Shared connection")
"""What `ray exec` and `ssh` say whenever all is well."""


def launch(file: Path, *, yes: bool, timeout_s: float, wait: bool, console: Console) -> int:
    """Brings a cluster up, and says so when it is.

    Args:
        file: Of `ray up`; one for KubeRay is checked, and no more.
        yes: Answers Ray's questions beforehand.
        timeout_s: For all of it.
        wait: Whether to wait for the nodes and the master after `ray up`.
        console: Where it is told, and how far it is.

    Returns:
        The exit code of the command.
    """
    deadline = time.monotonic() + timeout_s
    checked = _check(file, console)
    if checked is None or not checked.is_good:
        return FILE_IS_WRONG
    if checked.is_kuberay:
        _say(console, f"{file} is for KubeRay, and right as far as can be seen from here. Kubernetes starts it:")
        _say(console, f"  kubectl apply -f {shlex.quote(str(file))}")
        return NOT_FOR_RAY_UP
    _say(console, f"{file} is right; `ray up` starts the cluster")
    wanted = expected(checked.config)
    code = _ray_up(file, checked.config, yes, deadline)
    if code is None:
        where = f"the head {wanted.head}".rstrip()
        cure = "look whether it is up and lets you in over SSH, or give it longer with --timeout"
        _say(console, f"error: {where} was not set up within {timeout_s:g} s: {cure}", style="red")
        return NOT_IN_TIME
    if code:
        cure = "the reason is in its output above; run it again when it is removed"
        _say(console, f"error: `ray up` failed with exit code {code}: {cure}", style="red")
        return FAILED
    if not wait:
        return DONE
    seen, said = _wait(file, wanted, deadline, console)
    if absent := missing(wanted, seen):
        _explain(file, absent, seen, said, timeout_s, console)
        return NOT_IN_TIME
    _show(file, wanted, seen, console)
    return DONE


def ray_schema() -> Mapping[str, Any]:
    """Ray's own description of the file of a cluster."""
    spec = importlib.util.find_spec("ray")
    assert spec is not None and spec.origin is not None, "Ray is not installed"
    schema: Mapping[str, Any] = json.loads((Path(spec.origin).parent / "autoscaler" / "ray-schema.json").read_text())
    return schema


def _check(file: Path, console: Console) -> Checked | None:
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        _say(console, f"error: {file} can't be read: {reason}", style="red")
        return None
    checked = check(text, schema=ray_schema(), exists=_exists)
    for problem in checked.problems:
        kind, style = ("error", "red") if problem.fatal else ("advice", "yellow")
        _say(console, f"{kind}: {file}: {problem}", style=style)
    return checked


def _exists(name: str) -> bool:
    with contextlib.suppress(OSError, RuntimeError):  # a name too long for a file, the home of nobody
        return Path(name).expanduser().exists()
    return False


# ------------------------------------------------------------------------------------------------------- running Ray


def _ray(*arguments: str) -> list[str]:
    """A command of this Python's Ray."""
    return [sys.executable, "-m", "ray.scripts.scripts", *arguments]


def _ray_up(file: Path, config: Mapping[str, Any], yes: bool, deadline: float) -> int | None:
    """Runs `ray up`, its output shown; its exit code, or None if it took too long."""
    environment = dict(os.environ)
    if config["provider"]["type"] == "local":
        # Autoscaler v2 can't start workers on machines that are there already (Ray's issue 57153).
        environment.setdefault("RAY_UP_enable_autoscaler_v2", "0")
    process = subprocess.Popen(_ray("up", str(file), *(["--yes"] if yes else [])), env=environment)  # noqa: S603
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)


def _wait(file: Path, wanted: Expected, deadline: float, console: Console) -> tuple[Seen, list[str]]:
    """Waits until all are there or the time is up: what was seen last, and what else was said on the way."""
    seen, said = Seen(), deque[str](maxlen=_SAID)
    with _Progress(console) as shown:
        shown.tell(progress(wanted, seen))
        while (left := deadline - time.monotonic()) > 0:
            for line in _lines(_ray("exec", str(file), _look_command(wanted, left)), deadline):
                if (told := seen_in(line)) is None:
                    if line and not _CHATTER.match(line):
                        said.append(line)
                    continue
                seen = told
                shown.tell(progress(wanted, seen))
                if not missing(wanted, seen):
                    return seen, []
            time.sleep(max(0.0, min(AGAIN_S, deadline - time.monotonic())))
    return seen, list(said)


def _look_command(wanted: Expected, left: float) -> str:
    """What the head is to run. Its Python is called one thing or the other."""
    arguments = [f"--timeout={left:.0f}", f"--least={wanted.least}", *(f"--worker={name}" for name in wanted.workers)]
    look = f"-m ray_pccl.launching.looking {shlex.join(arguments)}"
    known = "-c 'import ray_pccl' 2>/dev/null"
    absent = "echo 'ray_pccl is not installed on the head: add `pip install ray-pccl` to setup_commands'"
    return f"if python {known}; then python {look}; elif python3 {known}; then python3 {look}; else {absent}; fi"


def _lines(command: list[str], deadline: float) -> Iterator[str]:
    """What a command says, line by line, until it or the time ends."""
    process = subprocess.Popen(  # noqa: S603
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(process, lines), name="ray_pccl-launch", daemon=True)
    reader.start()
    try:
        with contextlib.suppress(queue.Empty):
            while (line := lines.get(timeout=max(0.0, deadline - time.monotonic()))) is not None:
                yield line.strip()
    finally:
        _end(process)
        reader.join(END_S)


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            lines.put(line)
    lines.put(None)


def _end(process: subprocess.Popen[Any]) -> None:
    """Ends a process of Ray's command line, and the SSH that it runs."""
    if process.poll() is not None:
        return
    family = [process.pid, *_descendants(process.pid)]
    for pid in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(END_S)


def _descendants(pid: int) -> list[int]:
    found = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, tasks.read_text().split()):
                found += [child, *_descendants(child)]
    return found


# ------------------------------------------------------------------------------------------------------ what is told


class _Progress:
    """How far it is: one line that changes on a terminal, a line for each change elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("") if console.is_terminal else None
        self._last = ""

    def __enter__(self) -> _Progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def tell(self, text: str) -> None:
        if self._status is not None:
            self._status.update(text)
        elif text != self._last:
            _say(self._console, text)
        self._last = text


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _explain(file: Path, absent: list[str], seen: Seen, said: list[str], timeout_s: float, console: Console) -> None:
    """Who is missing, and where to look."""
    name = shlex.quote(str(file))
    if seen == Seen():
        for line in said:
            _say(console, f"  {line}")
        cure = f"`ray exec {name} 'ray-pccl status'` shows what is wrong there, or give it longer with --timeout"
        _say(console, f"error: the head did not tell within {timeout_s:g} s who is up: {cure}", style="red")
        return
    if seen.why:
        _say(console, f"  {seen.why}")
    log = f"ray exec {name} 'tail -n 50 /tmp/ray/session_latest/logs/monitor.*'"
    cure = f"`{log}` tells what became of the workers, `ray-pccl launch {name}` tries again"
    _say(console, f"error: not up within {timeout_s:g} s: {', '.join(absent)}: {cure}", style="red")


def _show(file: Path, wanted: Expected, seen: Seen, console: Console) -> None:
    """The cluster that is up, and how to go on."""
    _say(console, f"the cluster is up: {progress(wanted, seen)}", style="green")
    table = Table("node", "address", "CPUs", "GPUs")
    for node in sorted(seen.nodes, key=lambda node: (not node.is_head, node.address)):
        table.add_row("head" if node.is_head else "worker", node.address, f"{node.cpus:g}", f"{node.gpus:g}")
    console.print(table)
    _say(console, f"master: {seen.master}, ray_pccl {seen.version}")
    if seen.version != __version__:
        _say(console, f"advice: ray_pccl is {__version__} here and {seen.version} there: install the same", "yellow")
    name = shlex.quote(str(file))
    _say(console, "next:")
    _say(console, f"  ray exec {name} 'ray-pccl status'      what the master knows")
    _say(console, f"  ray dashboard {name}                   then, elsewhere: ray job submit --address")
    _say(console, "      http://localhost:8265 --working-dir . -- python my_script.py")
    _say(console, f"  ray down {name}                        ends the cluster")
