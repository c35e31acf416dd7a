"""Members of a group in threads of one process: quick, where nobody is to be killed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import master_actor
from ray_pccl import Communicator, Settings

Program = Callable[[Communicator, int], Any]


def together(
    programs: Sequence[Program] | Program, count: int = 0, *, late: Sequence[Program] = (), **communicator: Any
) -> list[Any]:
    """What `count` members return that run a program, or one each; what a program raises is returned as well.

    Those of `late` connect when the others have formed a group.
    """
    each = list(programs) if isinstance(programs, Sequence) else [programs] * count
    settings = Settings(last_call_s=0, op_timeout_s=20, join_timeout_s=20)

    def run(program: Program, number: int, *, expected: int) -> Any:
        given = {"min_world_size": expected, "settings": settings} | communicator
        with Communicator("train", master=endpoint, **given) as comm:
            connected.release()
            try:
                return program(comm, number)
            except Exception as error:
                return error

    connected = threading.Semaphore(0)
    with master_actor.serve() as endpoint, ThreadPoolExecutor(len(each) + len(late)) as pool:
        started = [pool.submit(run, program, number, expected=len(each)) for number, program in enumerate(each)]
        for _ in each:
            assert connected.acquire(timeout=20), "the group has not formed"
        started += [pool.submit(run, program, len(each) + n, expected=len(each)) for n, program in enumerate(late)]
        return [future.result(60) for future in started]


def succeeded(outcomes: Sequence[Any]) -> list[Any]:
    """The outcomes, of which none is an error."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return list(outcomes)
