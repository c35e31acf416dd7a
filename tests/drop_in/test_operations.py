"""Every function on tensors, in actors: all types, all ops, any root, lists of mixed tensors."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import ray.util.collective.types as rays
import torch

import ray_pccl
import ray_pccl.util.collective as col
from ray_pccl.util.collective.types import ReduceOp
from tests.drop_in import programs
from tests.drop_in.workers import group_of, on_all, refused, values

pytestmark = pytest.mark.ray
LIBRARIES = pytest.mark.parametrize("library", ["numpy", "torch", "mixed"])
SIZES = pytest.mark.parametrize("size", [1, 2, 4])


def _all_types_hold(found: dict[str, Any], due: Any) -> None:
    assert len(found) >= 3
    assert {dtype: held for dtype, held in found.items() if held != due} == {}


@LIBRARIES
@SIZES
def test_allreduce_and_reduce_of_every_type_and_op(workers: list[Any], name: str, library: str, size: int) -> None:
    with group_of(workers[:size], name) as group:
        for op, compute in programs.OPS.items():
            due = {float(compute(range(1, size + 1)))}
            for found in on_all(group, programs.reduced, name, library, ReduceOp[op]):
                _all_types_hold(found, due)
            root = size - 1
            held = on_all(group, programs.reduced, name, library, ReduceOp[op], root)
            for rank, found in enumerate(held):
                _all_types_hold(found, due if rank == root else {rank + 1})


def test_the_ops_of_ray_and_of_ray_pccl_are_taken_too(workers: list[Any], name: str) -> None:
    with group_of(workers[:2], name) as group:
        for op in (*rays.ReduceOp, *ray_pccl.ReduceOp):
            due = {float(programs.OPS["PRODUCT" if op.name == "PROD" else op.name]([1, 2]))}
            for found in on_all(group, programs.reduced, name, "numpy", op):
                _all_types_hold(found, due)


@LIBRARIES
@SIZES
def test_broadcast_from_every_root(workers: list[Any], name: str, library: str, size: int) -> None:
    with group_of(workers[:size], name) as group:
        for root in range(size):
            for found in on_all(group, programs.broadcast, name, library, root):
                _all_types_hold(found, {root + 1})


@SIZES
def test_allgather_into_lists_of_either_library_and_of_both(workers: list[Any], name: str, size: int) -> None:
    with group_of(workers[:size], name) as group:
        for inputs, outputs in (("numpy", ["torch"]), ("torch", ["numpy"]), ("torch", ["torch", "numpy"])):
            for found in on_all(group, programs.gathered, size, name, inputs, outputs):
                _all_types_hold(found, [{rank + 1} for rank in range(size)])


@SIZES
def test_reducescatter_leaves_its_inputs_alone(workers: list[Any], name: str, size: int) -> None:
    with group_of(workers[:size], name) as group:
        for op in ("SUM", "MAX", "AVG"):
            given = (size, name, ["torch", "numpy"], "numpy", ReduceOp[op])
            for rank, found in enumerate(on_all(group, programs.scattered, *given)):
                due = programs.OPS[op]([other + 1 + 4 * rank for other in range(size)])
                _all_types_hold(found, {float(due)})


def test_reducescatter_into_one_of_its_inputs_leaves_the_others_alone(workers: list[Any], name: str) -> None:
    with group_of(workers[:2], name) as group:
        assert on_all(group, programs.into_an_input, name) == [({3.0}, {10.0}), ({30.0}, {2.0})]


@LIBRARIES
def test_send_and_recv_around_a_ring(workers: list[Any], name: str, library: str) -> None:
    with group_of(workers, name) as group:
        for found in on_all(group, programs.passed_on, name, library, [2, 0, 3, 1]):
            _all_types_hold(found, {3})


def test_send_and_recv_belong_to_their_group(workers: list[Any], name: str) -> None:
    first, second = f"{name}-1", f"{name}-2"
    with group_of(workers[:2], first) as group, group_of(workers[1::-1], second):
        assert on_all(group, programs.crossed, first, second)[1] == [{5.0}, {7.0}]


def test_the_functions_for_several_gpus_take_lists_of_one(workers: list[Any], name: str) -> None:
    with group_of(workers[:2], name) as group:
        zero, one = on_all(group, programs.of_one_list, 2, name)
    for found in (zero, one):
        assert found["allreduce"] == [[2.0]] and found["broadcast"] == [[2.0]]
        assert found["allgather"] == [[1.0], [2.0]]
    assert (zero["reduce"], one["reduce"]) == ([[1.0]], [[3.0]])
    assert (zero["reducescatter"], one["reducescatter"]) == ([[0.0]], [[20.0]])
    assert (zero["part"], one["part"]) == ([[1.0]], [[1.0, 2.0]])


def test_more_than_one_tensor_of_a_process_says_what_to_do_instead(workers: list[Any], name: str) -> None:
    def several(rank: int) -> None:
        two = [np.zeros(2), np.zeros(2)]
        calls = [
            lambda: col.allreduce_multigpu(two, name),
            lambda: col.reduce_multigpu(two, 0, 1, name),
            lambda: col.broadcast_multigpu(two, 0, 1, name),
            lambda: col.allgather_multigpu([two, two], two, name),
            lambda: col.reducescatter_multigpu(two, [two, two], name),
            lambda: col.send_multigpu(two[0], 1 - rank, 1, name),
            lambda: col.recv_multigpu(two[0], 1 - rank, 1, name),
        ]
        for call in calls:
            refused(NotImplementedError, call, text="Run one process (one actor with num_gpus=1) per GPU")

    with group_of(workers[:2], name) as group:
        assert on_all(group, several) == [None, None]


def test_arrays_that_ray_hands_out_read_only_are_written_as_with_ray(workers: list[Any], name: str) -> None:
    with group_of(workers[:2], name) as group:
        for count in (4, 1 << 20):  # with the call, and out of the object store
            for writeable, held, warned in on_all(group, programs.in_given, name, np.ones(count, np.float32)):
                assert not writeable and held == {2.0}
                assert len(warned) == 1 and "read-only" in warned[0]


def test_tensors_of_any_shape_and_layout(workers: list[Any], name: str) -> None:
    with group_of(workers[:2], name) as group:
        for held in on_all(group, programs.odd_shapes, name):
            assert held == [set(), {3.0}, {3.0}, {3.0}, {3.0}, {0.0}]


def test_arrays_of_a_device_go_through_the_host(workers: list[Any], name: str) -> None:
    with group_of(workers[:2], name) as group:
        for rank, found in enumerate(on_all(group, programs.on_devices, name)):
            assert found == {
                "allreduce": [{3.0}],
                "allgather": [{1.0}, {2.0}],
                "reducescatter": [{20.0 * rank}],
                "send and recv": [{1.0}],
            }


def test_a_handle_can_be_used_as_it_is(workers: list[Any], name: str) -> None:
    def directly(rank: int) -> list[set[float]]:
        group = col.get_group_handle(name)
        given = [np.full(2, rank + 1.0) for _ in range(3)]
        rays.AllReduceOptions.reduceOp = rays.ReduceOp.MAX  # as Ray's own allreduce leaves it behind
        group.allreduce([given[0]])
        group.reduce([given[1]])
        group.broadcast([given[2]])
        group.barrier()
        rays.AllReduceOptions.reduceOp = rays.ReduceOp.SUM
        return [values(one) for one in given]

    with group_of(workers[:2], name) as group:
        assert on_all(group, directly) == [[{3.0}, {3.0}, {1.0}], [{3.0}, {2.0}, {1.0}]]


def test_tensors_that_do_not_fit_are_refused_before_anyone_waits(workers: list[Any], name: str) -> None:
    def misfits(rank: int) -> list[str]:
        ten, list_of = np.ones(10, np.float32), lambda *shapes: [np.ones(shape, np.float32) for shape in shapes]
        wrong = {
            "no tensor": lambda: col.allreduce([1.0, 2.0], name),
            "a number": lambda: col.broadcast(1.0, 0, name),
            "no list": lambda: col.allgather(np.ones((2, 10)), ten, name),
            "an empty list": lambda: col.allgather([], ten, name),
            "too few": lambda: col.allgather(list_of(10), ten, name),
            "too many": lambda: col.reducescatter(ten, list_of(10, 10, 10), name),
            "another shape": lambda: col.allgather(list_of(10, (2, 5)), ten, name),
            "another shape of an input": lambda: col.reducescatter(ten, list_of(10, 9), name),
            "another type": lambda: col.allgather([np.ones(10), np.ones(10)], ten, name),
            "another type of an input": lambda: col.reducescatter(ten, [ten, np.ones(10)], name),
            "complex numbers": lambda: col.allreduce(np.ones(2, np.complex64), name),
            "the mean of integers": lambda: col.allreduce(np.ones(2, np.int32), name, ReduceOp.AVG),
            "no op": lambda: col.allreduce(ten, name, "SUM"),
            "a list in a multigpu call that is none": lambda: col.allreduce_multigpu(ten, name),
            "too short for a list of lists": lambda: col.allgather_multigpu([list_of(10)], [ten], name),
            "more elements than there are": lambda: col.send_multigpu(ten, 1 - rank, 0, name, 11),
            "fewer than no elements": lambda: col.recv_multigpu(ten, 1 - rank, 0, name, -1),
            "elements in no row": lambda: col.recv_multigpu(np.ones((4, 4))[:, 1], 1 - rank, 0, name, 2),
        }
        told = {what: refused(RuntimeError, call) for what, call in wrong.items()}
        refused(ValueError, wrong["another shape of an input"])  # as Ray's Gloo
        col.barrier(name)
        return [what for what, text in told.items() if not text]

    with group_of(workers[:2], name) as group:
        assert on_all(group, misfits) == [[], []]


def test_wrong_ranks_are_value_errors_and_ones_own_a_runtime_error(workers: list[Any], name: str) -> None:
    def wrong_ranks(rank: int) -> None:
        given = np.ones(2)
        for wrong in (-1, 2, 7):
            for call in (col.reduce, col.broadcast, col.send, col.recv):
                refused(ValueError, call, given, wrong, name, text=f"rank '{wrong}'")
        for call in (col.reduce_multigpu, col.broadcast_multigpu):
            for wrong in (-1, 1):
                refused(ValueError, call, [given], 0, wrong, name, text=f"root_tensor '{wrong}'")
        for call in (col.send, col.recv):
            refused(RuntimeError, call, given, rank, name, text="is self")

    with group_of(workers[:2], name) as group:
        assert on_all(group, wrong_ranks) == [None, None]


def test_different_calls_of_two_ranks_are_an_error_on_both_and_the_group_goes_on(workers: list[Any], name: str) -> None:
    def different(rank: int) -> set[float]:
        for kind in (ray_pccl.CollectiveMismatchError, RuntimeError):
            refused(kind, col.allreduce, np.ones(2 + rank), name)
        given = torch.ones(3)
        col.allreduce(given, name)
        return values(given)

    with group_of(workers[:2], name) as group:
        assert on_all(group, different) == [{2.0}, {2.0}]


def test_gloo_timeout_ends_the_wait_for_a_rank_that_does_not_come(workers: list[Any], name: str) -> None:
    def waits(rank: int) -> list[str]:
        late = [refused(kind, col.barrier, name) for kind in (ray_pccl.OperationTimeoutError, RuntimeError)]
        return [*late, refused(TimeoutError, col.recv, np.ones(2), 1 - rank, name)]

    with group_of(workers[:2], name, gloo_timeout=300) as group:
        assert all(on_all(group[:1], waits)[0])


def test_threads_of_one_process_take_turns(workers: list[Any], name: str) -> None:
    def threads(rank: int) -> list[set[float]]:
        given = [np.ones(1000) for _ in range(8)]
        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(col.allreduce, one, name) for one in given]:
                done.result(30)
        return [values(one) for one in given]

    with group_of(workers[:2], name) as group:
        assert on_all(group, threads) == [[{2.0}] * 8] * 2
