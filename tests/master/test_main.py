"""``python -m master_actor``: prints its endpoint, serves, and ends clean."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from master_actor.__main__ import _Company
from ray_pccl.control.endpoint import Endpoint
from ray_pccl.control.messages import Decide, Register, Registered, Stopped, StoreOp
from tests.master.raw_peer import RawPeer

PATIENCE_S = 20
KEY = "aabbccddeeff"


@contextmanager
def _program(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    program = subprocess.Popen(
        [sys.executable, "-m", "master_actor", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        yield program
    finally:
        program.kill()
        program.communicate(timeout=PATIENCE_S)


def _endpoint(program: subprocess.Popen[str]) -> Endpoint:
    assert program.stdout is not None
    return Endpoint.parse(program.stdout.readline().strip())


def _end(program: subprocess.Popen[str], number: signal.Signals = signal.SIGTERM) -> tuple[int, str, str]:
    """Signals the program; its exit code, and what else it wrote."""
    program.send_signal(number)
    out, err = program.communicate(timeout=PATIENCE_S)
    return program.returncode, out, err


def _failed(*arguments: str, **environment: str) -> str:
    """The one line that a program which can't start says."""
    with _program(*arguments, **environment) as program:
        out, err = program.communicate(timeout=PATIENCE_S)
    assert program.returncode != 0
    assert out == ""
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    return lines[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_prints_its_endpoint_serves_and_ends_clean_on_a_signal(number: signal.Signals) -> None:
    with _program("--port", "0") as program:
        endpoint = _endpoint(program)
        assert endpoint.host == "127.0.0.1"
        with RawPeer(endpoint) as peer:
            peer.join("a")
            assert peer.receive(Decide).epoch == 1
            code, out, err = _end(program, number)
            assert (code, out) == (0, "")
            assert "Traceback" not in err and endpoint.key.hex() not in err
            assert peer.receive(Stopped)


def test_it_goes_on_where_its_journal_ended(tmp_path: Path) -> None:
    arguments = ("--port", "0", "--journal", str(tmp_path / "journal"))
    with _program(*arguments) as program:
        first = _endpoint(program)
        with RawPeer(first) as peer:
            peer.join("a")
            decide = peer.receive(Decide)
            peer.ask(StoreOp.SET, "k", values=(b"v",))
            program.kill()
            program.wait(PATIENCE_S)
    with _program(*arguments) as program:
        assert _endpoint(program) == first
        with RawPeer(first) as peer:
            peer.send(Register("a", "g", "h", 1, decide.members, False, (), (), False, None))
            peer.receive(Registered)
            assert peer.ask(StoreOp.GET, "k").values == (b"v",)
        assert _end(program)[0] == 0


def test_it_takes_its_key_from_the_environment() -> None:
    with _program("--port", "0", RAY_PCCL_KEY=KEY) as program:
        assert _endpoint(program).key.hex() == KEY
        assert _end(program)[0] == 0


def test_a_port_that_is_taken_is_said_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert port in _failed("--port", port)


def test_a_port_that_does_not_exist_is_said_in_one_line() -> None:
    assert "70000" in _failed("--port", "70000")


def test_a_bad_key_is_said_in_one_line_that_names_the_variable() -> None:
    line = _failed("--port", "0", RAY_PCCL_KEY="not hexadecimal")
    assert "RAY_PCCL_KEY" in line


def test_a_bad_setting_is_said_in_one_line_that_names_the_variable() -> None:
    assert "RAY_PCCL_HEARTBEAT_TIMEOUT_S" in _failed("--port", "0", RAY_PCCL_HEARTBEAT_TIMEOUT_S="soon")


def test_a_journal_that_can_not_be_opened_is_said_in_one_line(tmp_path: Path) -> None:
    path = str(tmp_path / "no such directory" / "journal")
    assert path in _failed("--port", "0", "--journal", path)


def test_a_journal_that_is_something_else_is_said_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b"this is no journal at all, but somebody's diary\n" * 100)
    assert str(path) in _failed("--port", "0", "--journal", str(path))


def test_an_address_that_is_not_ours_is_said_in_one_line() -> None:
    assert "192.0.2.1" in _failed("--host", "192.0.2.1", "--port", "0")


def test_it_ends_when_another_takes_over_its_journal(tmp_path: Path) -> None:
    arguments = ("--port", "0", "--journal", str(tmp_path / "journal"))
    with _program(*arguments) as first, RawPeer(_endpoint(first)) as peer, _program(*arguments) as second:
        endpoint = _endpoint(second)
        peer.join("a")  # what the first would have to write shows it that it is the first no more
        _, err = first.communicate(timeout=PATIENCE_S)
        assert first.returncode == 3
        assert "another master" in err
        with RawPeer(endpoint) as other:
            other.join("b")
            assert other.is_served()
        assert _end(second)[0] == 0


def test_one_that_lingers_ends_by_itself_soon_after_its_last_peer() -> None:
    with _program("--port", "0", "--linger", "0.3") as program:
        endpoint = _endpoint(program)
        with RawPeer(endpoint) as peer:
            peer.join("a")
            assert peer.receive(Decide).epoch == 1
            with pytest.raises(subprocess.TimeoutExpired):
                program.wait(1.0)  # it has company
        assert program.wait(PATIENCE_S) == 0


class _Busy:
    """A master that does not answer in time."""

    def company(self) -> tuple[bool, bool]:
        raise TimeoutError


def test_one_that_is_too_busy_to_say_who_is_there_does_not_take_itself_for_alone() -> None:
    company = _Company(_Busy(), 0.0)  # type: ignore[arg-type]
    company._patience_s = 0.0
    assert not company.gone()


class _Empty:
    """A master that has no peers now."""

    def __init__(self, *, had_some: bool) -> None:
        self._had_some = had_some

    def company(self) -> tuple[bool, bool]:
        return False, self._had_some


def test_peers_that_came_and_went_between_two_looks_have_been_there() -> None:
    assert not _Company(_Empty(had_some=False), 0.0).gone(), "the first peer has a minute"  # type: ignore[arg-type]
    assert _Company(_Empty(had_some=True), 0.0).gone()  # type: ignore[arg-type]
