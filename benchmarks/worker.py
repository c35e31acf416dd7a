"""One process of one library, in the benchmark of all-reduce. `teams.py` starts it; it is of no use alone.

    python worker.py LIBRARY SOCKET ...

It obeys the benchmark through a Unix socket, and blocks on it while another library's turn is timed. It runs in the
virtual environments of the rivals too, so what is imported at the top is Python's own.
"""

from __future__ import annotations

import functools
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client
from typing import Any

from work import Work

PATIENCE_S = 60.0
Pairs = list[tuple[Any, Any]]
"""Inputs and outputs; where both are the same tensor, the sum is made in place."""


class Ours:
    """ray_pccl. The time of a call includes the commit."""

    def __init__(self, peers: str, endpoint: str, group: str) -> None:
        import ray_pccl

        settings = ray_pccl.Settings.from_env(last_call_s=0.0)
        self._comm = ray_pccl.Communicator(group, master=endpoint, min_world_size=int(peers), settings=settings)
        self._comm.connect(timeout=PATIENCE_S)
        self.rank, self.size = self._comm.rank, self._comm.world_size
        self.version = f"ray_pccl {ray_pccl.__version__}"

    def tensors(self, work: Work) -> Pairs:
        """As a user would have them; all pages are really there."""
        make = _torch_tensor if work.bfloat16 or work.in_torch else _numpy_array
        return _pairs(work, make)

    def step(self, work: Work, pairs: Pairs) -> Callable[[], Any]:
        """One iteration."""
        how: dict[str, Any] = {}
        if work.quantized:
            from ray_pccl.descriptors import DataType, QuantizationAlgorithm, QuantizationOptions

            how["quantization_options"] = QuantizationOptions(DataType.UINT8, QuantizationAlgorithm.MIN_MAX)
        if work.count == 1:
            ((send, recv),) = pairs
            if send is recv:
                return lambda: self._comm.all_reduce(send, **how)
            return lambda: self._comm.all_reduce(send, recv, **how)

        def in_flight() -> None:
            handles = [
                self._comm.all_reduce_async(send, recv, tag=tag, **how) for tag, (send, recv) in enumerate(pairs)
            ]
            for handle in handles:
                handle.result(PATIENCE_S)

        return in_flight

    def end(self) -> None:
        """Leaves the group."""
        self._comm.close()


class Torch:
    """torch.distributed. Its call works in place only, so it is spared the copy that the others' results are."""

    def __init__(self, backend: str, peers: str, folder: str, rank: str) -> None:
        import torch.distributed

        self._dist = torch.distributed
        self.rank, self.size = int(rank), int(peers)
        self.version = f"torch {torch.__version__}"
        if backend == "pccl":
            import ray_pccl.torch  # registers it

            self.version = f"ray_pccl {ray_pccl.__version__}, {self.version}"
        self._dist.init_process_group(backend, f"file://{folder}/meeting", rank=self.rank, world_size=self.size)

    def tensors(self, work: Work) -> Pairs:
        """The same tensor for input and output."""
        return [(tensor, tensor) for tensor, _ in _pairs(work, _torch_tensor)]

    def step(self, work: Work, pairs: Pairs) -> Callable[[], Any]:
        """One iteration."""
        tensors = [tensor for tensor, _ in pairs]
        if work.count == 1:
            return lambda: self._dist.all_reduce(tensors[0])

        def in_flight() -> None:
            for handle in [self._dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                handle.wait()

        return in_flight

    def end(self) -> None:
        """Leaves the process group."""
        self._dist.destroy_process_group()


class Mpi:
    """Open MPI or MPICH, whichever is installed where this runs."""

    def __init__(self, peers: str) -> None:
        from mpi4py import MPI

        self._mpi, self._comm = MPI, MPI.COMM_WORLD
        self.rank, self.size = self._comm.rank, self._comm.size
        assert self.size == int(peers), f"mpiexec started {self.size} ranks, not {peers}"
        self.version = " ".join(MPI.Get_library_version().partition("\n")[0].split()).partition(", package")[0]

    def tensors(self, work: Work) -> Pairs:
        """Arrays of numpy."""
        return _pairs(work, _numpy_array)

    def step(self, work: Work, pairs: Pairs) -> Callable[[], Any]:
        """One iteration."""
        if work.count == 1:
            ((send, recv),) = pairs
            return lambda: self._comm.Allreduce(send, recv)

        def in_flight() -> None:
            self._mpi.Request.Waitall([self._comm.Iallreduce(send, recv) for send, recv in pairs])

        return in_flight

    def end(self) -> None:
        """MPI ends with its process."""


Library = Ours | Torch | Mpi
LIBRARIES: dict[str, Callable[..., Library]] = {
    "ours": Ours,
    "gloo": functools.partial(Torch, "gloo"),
    "pccl": functools.partial(Torch, "pccl"),
    "mpi": Mpi,
}


def _numpy_array(work: Work) -> Any:
    import numpy

    return numpy.full(work.elements, 0.5, numpy.float32)


def _torch_tensor(work: Work) -> Any:
    import torch

    return torch.full((work.elements,), 0.5, dtype=torch.bfloat16 if work.bfloat16 else torch.float32)


def _pairs(work: Work, make: Callable[[Work], Any]) -> Pairs:
    pairs = []
    for _ in range(work.count):
        send = make(work)
        pairs.append((send, send if work.in_place else make(work)))
    return pairs


# -------------------------------------------------------------------------------------------- what it can be told


class Commands:
    """What the benchmark may have this process do. All processes of a team are told the same at the same time."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._held: dict[Work, tuple[Pairs, Callable[[], Any]]] = {}

    def hold(self, work: Work) -> None:
        """Makes the tensors."""
        pairs = self._library.tensors(work)
        self._held[work] = pairs, self._library.step(work, pairs)

    def check(self, work: Work) -> None:
        """Runs it once, with inputs whose sum tells who contributed, and looks at every element of the result."""
        pairs, step = self._held[work]
        everyone = (1 << self._library.size) - 1
        for number, (send, _) in enumerate(pairs):
            _assign(send, 1 << self._library.rank, number)
        step()
        for number, (send, recv) in enumerate(pairs):
            _compare(recv, work, everyone, number)
            if send is recv:  # repeated in place, any other sum would overflow
                send[:] = 0

    def step(self, work: Work) -> Callable[[], Any]:
        """One iteration."""
        return self._held[work][1]

    def time(self, work: Work, warm_up: int, iterations: int) -> list[float]:
        """Seconds of each iteration, with no barrier between them."""
        step = self.step(work)
        for _ in range(warm_up):
            step()
        seconds = []
        for _ in range(iterations):
            begun = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begun)
        return seconds

    def drop(self, work: Work) -> None:
        """Lets go of the tensors."""
        del self._held[work]


BLOCK = 1_000_000
"""Elements that are written and compared at a time; the values repeat within it."""


def _values(factor: int, number: int) -> Any:
    """A block of small whole numbers, exact in bfloat16, different from element to element and tensor to tensor."""
    import numpy

    return ((numpy.arange(number, number + BLOCK) % 5 + 1) * factor).astype(numpy.float32)


def _assign(tensor: Any, factor: int, number: int) -> None:
    values = _values(factor, number)
    if hasattr(tensor, "numpy"):
        import torch

        values = torch.from_numpy(values)
    for start in range(0, len(tensor), BLOCK):
        part = tensor[start : start + BLOCK]
        part[:] = values[: len(part)]


def _compare(tensor: Any, work: Work, factor: int, number: int) -> None:
    import numpy

    values = _values(factor, number)
    peers = factor.bit_length()
    allowed = peers * 2 * factor / 255 if work.quantized else 0  # half a step of the widest range, once for every peer
    for start in range(0, len(tensor), BLOCK):
        part = tensor[start : start + BLOCK]
        found = part.float().numpy() if hasattr(part, "numpy") else part
        off = numpy.abs(found - values[: len(found)])
        worst = int(off.argmax())  # of a NaN, too
        assert off[worst] <= allowed, f"tensor {number}, element {start + worst}: {found[worst]}, off by {off[worst]}"


def obey(address: str, begin: Callable[[], tuple[int, str, Any, Callable[[], object]]]) -> None:
    """Obeys until the benchmark lets go of the socket.

    `begin` gives this process's rank, the version that it runs, whose methods are the commands, and what ends it.
    """
    with Client(address, "AF_UNIX") as pipe:
        try:
            rank, version, commands, end = begin()
        except Exception:
            pipe.send((False, traceback.format_exc()))
            raise
        pipe.send((True, (rank, os.getpid(), version)))
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
        end()


def main() -> None:
    """A worker's life."""
    kind, address, *arguments = sys.argv[1:]

    def begin() -> tuple[int, str, Commands, Callable[[], object]]:
        library = LIBRARIES[kind](*arguments)
        return library.rank, library.version, Commands(library), library.end

    obey(address, begin)


if __name__ == "__main__":
    main()
