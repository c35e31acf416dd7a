"""One peer of the benchmark of shared state. `shared_state.py` starts it through `teams.py`; it is of no use alone.

python state_worker.py SOCKET PEERS ENDPOINT GROUP
"""

from __future__ import annotations

import mmap
import os
import sys
import time
import traceback
from multiprocessing.connection import Client
from typing import Any

import numpy as np
import xxhash
from work import MIB, Work

import ray_pccl
from ray_pccl import Communicator, SharedState, SharedStateSyncStrategy

PATIENCE_S = 60.0
TENSOR_BYTES = 64 * MIB
SENDS, RECEIVES = SharedStateSyncStrategy.SEND_ONLY, SharedStateSyncStrategy.RECEIVE_ONLY


class Commands:
    """What the benchmark may have this process do. All processes of a team are told the same at the same time."""

    def __init__(self, peers: str, endpoint: str, group: str) -> None:
        settings = ray_pccl.Settings.from_env(last_call_s=0.0)
        self.comm = Communicator(group, master=endpoint, min_world_size=int(peers), settings=settings)
        self.comm.connect(timeout=PATIENCE_S)
        self.rank = self.comm.rank
        self._tensors: dict[str, Any] = {}
        self._state = SharedState({})

    def hold(self, work: Work) -> None:
        """Makes the state: the same on all, in tensors of 64 MiB."""
        count = -(-work.nbytes // TENSOR_BYTES)
        each = work.nbytes // count // 4
        chance = np.random.default_rng(1)
        self._tensors = {f"tensor {n}": chance.standard_normal(each, np.float32) for n in range(count)}
        self._state = SharedState(self._tensors)
        self._sum = self._hash()

    def hash(self, work: Work) -> float:
        """Seconds that it takes to hash the state, everyone at the same time."""
        self.comm.barrier()
        begun = time.perf_counter()
        self._hash()
        return time.perf_counter() - begun

    def _hash(self) -> list[bytes]:
        return [xxhash.xxh3_128_digest(tensor) for tensor in self._tensors.values()]

    def agree(self, work: Work) -> float:
        """Seconds of a sync in which all hold the same."""
        self._state.revision += 1
        self.comm.barrier()
        begun = time.perf_counter()
        info = self.comm.sync_shared_state(self._state)
        seconds = time.perf_counter() - begun
        assert info.rx_bytes == 0
        return seconds

    def heal(self, work: Work, sources: int) -> float:
        """Seconds of a sync in which the last rank lacks everything, and the first so many ranks supply it."""
        strategy = SENDS if self.rank < sources else RECEIVES
        lacks = self.rank == self.comm.world_size - 1
        if lacks:
            for tensor in self._tensors.values():
                tensor.fill(7)
        self._state.revision += 1
        self.comm.barrier()
        begun = time.perf_counter()
        info = self.comm.sync_shared_state(self._state, strategy)
        seconds = time.perf_counter() - begun
        assert info.rx_bytes == (self._state.nbytes if lacks else 0), info
        assert self._hash() == self._sum, "the state is not what it was"
        return seconds

    def copy_in(self, work: Work, path: str) -> float:
        """Seconds in which the first rank copies the state into a shared memory file."""
        if self.rank:
            return 0.0
        begun = time.perf_counter()
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(file, self._state.nbytes)
        memory = np.frombuffer(mmap.mmap(file, self._state.nbytes), np.float32)
        os.close(file)
        start = 0
        for tensor in self._tensors.values():
            np.copyto(memory[start : start + tensor.size], tensor)
            start += tensor.size
        return time.perf_counter() - begun

    def copy_out(self, work: Work, path: str) -> float:
        """Seconds in which the last rank copies it out again."""
        if self.rank < self.comm.world_size - 1:
            return 0.0
        begun = time.perf_counter()
        file = os.open(path, os.O_RDONLY)
        memory = np.frombuffer(mmap.mmap(file, self._state.nbytes, prot=mmap.PROT_READ), np.float32)
        os.close(file)
        start = 0
        for tensor in self._tensors.values():
            np.copyto(tensor, memory[start : start + tensor.size])
            start += tensor.size
        seconds = time.perf_counter() - begun
        assert self._hash() == self._sum
        return seconds


def main() -> None:
    """Obeys until the benchmark lets go of the socket."""
    address, *arguments = sys.argv[1:]
    with Client(address, "AF_UNIX") as pipe:
        try:
            commands = Commands(*arguments)
        except Exception:
            pipe.send((False, traceback.format_exc()))
            raise
        pipe.send((True, (commands.rank, os.getpid(), f"ray_pccl {ray_pccl.__version__}")))
        while True:
            try:
                name, *told = pipe.recv()
            except EOFError:
                break
            try:
                answer = True, getattr(commands, name)(*told)
            except Exception:
                answer = False, traceback.format_exc()
            pipe.send(answer)
        commands.comm.close()


if __name__ == "__main__":
    main()
