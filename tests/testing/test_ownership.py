import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ray_pccl.testing import eventually
from ray_pccl.testing.ownership import VARIABLE, Ownership, send_signal

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(SLEEP)
    yield process
    process.kill()
    process.wait()


def test_a_process_started_by_a_process_is_owned_as_well() -> None:
    ownership = Ownership()
    parent = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    process = subprocess.Popen([sys.executable, "-c", parent], env=ownership.environment())

    owned = eventually(lambda: len(found := ownership.processes()) == 2 and found)

    assert process.pid in owned
    with pytest.raises(AssertionError, match="left behind"):
        ownership.wait_until_gone(0.05)
    process.wait()


def test_what_is_left_behind_is_named_and_ended() -> None:
    ownership = Ownership()
    process = subprocess.Popen(SLEEP, env=ownership.environment())

    with pytest.raises(AssertionError, match=rf"left behind.*{process.pid}.*time\.sleep"):
        ownership.wait_until_gone(0.05)

    assert process.wait(5) == -signal.SIGKILL
    ownership.wait_until_gone(5)


def test_two_owners_do_not_see_each_other(stranger: subprocess.Popen[bytes]) -> None:
    one, other = Ownership(), Ownership()
    process = subprocess.Popen(SLEEP, env=one.environment())

    eventually(lambda: list(one.processes()) == [process.pid])
    assert not other.processes()

    process.kill()
    process.wait()


def test_adopting_marks_what_is_started_meanwhile_and_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "before")
    ownership = Ownership()

    with ownership.adopt():
        process = subprocess.Popen(SLEEP)
    eventually(lambda: list(ownership.processes()) == [process.pid])
    assert os.environ[VARIABLE] == "before"

    process.kill()
    process.wait()


def test_a_stranger_is_never_signalled(stranger: subprocess.Popen[bytes]) -> None:
    with pytest.raises(PermissionError, match=f"process {stranger.pid} was not started by a fixture"):
        send_signal(stranger.pid, signal.SIGKILL)

    assert stranger.poll() is None


def test_the_test_process_itself_is_never_signalled() -> None:
    with pytest.raises(PermissionError):
        send_signal(os.getpid(), signal.SIGTERM)
