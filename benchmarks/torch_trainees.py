"""Three replicas that train until one of them is killed, and how long the others take to commit a step without it.

    python torch_trainees.py ours SOCKET ENDPOINT
    python torch_trainees.py torchft SOCKET JSON

`torch_step.py` starts one such process for each contestant, in its own virtual environment. It imports what replicas
need, and forks three of them for each trial: no trial waits for imports, and nobody trains while another is timed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import mmap
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from worker import obey

REPLICAS, SURVIVORS = 3, 2
STEPS = 5
"""So many steps all three have committed together before one is killed."""
START_PATIENCE_S = 60.0
WIDTH, BATCH = 768, 8
"""A perceptron with two layers: 4.7 MB of gradients."""


class Board:
    """What replicas tell the process that forked them, in memory that they share."""

    SLOT = struct.Struct("qd")

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, REPLICAS * self.SLOT.size)

    def clear(self) -> None:
        """Before a trial."""
        self._memory[:] = bytes(len(self._memory))

    def committed(self, replica: int, contributors: int) -> None:
        """A replica has committed a step: counts those of all three, and keeps when the first one of two came."""
        now = time.monotonic()
        together, alone = self._slot(replica)
        if contributors == REPLICAS:
            together, alone = together + 1, 0.0
        elif not alone:
            alone = now
        self.SLOT.pack_into(self._memory, replica * self.SLOT.size, together, alone)

    def are_under_way(self) -> bool:
        """Whether all three train together."""
        slots = [self._slot(replica) for replica in range(REPLICAS)]
        return all(together >= STEPS and not alone for together, alone in slots)

    def went_on_at(self, struck: float) -> float | None:
        """When the later of the survivors had committed a step without the victim, if both have."""
        times = [self._slot(replica)[1] for replica in range(SURVIVORS)]
        return max(times) if min(times) > struck else None

    def _slot(self, replica: int) -> tuple[int, float]:
        together, alone = self.SLOT.unpack_from(self._memory, replica * self.SLOT.size)
        return together, alone


class Trials:
    """What the benchmark may have this process do.

    Args:
        train: Trains for ever as the replica of a number, and calls back with the number of contributors of each
            committed step. The text is where the replicas of one trial meet.
        meeting: Opens the place where the replicas of one trial meet.
    """

    def __init__(
        self,
        train: Callable[[int, str, Callable[[int], None]], NoReturn],
        meeting: Callable[[], contextlib.AbstractContextManager[str]],
    ) -> None:
        self._train, self._meeting = train, meeting
        self._board = Board()

    def strike(self, patience_s: float) -> float | None:
        """Kills one of three, and returns the seconds until both others have committed a step without it.

        None: they have not within `patience_s`.
        """
        self._board.clear()
        with self._meeting() as place:
            pids = [self._fork(replica, place) for replica in range(REPLICAS)]
            try:
                _wait_until(self._board.are_under_way, START_PATIENCE_S, pids)
                time.sleep(random.uniform(0.02, 0.2))  # so that no two trials strike the same moment of a step
                struck = time.monotonic()
                os.kill(pids[-1], signal.SIGKILL)
                with contextlib.suppress(TimeoutError):
                    _wait_until(lambda: self._board.went_on_at(struck) is not None, patience_s, pids[:-1])
                went_on = self._board.went_on_at(struck)
                return None if went_on is None else went_on - struck
            finally:
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(pid, 0)

    def _fork(self, replica: int, place: str) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                self._train(replica, place, lambda contributors: self._board.committed(replica, contributors))
            except BaseException:
                _last_words(os.getpid()).write_text(traceback.format_exc())
            os._exit(1)
        return pid


def _last_words(pid: int) -> Path:
    return Path(tempfile.gettempdir()) / f"replica-{pid}"


def _wait_until(condition: Callable[[], bool], patience_s: float, pids: list[int]) -> None:
    """Looks every millisecond: the times themselves are taken by the replicas."""
    deadline = time.monotonic() + patience_s
    while not condition():
        for pid in pids:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                said = _last_words(pid)
                raise RuntimeError(said.read_text() if said.exists() else f"a replica ended with status {status}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {patience_s:g} s")
        time.sleep(0.001)


def _model(replica: int) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(replica))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3), batch


# ------------------------------------------------------------------------------------------------------------ ours


def ours(endpoint: str) -> tuple[str, Trials]:
    """ray_pccl: an `ElasticTrainer` in each replica, with the settings that it has by itself."""
    from ray_pccl import Communicator, __version__
    from ray_pccl.torch import ElasticTrainer

    def train(replica: int, group: str, committed: Callable[[int], None]) -> NoReturn:
        model, optimizer, batch = _model(replica)
        with Communicator(
            group, master=endpoint, min_world_size=SURVIVORS, expected_world_size=REPLICAS
        ) as communicator:
            trainer = ElasticTrainer(communicator, model, optimizer)
            trainer.join()
            while True:
                model(batch).square().mean().backward()
                committed(len(trainer.step().contributors))

    @contextlib.contextmanager
    def meeting() -> Iterator[str]:
        yield f"trainees-{os.urandom(4).hex()}"

    return f"ray_pccl {__version__}", Trials(train, meeting)


# --------------------------------------------------------------------------------------------------------- torchft


def torchft(options: str) -> tuple[str, Trials]:
    """torchft: a lighthouse for each trial, and a `Manager` in each replica, which is a replica group of one.

    Gradients are reduced with `Manager.allreduce`: `torchft.DistributedDataParallel` of 0.2.0 ends its process with an
    AssertionError (ddp.py, line 76) if a peer dies in the all-reduce.
    """
    knobs = json.loads(options)
    from torchft import Manager, Optimizer, ProcessGroupGloo

    def seconds(name: str) -> dict[str, timedelta]:
        return {name: timedelta(seconds=knobs[name])} if name in knobs else {}

    def train(replica: int, lighthouse: str, committed: Callable[[int], None]) -> NoReturn:
        model, bare_optimizer, batch = _model(replica)

        def load(state: dict[str, Any]) -> None:
            model.load_state_dict(state["model"])
            bare_optimizer.load_state_dict(state["optimizer"])

        store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        manager = Manager(
            pg=ProcessGroupGloo(**seconds("timeout")),
            load_state_dict=load,
            state_dict=lambda: {"model": model.state_dict(), "optimizer": bare_optimizer.state_dict()},
            min_replica_size=SURVIVORS,
            rank=0,
            world_size=1,
            store_addr="localhost",
            store_port=store.port,
            lighthouse_addr=lighthouse,
            replica_id=f"replica{replica}",
            hostname="localhost",
            **seconds("timeout"),
            **seconds("heartbeat_interval"),
        )
        optimizer = Optimizer(manager, bare_optimizer)
        while True:
            before = manager.current_step()
            optimizer.zero_grad()  # begins a quorum
            model(batch).square().mean().backward()
            for work in [manager.allreduce(parameter.grad) for parameter in model.parameters()]:
                work.wait()
            optimizer.step()  # steps if the manager says that it should commit
            if manager.current_step() > before:
                committed(manager.num_participants())

    @contextlib.contextmanager
    def meeting() -> Iterator[str]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [str(Path(sys.executable).parent / "torchft_lighthouse"), "--min_replicas", str(SURVIVORS)]
        process = subprocess.Popen([*command, "--bind", f"0.0.0.0:{port}", *knobs.get("lighthouse", [])])
        try:
            yield f"http://localhost:{port}"
        finally:
            process.kill()
            process.wait()

    return f"torchft {importlib.metadata.version('torchft')}, torch {torch.__version__}", Trials(train, meeting)


def main() -> None:
    """Forks replicas until the benchmark lets go of the socket."""
    kind, address, argument = sys.argv[1:]

    def begin() -> tuple[int, str, Trials, Callable[[], object]]:
        version, trials = {"ours": ours, "torchft": torchft}[kind](argument)
        return 0, version, trials, lambda: None

    obey(address, begin)


if __name__ == "__main__":
    main()
