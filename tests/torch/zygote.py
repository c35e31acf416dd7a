"""A process that has imported torch, from which tests fork the ranks of process groups."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

from tests.torch.ranks import Ended, Failed, collect, fork

ROOT = Path(__file__).parents[2]
GROUP_TIMEOUT_S = 20.0


class Zygote:
    """Runs functions of test modules on ranks. Each call costs a fork for every rank, and no import."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.torch.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])} | dict(environment),
            cwd=ROOT,
        )

    def run(
        self,
        function: Callable[..., Any],
        size: int,
        *args: Any,
        timeout: float = 60.0,
        environment: Mapping[str, str | None] | None = None,
        group: bool = True,
    ) -> list[Any]:
        """What ``function(rank, *args)`` returned on each rank of a process group of `size`; `Ended` for a dead one.

        With ``group=False`` it is ``function(rank, store_path, *args)``, and makes the group itself. A rank that
        raised makes this raise, with its traceback.
        """
        request = (function.__module__, function.__qualname__, size, args, timeout, dict(environment or {}), group)
        assert self._process.stdin is not None and self._process.stdout is not None
        pickle.dump(request, self._process.stdin)
        self._process.stdin.flush()
        answers = pickle.load(self._process.stdout)
        failures = [f"rank {rank}:\n{end.trace}" for rank, end in enumerate(answers) if isinstance(end, Failed)]
        dead = [f"rank {rank}: {end!r}" for rank, end in enumerate(answers) if isinstance(end, Ended)]
        assert not failures, "\n".join(failures + dead)
        return list(answers)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def threads_left() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ray_pccl")]


def _run_rank(rank: int, function: Callable[..., Any], size: int, args: tuple[Any, ...], path: str, group: bool) -> Any:
    import torch
    import torch.distributed as dist

    from ray_pccl.testing import eventually

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if not group:
        return function(rank, path, *args)
    store = dist.FileStore(path, size)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("pccl", store=store, rank=rank, world_size=size, timeout=timeout)
    found = function(rank, *args)
    dist.destroy_process_group()
    eventually(lambda: not threads_left(), 5.0, lambda: f"threads end: {threads_left()}")
    return found


def _answer(request: tuple[Any, ...]) -> list[Any]:
    module, name, size, args, timeout, environment, group = request
    function = getattr(importlib.import_module(module), name)
    with tempfile.TemporaryDirectory() as folder:

        def main(answer: Callable[[Any], None], rank: int) -> None:
            for key, value in environment.items():
                if value is None:
                    os.environ.pop(key, None)
                else:
                    os.environ[key] = value
            answer(_run_rank(rank, function, size, args, f"{folder}/store", group))

        ranks = [fork(lambda answer, rank=rank: main(answer, rank)) for rank in range(size)]
        return collect(ranks, timeout)


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    # What ranks would import when they first make an optimiser, or a group.
    importlib.import_module("torch._dynamo")
    importlib.import_module("ray_pccl.torch.elastic")
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        try:
            ends = _answer(request)
        except BaseException as error:
            ends = [Failed(repr(error), traceback.format_exc())]
        pickle.dump(ends, answers)
        answers.flush()


if __name__ == "__main__":
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what ranks print goes with the errors
    _serve(sys.stdin.buffer, pipe)
