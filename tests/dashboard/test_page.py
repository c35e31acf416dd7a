"""The page of a real master: where it is, that it outlives a restart, and that the master does without it."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import master_actor
from master_actor.core.records import Booted, decode_records
from master_actor.dashboard import page
from master_actor.dashboard.access import token_of
from master_actor.thread import MasterThread
from ray_pccl.reports import from_json
from ray_pccl.testing.waiting import eventually
from tests.dashboard.requests import ask, stream
from tests.master.raw_peer import RawPeer


def _served(journal: Path, **more: object) -> MasterThread:
    arguments = {"dashboard_host": "127.0.0.1", "dashboard_port": 0} | more
    return master_actor.serve(journal=str(journal), **arguments)  # type: ignore[arg-type]


def _port(master: MasterThread) -> int:
    return int(master.page_url.partition("?")[0].rstrip("/").rpartition(":")[2])


def _report(port: int) -> object:
    return from_json(ask(port, "/api/report").body)  # type: ignore[attr-defined]


def test_a_master_tells_where_its_page_is_and_the_page_tells_of_the_master(tmp_path: Path) -> None:
    master = _served(tmp_path / "journal")
    endpoint = master.start()
    try:
        assert master.report().dashboard == master.page_url
        with RawPeer(endpoint) as peer:
            peer.join("p", group="g")
            eventually(lambda: _report(_port(master)).groups, what="the group is in the report")  # type: ignore[attr-defined]
        with stream(_port(master)) as news:
            assert next(news)["boot"] == 1
    finally:
        master.stop()


@pytest.mark.parametrize("crash", [True, False])
def test_a_restarted_master_has_its_page_on_the_same_port(tmp_path: Path, crash: bool) -> None:
    first = _served(tmp_path / "journal")
    first.start()
    port = _port(first)
    with stream(port) as news:
        next(news)
        first.crash() if crash else first.stop()
        with pytest.raises(ConnectionRefusedError):
            ask(port, "/")
        again = _served(tmp_path / "journal")
        again.start()
        try:
            assert _port(again) == port
            assert _report(port).boot == 2  # type: ignore[attr-defined]
        finally:
            again.stop()


_FORKS_AND_DIES = """
import os, signal, sys, master_actor
master = master_actor.serve(dashboard_host="127.0.0.1", dashboard_port=0)
endpoint = master.start()
child = os.fork()
if child == 0:
    sys.stdin.read()
    os._exit(0)
print(endpoint.port, master.page_url, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_child_that_outlives_a_master_which_was_killed_keeps_no_port_of_it() -> None:
    words = [sys.executable, "-c", _FORKS_AND_DIES]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdin is not None and killed.stdout is not None
        own, page_url = killed.stdout.readline().split()
        killed.wait(20)
        for port in (int(own), int(page_url.rstrip("/").rpartition(":")[2])):
            with pytest.raises(ConnectionRefusedError):
                ask(port, "/")
        killed.stdin.close()  # which ends the child


def test_the_usual_port_is_taken_unless_another_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr(page, "DEFAULT_PAGE_PORT", taken.getsockname()[1])
        master = _served(tmp_path / "one", dashboard_port=None)
        master.start()
        assert _port(master) not in (0, taken.getsockname()[1])
        master.stop()
    master = _served(tmp_path / "two", dashboard_port=None)
    master.start()
    assert _port(master) == page.DEFAULT_PAGE_PORT
    master.stop()


def _serves(master: MasterThread) -> bool:
    with RawPeer(master.server.endpoint) as peer:
        return peer.welcome.boot == 1


def test_a_port_that_is_taken_costs_a_warning_and_the_page_but_not_the_master(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with caplog.at_level(logging.WARNING, "ray_pccl.master"):
            master = _served(tmp_path / "journal", dashboard_port=taken.getsockname()[1])
            master.start()
        try:
            assert _serves(master)
            assert master.report().dashboard == ""
        finally:
            master.stop()
    [warning] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "no live page" in warning and "taken" in warning


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host", "x" * 300])
def test_an_address_that_is_not_ours_costs_the_page_but_not_the_master(tmp_path: Path, host: str) -> None:
    master = _served(tmp_path / "journal", dashboard_host=host)
    master.start()
    try:
        assert _serves(master)
        assert master.page_url == ""
    finally:
        master.stop()


def test_without_aiohttp_there_is_a_warning_and_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(page.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING, "ray_pccl.master"):
        master = _served(tmp_path / "journal")
        master.start()
    assert _serves(master)
    master.stop()
    assert [record.getMessage() for record in caplog.records] == ["there is no live page: aiohttp is not installed"]


def test_a_server_that_can_not_be_loaded_costs_a_warning_and_the_page_but_not_the_master(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(page, "_load", lambda: 1 / 0)
    with caplog.at_level(logging.WARNING, "ray_pccl.master"):
        master = _served(tmp_path / "journal")
        master.start()
        eventually(lambda: "no live page" in caplog.text)
    try:
        assert _serves(master)
        assert master.report().dashboard == ""
    finally:
        master.stop()


def test_elsewhere_than_on_loopback_the_address_has_the_token_of_the_masters_key(tmp_path: Path) -> None:
    master = _served(tmp_path / "journal", dashboard_host="0.0.0.0", key=b"secret" * 6)
    master.start()
    try:
        token = token_of(b"secret" * 6)
        assert master.report().dashboard.endswith(f"?token={token}")
        assert "0.0.0.0" not in master.page_url
        assert ask(_port(master), "/api/report").status == 401
        assert ask(_port(master), f"/api/report?token={token}").status == 200
    finally:
        master.stop()


def test_a_master_without_a_page_loads_nothing_of_it() -> None:
    script = (
        "import json, sys, master_actor\n"
        "with master_actor.serve():\n"
        "    print(json.dumps([name for name in sys.modules if name in ('aiohttp', 'master_actor.dashboard.serving')]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == []


def test_a_journal_from_before_there_was_a_page_can_be_read() -> None:
    entry = msgspec.msgpack.encode([["Booted", 3, "nonce", "id", "127.0.0.1", 4000, b"key"]])
    assert decode_records(entry) == [Booted(3, "nonce", "id", "127.0.0.1", 4000, b"key", dashboard_port=0)]


def test_the_program_says_where_its_page_is(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "master_actor", "--port", "0", "--dashboard-port", "0"]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert program.stdout is not None and program.stderr is not None
        assert "#" in program.stdout.readline()
        line = next(line for line in program.stderr if line.startswith("live page: "))
        port = int(line.strip().rstrip("/").rpartition(":")[2])
        assert _report(port).boot == 1  # type: ignore[attr-defined]
    finally:
        program.terminate()
        program.communicate(timeout=20)
