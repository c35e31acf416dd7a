"""Collectives over links, all ranks in one thread: whatever the order in which pieces arrive, the result is right."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import pytest

from ray_pccl.descriptors import DataType, QuantizationAlgorithm, ReduceOp
from ray_pccl.errors import ProtocolError
from ray_pccl.ring import programs
from ray_pccl.ring.header import NO_ROOT, Header, Kind
from ray_pccl.ring.programs import Program, program_for
from ray_pccl.ring.task import Epoch, Recipe, Task

Array = np.ndarray[Any, Any]
KINDS = [kind for kind in Kind if kind is not Kind.BARRIER]
ROOTED = (Kind.REDUCE, Kind.BROADCAST, Kind.GATHER, Kind.SCATTER)
REDUCING = (Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER)
LONG = 20_000
"""Elements of 4 bytes: more than are sent directly."""


class Port:
    """What a rank has sent, in order for each receiver, and not copied: late changes would show."""

    def __init__(self, network: Network, rank: int) -> None:
        self._network = network
        self._rank = rank
        self._scratch: dict[int, bytearray] = {}

    def send(self, rank: int, slot: int, offset: int, view: memoryview) -> None:
        assert rank != self._rank, "nobody sends to itself"
        for start in range(0, view.nbytes, self._network.piece):
            piece = view[start : start + self._network.piece]
            self._network.ways[self._rank, rank].append((slot, offset + start, piece))

    def scratch(self, rank: int, length: int) -> memoryview:
        if len(self._scratch.get(rank, b"")) < length:
            self._scratch[rank] = bytearray(length)
        return memoryview(self._scratch[rank])[:length]


class Network:
    """Delivers pieces in any order, but for each pair in the order of sending, and some in two halves."""

    def __init__(self, size: int, random_: random.Random, piece: int) -> None:
        self.size, self.piece = size, piece
        self._random = random_
        pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
        self.ways: dict[tuple[int, int], deque[tuple[int, int, memoryview]]] = {pair: deque() for pair in pairs}
        self._begun: dict[tuple[int, int], memoryview] = {}

    def run(self, ranks: list[Program]) -> None:
        waiting = list(range(self.size))
        entered: set[int] = set()
        self._random.shuffle(waiting)
        while True:
            ready = [pair for pair, queue in self.ways.items() if queue and set(pair) <= entered]
            if waiting and (not ready or self._random.random() < 0.2):
                ranks[waiting[-1]].begin()
                entered.add(waiting.pop())
            elif ready:
                self._deliver(ranks, self._random.choice(ready))
            else:
                break
        assert not any(self.ways.values()) and not self._begun

    def _deliver(self, ranks: list[Program], pair: tuple[int, int]) -> None:
        source, target = pair
        slot, offset, view = self.ways[pair][0]
        half = view.nbytes // 2
        place = self._begun.pop(pair, None)
        if place is None:
            place = ranks[target].destination(source, slot, offset, view.nbytes)
            assert place.nbytes == view.nbytes
            place[:half] = view[:half]
            if self._random.random() < 0.5:
                self._begun[pair] = place
                return
        place[half:] = view[half:]
        self.ways[pair].popleft()
        ranks[target].arrived(source, slot, offset, place)


def make(
    kind: Kind, size: int, count: int, root: int = 0, datatype: DataType = DataType.INT32, **header: Any
) -> tuple[list[Task], list[Array]]:
    """Each rank's task and contribution."""
    what = Recipe(Header(kind, count, datatype, root=root if kind in ROOTED else NO_ROOT, **header))
    times = size if kind in (Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL, Kind.SCATTER) else 1
    out_times = size if kind in (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.GATHER) else 1
    inputs, tasks = [], []
    for rank in range(size):
        given = np.random.default_rng(rank).integers(-1000, 1000, times * count).astype(what.dtype)
        inputs.append(given)
        is_root = rank == root
        sends = kind not in (Kind.BROADCAST, Kind.SCATTER) or is_root
        keeps = (kind not in (Kind.REDUCE, Kind.GATHER) or is_root) and not (kind is Kind.BROADCAST and is_root)
        out = np.full(out_times * count, -7, what.dtype) if keeps else None
        tasks.append(Task(what, given.copy() if sends else None, out))
    return tasks, inputs


def expected(kind: Kind, rank: int, inputs: list[Array], root: int, op: ReduceOp) -> Array:
    part = slice(rank * len(inputs[0]) // len(inputs), (rank + 1) * len(inputs[0]) // len(inputs))
    ufunc = {ReduceOp.SUM: np.add, ReduceOp.MAX: np.maximum, ReduceOp.PROD: np.multiply, ReduceOp.AVG: np.add}[op]
    total = ufunc.reduce(inputs) if kind in REDUCING else None
    if op is ReduceOp.AVG and total is not None:
        total = total / total.dtype.type(len(inputs))
    match kind:
        case Kind.ALL_REDUCE | Kind.REDUCE:
            return total
        case Kind.REDUCE_SCATTER:
            return total[part]
        case Kind.BROADCAST:
            return inputs[root]
        case Kind.SCATTER:
            return inputs[root][part]
        case Kind.ALL_TO_ALL:
            return np.concatenate([array[part] for array in inputs])
        case _:
            return np.concatenate(inputs)


def run(tasks: list[Task], seed: int, piece: int = 4096) -> list[Program]:
    size = len(tasks)
    network = Network(size, random.Random(seed), piece)
    members = tuple(f"peer-{rank}" for rank in range(size))
    ranks = [program_for(task, Epoch(1, rank, members, size), Port(network, rank)) for rank, task in enumerate(tasks)]
    network.run(ranks)
    for program in ranks:
        assert program.due == 0
        program.finish()
    return ranks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", range(2, 7))
def test_every_rank_gets_its_result_in_any_order_of_arrival(kind: Kind, size: int) -> None:
    for seed, count in enumerate((0, 1, 2, 37, 1000, LONG, LONG + 1, LONG + 63)):
        root = seed % size
        tasks, inputs = make(kind, size, count, root)
        run(tasks, seed, piece=4096 if seed % 2 else 1 << 20)
        for rank, task in enumerate(tasks):
            if task.send is not None:
                assert np.array_equal(task.send, inputs[rank]), "the input is what it was"
            if task.out is not None:
                assert np.array_equal(task.out, expected(kind, rank, inputs, root, ReduceOp.SUM)), (count, rank)


@pytest.mark.parametrize("op", [ReduceOp.AVG, ReduceOp.MAX, ReduceOp.PROD])
@pytest.mark.parametrize("kind", REDUCING)
def test_other_operations_are_applied_once_to_each(kind: Kind, op: ReduceOp) -> None:
    for size in (2, 3, 5):
        tasks, inputs = make(kind, size, LONG, 1, DataType.DOUBLE, op=op)
        run(tasks, size)
        for rank, task in enumerate(tasks):
            if task.out is not None:
                assert np.allclose(task.out, expected(kind, rank, inputs, 1, op), rtol=1e-12)


@pytest.mark.parametrize("algorithm", [QuantizationAlgorithm.MIN_MAX, QuantizationAlgorithm.ZERO_POINT_SCALE])
@pytest.mark.parametrize("kind", [Kind.ALL_REDUCE, Kind.REDUCE])
@pytest.mark.parametrize("count", [100, 70_001, 300_000])
def test_quantised_results_have_the_same_bits_in_any_order_of_arrival(
    kind: Kind, algorithm: QuantizationAlgorithm, count: int
) -> None:
    for size in (2, 3, 4):
        results = []
        for seed in range(3):
            tasks, inputs = make(kind, size, count, 0, DataType.FLOAT, algorithm=algorithm)
            run(tasks, seed, piece=1 << 20 if seed else 10_000)
            results += [task.out for task in tasks if task.out is not None]
        assert all(np.array_equal(result, results[0]) for result in results)
        error = np.abs(results[0] - np.sum(inputs, axis=0))
        assert 0 < error.max() <= size * 2000 * size / 255


@pytest.mark.parametrize("kind", KINDS)
def test_in_place_the_outcome_is_the_same_where_input_and_output_are_apart(kind: Kind) -> None:
    first, _ = make(kind, 4, LONG)
    second, _ = make(kind, 4, LONG)
    run(first, 1)
    run(second, 2, piece=100_000)
    for one, other in zip(first, second, strict=True):
        assert (one.out is None) == (other.out is None)
        assert one.out is None or np.array_equal(one.out, other.out)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [100, LONG])
def test_a_piece_that_is_not_due_is_refused(kind: Kind, count: int) -> None:
    """Too far, too long, of a slot or a rank that has nothing to send: memory outside is never touched."""
    for rank in range(3):
        tasks, _ = make(kind, 3, count)
        network = Network(3, random.Random(1), 1 << 20)
        epoch = Epoch(1, rank, ("a", "b", "c"), 3)
        program = program_for(tasks[rank], epoch, Port(network, rank))
        program.begin()
        for source in (other for other in range(3) if other != rank):
            for slot in (0, 1, 2, 3, 4, 5, 1000):
                for offset, length in ((1 << 39, 8), (0, 1 << 20), (3 * count * 4 - 4, 8)):
                    with pytest.raises(ProtocolError):
                        program.destination(source, slot, offset, length)


def test_more_data_than_is_due_is_refused() -> None:
    tasks, _ = make(Kind.ALL_GATHER, 2, LONG)
    program = program_for(tasks[0], Epoch(1, 0, ("a", "b"), 2), Port(Network(2, random.Random(1), 1 << 20), 0))
    program.begin()
    place = program.destination(1, 0, 0, LONG * 4)
    program.arrived(1, 0, 0, place)
    with pytest.raises(ProtocolError, match="more data"):
        program.arrived(1, 0, 0, place)


def test_small_ones_are_sent_to_everyone_and_large_ones_around_the_ring() -> None:
    def chosen(kind: Kind, count: int, **header: Any) -> type[Program]:
        tasks, _ = make(kind, 3, count, datatype=DataType.FLOAT, **header)
        return type(program_for(tasks[0], Epoch(1, 0, ("a", "b", "c"), 3), Port(Network(3, random.Random(), 1), 0)))

    direct = programs.DIRECT_BYTES // 2 // 4  # each of three sends its input twice
    assert chosen(Kind.ALL_REDUCE, direct) is programs.Direct
    assert chosen(Kind.ALL_REDUCE, direct + 1) is programs.Ring
    assert chosen(Kind.REDUCE_SCATTER, direct // 3 + 1) is programs.Ring
    assert chosen(Kind.BROADCAST, direct + 1) is programs.Chain
    assert chosen(Kind.ALL_TO_ALL, direct // 3 + 1) is programs.Exchange
    assert chosen(Kind.ALL_REDUCE, 5 * direct, algorithm=QuantizationAlgorithm.MIN_MAX) is programs.Packed
