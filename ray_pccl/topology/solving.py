"""Orders a ring in a process of its own, so that the event loop of a busy master goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ray_pccl.topology import exact
from ray_pccl.topology.ordering import order_ring
from ray_pccl.topology.requests import asked, told
from ray_pccl.topology.rings import OrderingError, RingOrder

INLINE = 1 << 18
"""As many steps of the exact way as take some milliseconds: 11 hosts of one peer. So few need no process."""
START_S = 10.0
"""What starting an interpreter and handing over a large matrix may take, on a machine that has other work."""


async def solve(
    bandwidth: NDArray[np.float64],
    hosts: Sequence[int] | None,
    *,
    budget_s: float,
    start: Sequence[int] | None = None,
    seed: int = 0,
) -> RingOrder:
    """What `order_ring` returns, without holding up the event loop: all but small rings are ordered by a process.

    The process is gone when this returns or raises, also when it is cancelled.

    Raises:
        NoRingError: As `order_ring` does.
        SettingsError: Likewise.
        OrderingError: The process died, could not be started, or took far longer than its budget, and was killed.
    """
    sizes = Counter(hosts if hosts is not None and len(set(hosts)) > 1 else range(len(bandwidth))).values()
    if not sizes or exact.steps(sizes) <= INLINE:
        return order_ring(bandwidth, hosts, budget_s=budget_s, seed=seed, start=start)
    request = asked(bandwidth, hosts, budget_s=budget_s, seed=seed, start=start)
    patience_s = 2 * budget_s + START_S
    try:
        async with asyncio.timeout(patience_s):
            answer, code = await _run(request)
    except TimeoutError:
        reason = f"ordering {len(bandwidth)} peers took more than {patience_s:g} s on a budget of {budget_s:g} s"
        raise OrderingError(f"{reason}, and was ended: the machine is overloaded; the ring stays as it is") from None
    except OSError as error:
        raise OrderingError(f"the process that orders rings could not be started: {error}") from error
    if code:
        reason = f"the process that was ordering {len(bandwidth)} peers ended with code {code}"
        raise OrderingError(f"{reason}, without an answer; the ring stays as it is")
    return told(answer)


async def _run(request: bytes) -> tuple[bytes, int | None]:
    """The answer and how the process ended; however this ends, the process is gone then."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-P", "-m", "ray_pccl.topology", str(os.getpid())),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        },
    )
    try:
        answer, _ = await process.communicate(request)
        return answer, process.returncode
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await _gone(process)


async def _gone(process: asyncio.subprocess.Process) -> None:
    """Waits for a killed process, which takes a moment, even if it is cancelled a second time meanwhile."""
    waiting = asyncio.ensure_future(process.wait())
    try:
        await asyncio.shield(waiting)
    except asyncio.CancelledError:
        await waiting
        raise
