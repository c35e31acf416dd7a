"""Ordering in a process of its own: the same answers, errors as data, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ray_pccl.errors import SettingsError
from ray_pccl.testing import eventually
from ray_pccl.topology import requests, solving
from ray_pccl.topology.ordering import NoRingError, order_ring
from ray_pccl.topology.rings import OrderingError
from tests.topology.matrices import Matrix, uniform


def _children() -> set[int]:
    """The processes that this one has started and that order rings."""
    found: set[int] = set()
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended since it was listed
            found |= {int(child) for child in (task / "children").read_text().split() if _orders(int(child))}
    return found


def _orders(pid: int) -> bool:
    """Whether the process runs, and orders rings."""
    try:
        return b"ray_pccl.topology" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return False


def _processor_s(pid: int) -> float:
    """What the process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _hopeless(n: int = 60) -> Matrix:
    """Keeps the search busy for all its budget."""
    bandwidth = np.zeros((n, n))
    bandwidth[: n // 2, : n // 2] = bandwidth[n // 2 - 1 :, n // 2 - 1 :] = 1.0
    return bandwidth


def test_the_process_finds_what_is_found_here() -> None:
    bandwidth = uniform(60, np.random.default_rng(0))
    hosts = [peer // 2 for peer in range(60)]
    assert asyncio.run(solving.solve(bandwidth, None, budget_s=5.0)) == order_ring(bandwidth, budget_s=5.0)
    ours = asyncio.run(solving.solve(bandwidth, hosts, budget_s=5.0, start=range(60)))
    assert ours == order_ring(bandwidth, hosts, budget_s=5.0, start=range(60))
    assert not _children()


def test_small_rings_need_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solving, "_run", None)
    bandwidth = np.random.default_rng(1).random((11, 11))
    assert asyncio.run(solving.solve(bandwidth, None, budget_s=1.0)) == order_ring(bandwidth)


def test_the_event_loop_goes_on_meanwhile() -> None:
    async def both() -> int:
        solved = asyncio.ensure_future(solving.solve(_hopeless(), None, budget_s=0.6))
        turns = 0
        while not solved.done():
            await asyncio.sleep(0.01)
            turns += 1
        with pytest.raises(NoRingError):
            await solved
        return turns

    assert asyncio.run(both()) > 10


@pytest.mark.parametrize("n", [4, 60])
def test_no_ring_is_told_with_its_edges(n: int) -> None:
    bandwidth = np.ones((n, n))
    bandwidth[2] = 0.0
    with pytest.raises(NoRingError, match="peer 2 can send to nobody") as caught:
        asyncio.run(solving.solve(bandwidth, None, budget_s=1.0))
    assert set(caught.value.edges) == {(2, j) for j in range(n) if j != 2}


def test_wrong_arguments_are_told() -> None:
    with pytest.raises(SettingsError, match="start must be an order"):
        asyncio.run(solving.solve(np.ones((60, 60)), None, budget_s=1.0, start=[0, 1]))


def test_a_cancelled_call_leaves_no_process() -> None:
    async def cancelled() -> None:
        call = asyncio.ensure_future(solving.solve(_hopeless(), None, budget_s=60.0))
        while not _children():
            await asyncio.sleep(0.01)
        cancelled_at = time.monotonic()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert time.monotonic() - cancelled_at < 5.0
        assert not _children()

    asyncio.run(asyncio.wait_for(cancelled(), 30.0))


def test_a_process_that_overruns_its_budget_by_far_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solving, "START_S", -119.0)  # so that patience ends after a second
    begin = time.monotonic()
    with pytest.raises(OrderingError, match="took more than 1 s"):
        asyncio.run(solving.solve(_hopeless(), None, budget_s=60.0))
    assert time.monotonic() - begin < 6.0
    assert not _children()


def test_a_process_that_is_killed_is_an_error() -> None:
    async def killed() -> None:
        call = asyncio.ensure_future(solving.solve(_hopeless(), None, budget_s=60.0))
        while not (children := _children()):
            await asyncio.sleep(0.01)
        for child in children:
            os.kill(child, signal.SIGKILL)
        with pytest.raises(OrderingError, match="ended with code -9"):
            await call

    asyncio.run(asyncio.wait_for(killed(), 30.0))
    assert not _children()


def test_the_process_ends_with_its_parent(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"""
import asyncio, os, pathlib
from ray_pccl.topology import solving
from tests.topology.test_solving import _children, _hopeless, _processor_s
async def main():
    call = asyncio.ensure_future(solving.solve(_hopeless(), None, budget_s=60.0))
    while not _children() or _processor_s(*_children()) < 0.8:  # by then it is past its start, and at work
        await asyncio.sleep(0.01)
    pathlib.Path({str(pid_file)!r}).write_text(str(_children().pop()))
    os._exit(0)
asyncio.run(main())
"""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", script], timeout=30, check=True, cwd=root)
    eventually(lambda: not _orders(int(pid_file.read_text())))


@pytest.mark.parametrize(
    "request_",
    [
        b"",
        b"nonsense",
        msgspec.msgpack.encode({"peers": 3}),
        msgspec.msgpack.encode(requests.Request(3, b"short", None, 1.0, 0, None)),
        msgspec.msgpack.encode(requests.Request(-1, bytes(8), None, 1.0, 0, None)),
        msgspec.msgpack.encode(requests.Request(10**9, bytes(8), None, 1.0, 0, None)),
        msgspec.msgpack.encode(requests.Request(1, bytes(8), None, float("inf"), 0, None)),
        msgspec.msgpack.encode(requests.Request(1, bytes(8), None, 1.0, -5, None)),
    ],
)
def test_a_wrong_request_is_answered_with_an_error(request_: bytes) -> None:
    with pytest.raises(SettingsError):
        requests.told(requests.answered(request_))


def test_it_is_a_program_that_reads_and_writes() -> None:
    bandwidth = np.random.default_rng(2).random((5, 5))
    request = requests.asked(bandwidth, None, budget_s=1.0, seed=0, start=None)
    command = [sys.executable, "-m", "ray_pccl.topology"]
    done = subprocess.run(command, input=request, capture_output=True, timeout=30, check=True)
    assert requests.told(done.stdout) == order_ring(bandwidth)
    assert done.stderr == b""
