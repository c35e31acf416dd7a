"""What peers do in these tests. Each program returns its complaints, none if all was right, and digests by case:
all peers have to have the same ones.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ray_pccl import Communicator, OperationTimeoutError, PCCLError, ReduceInfo, ReduceOp
from tests.collectives.values import Array, Tensor, contribution, digest, itemsize, ops_for, reduced, rounded

Report = tuple[list[str], dict[str, str]]
ENOUGH = 5
"""Complaints after which a program gives up: what is wrong once is wrong in many ways."""
THRESHOLDS = (64 << 10, 128 << 10, 256 << 10)
LARGE_BYTES = 5 << 20


@dataclass(frozen=True)
class Case:
    """One call."""

    library: str
    dtype: str
    count: int
    layout: str
    op: ReduceOp
    root: int
    tag: int

    def __str__(self) -> str:
        return f"{self.library} {self.dtype}[{self.count}] {self.layout} {self.op.name} root={self.root}"


class Checker:
    """Makes one rank's tensors, and compares what came of them."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.rank, self.size, self.members = comm.rank, comm.world_size, comm.members
        self.complaints: list[str] = []
        self.digests: dict[str, str] = {}

    @property
    def report(self) -> Report:
        return self.complaints, self.digests

    def complain(self, case: object, what: str) -> None:
        self.complaints.append(f"{case}: {what}")

    def inputs(self, case: Case, times: int = 1) -> list[Array]:
        """What every rank contributes; `times` as many elements for collectives of parts."""
        return [contribution(rank, times * case.count, case.dtype, case.tag) for rank in range(self.size)]

    def expect(self, case: Case, call: str, tensor: Tensor, expected: Array) -> None:
        """The tensor has to hold these values, whatever its layout."""
        have = tensor.get()
        if have.shape != expected.shape or not np.array_equal(have, expected):
            wrong = np.flatnonzero(have != expected) if have.shape == expected.shape else []
            where = f"{len(wrong)} of {len(expected)} from {wrong[0]} on" if len(wrong) else "the shape"
            self.complain(case, f"{call} gave {have[wrong[:3]]} for {expected[wrong[:3]]} ({where})")
        if not tensor.kept_its_gaps():
            self.complain(case, f"{call} wrote between the elements")

    def expect_info(self, case: object, call: str, info: ReduceInfo) -> None:
        if info.world_size != self.size or tuple(info.contributors) != self.members:
            self.complain(case, f"{call} says {info}")

    def same_everywhere(self, case: Case, call: str, tensor: Tensor) -> None:
        self.digests[f"{call} {case}"] = digest(tensor.get())


# ------------------------------------------------------------------------------------------------- the collectives


def all_reduce(check: Checker, case: Case) -> None:
    """Out of place and in place."""
    inputs = check.inputs(case)
    expected = reduced(inputs, case.op, case.dtype)
    send = Tensor(case.library, case.dtype, inputs[check.rank], case.layout)
    recv = Tensor(case.library, case.dtype, np.zeros_like(inputs[0]), case.layout)
    info = check.comm.all_reduce(send.tensor, recv.tensor, op=case.op, tag=case.tag)
    check.expect(case, "all_reduce", recv, expected)
    check.expect(case, "all_reduce's input", send, rounded(inputs[check.rank], case.dtype))
    check.expect_info(case, "all_reduce", info)
    check.same_everywhere(case, "all_reduce", recv)
    check.comm.all_reduce(send.tensor, op=case.op, tag=case.tag)
    check.expect(case, "all_reduce in place", send, expected)
    again = Tensor(case.library, case.dtype, inputs[check.rank], case.layout)
    check.comm.all_reduce(again.tensor, again.tensor, op=case.op, tag=case.tag)
    check.expect(case, "all_reduce into its input", again, expected)


def reduce(check: Checker, case: Case) -> None:
    """To the root's recv, and in place there; nobody else's tensors change."""
    inputs = check.inputs(case)
    expected = reduced(inputs, case.op, case.dtype)
    mine = rounded(inputs[check.rank], case.dtype)
    send = Tensor(case.library, case.dtype, inputs[check.rank], case.layout)
    recv = Tensor(case.library, case.dtype, np.zeros_like(inputs[0]), case.layout)
    is_root = check.rank == case.root
    target = recv.tensor if is_root or case.tag % 2 else None  # others may pass one, which stays as it is
    info = check.comm.reduce(send.tensor, target, op=case.op, root=case.root, tag=case.tag)
    check.expect(case, "reduce", recv, expected if is_root else np.zeros_like(expected))
    check.expect(case, "reduce's input", send, mine)
    check.expect_info(case, "reduce", info)
    check.comm.reduce(send.tensor, op=case.op, root=case.root, tag=case.tag)
    check.expect(case, "reduce in place", send, expected if is_root else mine)


def broadcast(check: Checker, case: Case) -> None:
    inputs = check.inputs(case)
    tensor = Tensor(case.library, case.dtype, inputs[check.rank], case.layout)
    info = check.comm.broadcast(tensor.tensor, root=case.root, tag=case.tag)
    check.expect(case, "broadcast", tensor, rounded(inputs[case.root], case.dtype))
    check.expect_info(case, "broadcast", info)


def all_gather(check: Checker, case: Case) -> None:
    inputs = check.inputs(case)
    send = Tensor(case.library, case.dtype, inputs[check.rank], case.layout)
    recv = Tensor(case.library, case.dtype, np.zeros(check.size * case.count, inputs[0].dtype), case.layout)
    info = check.comm.all_gather(send.tensor, recv.tensor, tag=case.tag)
    check.expect(case, "all_gather", recv, rounded(np.concatenate(inputs), case.dtype))
    check.expect(case, "all_gather's input", send, rounded(inputs[check.rank], case.dtype))
    check.expect_info(case, "all_gather", info)


def gather(check: Checker, case: Case) -> None:
    inputs = check.inputs(case)
    expected = rounded(np.concatenate(inputs), case.dtype)
    is_root = check.rank == case.root
    send = Tensor(case.library, case.dtype, inputs[check.rank], case.layout)
    recv = Tensor(case.library, case.dtype, np.zeros(check.size * case.count, inputs[0].dtype), case.layout)
    info = check.comm.gather(send.tensor, recv.tensor if is_root else None, root=case.root, tag=case.tag)
    check.expect(case, "gather", recv, expected if is_root else np.zeros_like(expected))
    check.expect_info(case, "gather", info)


def _part(array: Array, rank: int, count: int) -> Array:
    return array[rank * count : (rank + 1) * count]


def reduce_scatter(check: Checker, case: Case) -> None:
    inputs = check.inputs(case, check.size)
    expected = _part(reduced(inputs, case.op, case.dtype), check.rank, case.count)
    send = Tensor(case.library, case.dtype, inputs[check.rank], case.layout)
    recv = Tensor(case.library, case.dtype, np.zeros(case.count, inputs[0].dtype), case.layout)
    info = check.comm.reduce_scatter(send.tensor, recv.tensor, op=case.op, tag=case.tag)
    check.expect(case, "reduce_scatter", recv, expected)
    check.expect(case, "reduce_scatter's input", send, rounded(inputs[check.rank], case.dtype))
    check.expect_info(case, "reduce_scatter", info)


def scatter(check: Checker, case: Case) -> None:
    inputs = check.inputs(case, check.size)
    send = Tensor(case.library, case.dtype, inputs[case.root], case.layout).tensor if check.rank == case.root else None
    recv = Tensor(case.library, case.dtype, np.zeros(case.count, inputs[0].dtype), case.layout)
    info = check.comm.scatter(send, recv.tensor, root=case.root, tag=case.tag)
    check.expect(case, "scatter", recv, rounded(_part(inputs[case.root], check.rank, case.count), case.dtype))
    check.expect_info(case, "scatter", info)


def all_to_all(check: Checker, case: Case) -> None:
    """Out of place and in place."""
    inputs = check.inputs(case, check.size)
    expected = rounded(np.concatenate([_part(array, check.rank, case.count) for array in inputs]), case.dtype)
    send = Tensor(case.library, case.dtype, inputs[check.rank], case.layout)
    recv = Tensor(case.library, case.dtype, np.zeros_like(inputs[0]), case.layout)
    info = check.comm.all_to_all(send.tensor, recv.tensor, tag=case.tag)
    check.expect(case, "all_to_all", recv, expected)
    check.expect(case, "all_to_all's input", send, rounded(inputs[check.rank], case.dtype))
    check.expect_info(case, "all_to_all", info)
    check.comm.all_to_all(send.tensor, send.tensor, tag=case.tag)
    check.expect(case, "all_to_all in place", send, expected)


REDUCING = {"all_reduce": all_reduce, "reduce": reduce, "reduce_scatter": reduce_scatter}
MOVING = {
    "broadcast": broadcast,
    "all_gather": all_gather,
    "gather": gather,
    "scatter": scatter,
    "all_to_all": all_to_all,
}
OF_PARTS = ("reduce_scatter", "scatter", "all_to_all")
"""Those whose input has a part for every rank."""
KINDS: dict[str, Callable[[Checker, Case], None]] = REDUCING | MOVING


# ------------------------------------------------------------------------------------------------ which of them


def counts_around(dtype: str, parts: int) -> list[int]:
    """Counts whose bytes lie around each threshold, of a tensor of one or more parts, and one of several MiB."""
    item = itemsize(dtype) * parts
    around = [threshold // item + more for threshold in THRESHOLDS for more in (-1, 0, 1)]
    return [*around, LARGE_BYTES // item + 1]


def sweep(comm: Communicator, kind: str, libraries: Sequence[str], dtypes: Sequence[str], *, large: bool) -> Report:
    """Runs one collective in many ways: of few elements in all layouts, or (`large`) around all thresholds."""
    check = Checker(comm)
    for case in _cases(kind, libraries, dtypes, check.size, large=large):
        try:
            KINDS[kind](check, case)
        except PCCLError as error:
            check.complain(case, f"{type(error).__name__}: {error}")
        if len(check.complaints) >= ENOUGH:
            break
    return check.report


def small(comm: Communicator, kind: str, libraries: Sequence[str], dtypes: Sequence[str]) -> Report:
    """`sweep` over few elements."""
    return sweep(comm, kind, libraries, dtypes, large=False)


def large(comm: Communicator, kind: str, libraries: Sequence[str], dtypes: Sequence[str]) -> Report:
    """`sweep` around the thresholds."""
    return sweep(comm, kind, libraries, dtypes, large=True)


def _cases(kind: str, libraries: Sequence[str], dtypes: Sequence[str], size: int, *, large: bool) -> Iterator[Case]:
    number = 0
    for library in libraries:
        for dtype in dtypes:
            if library == "numpy" and dtype == "bfloat16":
                continue
            ops = ops_for(dtype) if kind in REDUCING else [ReduceOp.SUM]
            parts = size if kind in OF_PARTS else 1
            for count, layout, op in _large(dtype, parts, ops) if large else _small(ops):
                number += 1
                yield Case(library, dtype, count, layout, op, number % size, number % 7)


def _small(ops: Sequence[ReduceOp]) -> Iterator[tuple[int, str, ReduceOp]]:
    for op in ops:
        yield 7, "plain", op
        yield 1, "scalar" if op is ops[0] else "plain", op
    yield 0, "plain", ops[0]
    for layout in ("matrix", "strided", "transposed", "reversed"):
        yield 120, layout, ops[-1]


def _large(dtype: str, parts: int, ops: Sequence[ReduceOp]) -> Iterator[tuple[int, str, ReduceOp]]:
    for number, count in enumerate(counts_around(dtype, parts)):
        yield count, "strided" if number == 5 else "plain", ops[number % len(ops)]


def barriers(comm: Communicator, arrivals: int) -> list[tuple[float, float]]:
    """When this peer entered and left each of some barriers, one of which it always comes to late."""
    times = []
    for number in range(arrivals):
        if number % comm.world_size == comm.rank:
            time.sleep(0.02)
        entered = time.monotonic()
        comm.barrier(tag=number % 3)
        times.append((entered, time.monotonic()))
    return times


def meet(comm: Communicator, library: str, dtype: str) -> Any:
    """One all-reduce, which shows that the group works."""
    check = Checker(comm)
    all_reduce(check, Case(library, dtype, 1000, "plain", ReduceOp.SUM, 0, 0))
    return check.report


def many_in_vain(comm: Communicator, number: int) -> list[str]:
    """Rank 0 looks many times whether anyone is there; the others come when it has given up."""
    array = np.ones(3, np.float32)
    found = []
    if comm.rank:
        comm.store.wait([f"in vain {number}"])
    for turn in range(number):
        try:
            comm.all_reduce(array, tag=turn % 3, timeout=0 if comm.rank == 0 else 5)
            found.append(f"turn {turn} found the others")
        except OperationTimeoutError:
            pass
        if len(found) > ENOUGH:
            break
    if comm.rank == 0:
        comm.store.set(f"in vain {number}", b"done")
    return found


def open_files(comm: Communicator) -> int:
    """Descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def pss_bytes() -> int:
    """What this process uses, its share of shared memory included."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (pss,) = (int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return pss << 10


def memory_beyond_tensors(comm: Communicator, kind: str, number: int, nbytes: int, in_place: bool) -> int:
    """How many bytes more than before are in use at most, besides the tensors, while such operations run."""
    count = nbytes // 4
    sends = [np.full(count, 1.0, np.float32) for _ in range(number)]
    part = count // comm.world_size if kind == "reduce_scatter" else count
    recvs = [np.full(part, 2.0, np.float32) for _ in sends]
    before = highest = pss_bytes()
    over = threading.Event()

    def watch() -> None:
        nonlocal highest
        while not over.wait(0.002):
            highest = max(highest, pss_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        method = getattr(comm, f"{kind}_async")
        pairs = [(send,) if in_place else (send, recv) for send, recv in zip(sends, recvs, strict=True)]
        for handle in [method(*pair, tag=tag, timeout=60) for tag, pair in enumerate(pairs)]:
            handle.result(60)
        highest = max(highest, pss_bytes())
    finally:
        over.set()
        watcher.join()
    result = sends[0] if in_place else recvs[0]
    assert kind in ("reduce", "all_to_all") or (result == comm.world_size).all()
    return highest - before


def many_behind(comm: Communicator, number: int) -> None:
    """So many operations by handles, which need threads of their own."""
    handles = [comm.all_reduce_async(np.ones(1000), tag=tag) for tag in range(number)]
    assert all(handle.wait()[0] for handle in handles)


def belongings(comm: Communicator) -> tuple[list[str], list[str], list[str]]:
    """The library's threads, sockets and memory in this process."""
    gc.collect()
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("ray_pccl")]
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(str(entry.readlink()))
    sockets = [link for link in links if link.startswith("socket:")]
    # What the test itself talks through stays.
    ours = sockets[1:] + [link for link in links if _is_of_a_group(link)]
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if _is_of_a_group(line)]
    return threads, ours, maps


def _is_of_a_group(memory: str) -> bool:
    """Not the arena of `ray_pccl.empty`: it is the process's, and lives as long."""
    return "memfd:ray_pccl" in memory and "ray_pccl-arena" not in memory


def longer_than_its_timeout(comm: Communicator, count: int, timeout: float) -> float:
    """How long an operation took that all enter in time, and that takes longer than that."""
    array = np.ones(count, np.float32)
    out = np.zeros_like(array)
    comm.barrier()
    began = time.monotonic()
    comm.all_reduce(array, out, timeout=timeout)
    assert (out == comm.world_size).all()
    return time.monotonic() - began


def long_with_a_short_timeout(comm: Communicator) -> list[str]:
    """An all-reduce that takes longer than its timeout, which all enter at once."""
    send = np.ones(64 << 20, np.float32)
    recv = np.empty_like(send)
    comm.barrier()
    began = time.monotonic()
    comm.all_reduce(send, recv, timeout=0.05)
    took = time.monotonic() - began
    complaints = [] if took > 0.05 else [f"it took {took:.3f} s: too short to tell"]
    return complaints + ([] if (recv == comm.world_size).all() else ["the sum is wrong"])
