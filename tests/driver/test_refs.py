"""Collectives over ObjectRefs, as a driver calls them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import ray
import torch

import ray_pccl
from ray_pccl import CollectiveMismatchError, InputFailedError, ReduceOp, UsageError
from tests.driver.workers import (
    AsyncActor,
    Gate,
    GroupedActor,
    ThreadedActor,
    WorkerActor,
    address_of,
    end,
    fail,
    get,
    identity,
    is_noted,
    made,
    made_and_noted,
    start,
)

pytestmark = pytest.mark.ray

OPS = {
    ReduceOp.SUM: np.add.reduce,
    ReduceOp.PROD: np.multiply.reduce,
    ReduceOp.MAX: np.maximum.reduce,
    ReduceOp.MIN: np.minimum.reduce,
    ReduceOp.AVG: functools.partial(np.mean, axis=0),
}


class Layer(NamedTuple):
    weight: Any
    bias: Any


@dataclasses.dataclass(frozen=True)
class Step:
    layers: list[Layer]
    loss: float
    count: int
    note: None = None


@pytest.fixture(scope="module")
def group(workers: list[Any]) -> Iterator[Any]:
    group = ray_pccl.create_group(workers, "refs")
    yield group
    group.destroy()


@pytest.fixture(params=["ray_pccl", "the group"])
def api(request: pytest.FixtureRequest, group: Any) -> Any:
    """Who has the functions: the module, which finds the group, or the group itself."""
    return ray_pccl if request.param == "ray_pccl" else group


def arrays(count: int = 3, shape: Any = (4, 5), dtype: Any = np.float64) -> list[Any]:
    random = np.random.default_rng(7)
    return [random.integers(1, 5, shape).astype(dtype) for _ in range(count)]


def kept(workers: list[Any], values: list[Any]) -> list[Any]:
    """The values, each kept by its worker."""
    return [worker.make.remote(identity, value) for worker, value in zip(workers, values, strict=True)]


def ordinary(workers: list[Any], values: list[Any]) -> list[Any]:
    return [worker.run.remote(identity, value) for worker, value in zip(workers, values, strict=True)]


def raised(refs: list[Any], kind: type[Exception]) -> list[Exception]:
    """The errors that these results are."""
    errors = []
    for ref in refs:
        with pytest.raises(kind) as caught:
            get(ref)
        errors.append(caught.value)
    return errors


def works(workers: list[Any]) -> bool:
    """Whether the group still reduces."""
    [value] = {float(value) for value in get(ray_pccl.allreduce_refs(ordinary(workers, [1.0] * len(workers))))}
    return value == len(workers)


# ----------------------------------------------------------------------------------------------------- what comes out


@pytest.mark.parametrize("op", list(OPS), ids=lambda op: op.name)
def test_allreduce_gives_every_actor_the_reduced_value(api: Any, workers: list[Any], op: ReduceOp) -> None:
    given = arrays()

    reduced = get(api.allreduce_refs(kept(workers, given), op))

    for value in reduced:
        assert type(value) is np.ndarray
        np.testing.assert_allclose(value, OPS[op](given), rtol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8, np.uint64], ids=lambda dtype: dtype.__name__)
def test_allreduce_keeps_the_type_of_the_elements(group: Any, workers: list[Any], dtype: Any) -> None:
    given = arrays(dtype=dtype)

    [value, *_] = get(ray_pccl.allreduce_refs(kept(workers, given)))

    assert value.dtype == dtype
    np.testing.assert_array_equal(value, np.add.reduce(given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_allreduce_of_torch_tensors_gives_torch_tensors(group: Any, workers: list[Any], dtype: Any) -> None:
    given = [torch.arange(6).reshape(2, 3).to(dtype) + place for place in range(3)]

    reduced = get(ray_pccl.allreduce_refs(kept(workers, given)))

    for value in reduced:
        assert type(value) is torch.Tensor
        assert value.dtype == dtype
        assert torch.equal(value, sum(given))  # type: ignore[arg-type]


def test_allreduce_of_large_tensors_is_right(group: Any, workers: list[Any]) -> None:
    refs = [worker.make.remote(made, place, 1 << 20, np.float32) for place, worker in enumerate(workers)]

    reduced = get(ray_pccl.allreduce_refs(refs))

    due = 3 * np.arange(1 << 20, dtype=np.float32) + np.float32(3)
    for value in reduced:
        np.testing.assert_array_equal(value, due)


def test_a_result_lies_in_its_actor_which_gets_it_without_a_copy(group: Any, workers: list[Any]) -> None:
    def same(one: Any, refs: list[Any]) -> bool:
        return address_of(one) == address_of(ray.get(refs[0]))

    reduced = ray_pccl.allreduce_refs(kept(workers, arrays()))

    shared = get([worker.run.remote(same, ref, [ref]) for worker, ref in zip(workers, reduced, strict=True)])
    elsewhere = get(workers[0].run.remote(same, reduced[1], [reduced[1]]))
    assert shared == [True, True, True]
    assert not elsewhere


def test_what_was_given_is_not_changed(group: Any, workers: list[Any]) -> None:
    given = arrays()
    refs = kept(workers, given)

    get(ray_pccl.allreduce_refs(refs))

    for ref, value in zip(refs, given, strict=True):
        np.testing.assert_array_equal(get(ref), value)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG], ids=lambda op: op.name)
@pytest.mark.parametrize("root", [0, 2])
def test_reduce_gives_the_root_the_reduced_value(api: Any, workers: list[Any], root: int, op: ReduceOp) -> None:
    given = arrays()

    by_place = api.reduce_refs(kept(workers, given), root, op)
    by_handle = api.reduce_refs(kept(workers, given), workers[root], op)

    for ref in (by_place, by_handle):
        assert isinstance(ref, ray.ObjectRef)
        assert ref.task_id().actor_id() == workers[root]._actor_id
        np.testing.assert_allclose(get(ref), OPS[op](given), rtol=1e-12)


@pytest.mark.parametrize("root", [0, 1, 2])
def test_broadcast_gives_every_actor_the_value(api: Any, workers: list[Any], root: int) -> None:
    given = {"w": np.arange(5.0), "text": "any", "t": torch.ones(2, dtype=torch.bfloat16), "big": np.ones(1 << 17)}

    copies = api.broadcast_ref(workers[root].make.remote(identity, given))

    assert [copy.task_id().actor_id() for copy in copies] == [worker._actor_id for worker in workers]
    for value in get(copies):
        assert value["w"].tolist() == given["w"].tolist()
        assert value["text"] == "any"
        assert torch.equal(value["t"], given["t"])
        assert value["big"].sum() == 1 << 17


def test_broadcast_leaves_the_root_its_own_tensors(group: Any, workers: list[Any]) -> None:
    copies = ray_pccl.broadcast_ref(workers[1].make.remote(made_and_noted, np.arange(4.0)))

    assert get(workers[1].run.remote(is_noted, copies[1]))
    assert get(copies[2]).tolist() == [0, 1, 2, 3]


def test_allgather_gives_every_actor_all_values_in_the_order_of_the_refs(api: Any, workers: list[Any]) -> None:
    given = [np.arange(3.0), {"other": [torch.ones(2), "text"]}, np.ones((2, 2), np.int8)]
    order = [2, 0, 1]
    refs = kept(workers, given)

    gathered = get(api.allgather_refs([refs[place] for place in order]))

    assert len(gathered) == 3
    for values in gathered:
        assert values[0].dtype == np.int8
        assert values[0].tolist() == [[1, 1], [1, 1]]
        assert values[1].tolist() == [0, 1, 2]
        assert values[2]["other"][0].tolist() == [1, 1]
        assert values[2]["other"][1] == "text"


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]], ids=str)
def test_reducescatter_gives_each_ref_its_part_in_the_order_of_the_refs(
    api: Any, workers: list[Any], order: list[int]
) -> None:
    given = arrays(shape=(6, 2))
    refs = kept(workers, given)
    due = np.add.reduce(given)

    parts = api.reducescatter_refs([refs[place] for place in order])

    assert [part.task_id().actor_id() for part in parts] == [workers[place]._actor_id for place in order]
    for place, value in enumerate(get(parts)):
        np.testing.assert_array_equal(value, due[2 * place : 2 * place + 2])


def test_reducescatter_of_a_nest_cuts_every_leaf(group: Any, workers: list[Any]) -> None:
    given = [{"a": np.arange(3.0) + place, "b": [torch.arange(6).reshape(6, 1) * place]} for place in range(3)]

    parts = get(ray_pccl.reducescatter_refs(kept(workers, given), ReduceOp.MAX))

    assert [part["a"].tolist() for part in parts] == [[2], [3], [4]]
    assert [part["b"][0].tolist() for part in parts] == [[[0], [2]], [[4], [6]], [[8], [10]]]


def test_reducescatter_of_what_can_not_be_cut_says_so_on_all(group: Any, workers: list[Any]) -> None:
    parts = ray_pccl.reducescatter_refs(kept(workers, [{"w": np.ones((4, 3))}] * 3))

    for error in raised(parts, ray_pccl.PCCLError):
        assert "['w']" in str(error)
        assert "3 equal" in str(error)
    assert works(workers)


def test_a_barrier_is_passed_when_all_have_reached_it(api: Any, group: Any, workers: list[Any], gate: Gate) -> None:
    workers[1].run.remote(gate.hold)
    gate.await_reached()

    passed = api.barrier()

    assert len(passed) == 3
    assert ray.wait(passed, timeout=0.3)[0] == []
    gate.open()
    assert get(passed) == [None, None, None]


# -------------------------------------------------------------------------------------------------- numbers and nests


def test_numbers_come_back_as_numbers(group: Any, workers: list[Any]) -> None:
    ints = get(ray_pccl.allreduce_refs(ordinary(workers, [1, 2, 3])))
    floats = get(ray_pccl.allreduce_refs(kept(workers, [1.5, 2.5, 3.5]), ReduceOp.AVG))
    scalars = get(ray_pccl.allreduce_refs(ordinary(workers, [np.float32(1)] * 3)))

    assert ints == [6, 6, 6]
    assert [type(value) for value in ints] == [int] * 3
    assert floats == [2.5] * 3
    assert [type(value) for value in floats] == [float] * 3
    assert scalars == [3] * 3
    assert [type(value) for value in scalars] == [np.float32] * 3


def test_large_integers_are_exact_and_larger_ones_are_refused(group: Any, workers: list[Any]) -> None:
    assert get(ray_pccl.allreduce_refs(ordinary(workers, [2**60 + 1] * 3))) == [3 * 2**60 + 3] * 3

    for error in raised(ray_pccl.allreduce_refs(ordinary(workers, [2**80] * 3)), ray_pccl.PCCLError):
        assert "does not fit 64 bits" in str(error)
    assert works(workers)


def test_truth_values_have_a_maximum_and_no_sum(group: Any, workers: list[Any]) -> None:
    assert get(ray_pccl.allreduce_refs(ordinary(workers, [False, True, False]), ReduceOp.MAX)) == [True] * 3
    assert get(ray_pccl.allreduce_refs(ordinary(workers, [False, True, False]), ReduceOp.MIN)) == [False] * 3

    for error in raised(ray_pccl.allreduce_refs(ordinary(workers, [True] * 3)), ray_pccl.PCCLError):
        assert "bool" in str(error).lower()
    assert works(workers)


def test_a_nest_of_everything_is_reduced_leaf_by_leaf(group: Any, workers: list[Any]) -> None:
    def step(place: int) -> Step:
        big = np.full(1 << 17, float(place))
        small = Layer(torch.full((2, 2), place, dtype=torch.bfloat16), np.full(3, place, np.int32))
        return Step([Layer(big, np.float32([place, 1])), small], loss=place / 2, count=1)

    reduced = get(ray_pccl.allreduce_refs(kept(workers, [step(place) for place in range(3)])))

    for value in reduced:
        assert type(value) is Step
        assert (value.loss, value.count, value.note) == (1.5, 3, None)
        assert [type(layer) for layer in value.layers] == [Layer, Layer]
        assert set(value.layers[0].weight.tolist()) == {3.0}
        assert value.layers[0].bias.tolist() == [3, 3]
        assert torch.equal(value.layers[1].weight, torch.full((2, 2), 3, dtype=torch.bfloat16))
        assert value.layers[1].bias.tolist() == [3, 3, 3]


@pytest.mark.parametrize(
    "value",
    [np.zeros(0), np.array(2.0), torch.zeros((0, 3)), {}, [], {"a": None}, np.ones((2, 3)).T],
    ids=["empty", "0-d", "torch empty", "empty dict", "empty list", "none", "strided"],
)
def test_odd_values_are_reduced_too(group: Any, workers: list[Any], value: Any) -> None:
    [reduced, *_] = get(ray_pccl.allreduce_refs(kept(workers, [value] * 3), ReduceOp.MAX))

    assert type(reduced) is type(value)
    assert str(reduced) == str(value)


def test_the_example_of_the_rfc_prints_what_it_says(ray_local: Any) -> None:
    @ray.remote(num_cpus=0)
    class Worker:
        def __init__(self) -> None:
            self.buffer = 2

        def get_buffer(self) -> int:
            return self.buffer

    workers = [Worker.remote() for _ in range(2)]
    group = ray_pccl.create_group(workers, "rfc")
    refs = ray_pccl.allreduce_refs([worker.get_buffer.remote() for worker in workers])

    assert str(get(refs)) == "[4, 4]"
    group.destroy()
    end(workers)


# ----------------------------------------------------------------------------------------------- refs of every kind


def test_refs_may_come_in_any_order_and_results_are_in_the_same(group: Any, workers: list[Any]) -> None:
    order = [2, 0, 1]
    refs = [workers[place].make.remote(made, place) for place in order]

    reduced = ray_pccl.allreduce_refs(refs)

    assert [ref.task_id().actor_id() for ref in reduced] == [workers[place]._actor_id for place in order]
    assert [value.tolist() for value in get(reduced)] == [[3, 6, 9, 12]] * 3


def test_kept_and_ordinary_refs_may_be_mixed(group: Any, workers: list[Any]) -> None:
    given = arrays(shape=(1 << 15,))
    refs = [*kept(workers[:1], given[:1]), *ordinary(workers[1:], given[1:])]

    for value in get(ray_pccl.allreduce_refs(refs)):
        np.testing.assert_array_equal(value, np.add.reduce(given))


def test_results_are_refs_like_any_other_and_may_be_reduced_again(group: Any, workers: list[Any]) -> None:
    once = ray_pccl.allreduce_refs(kept(workers, [np.ones(2)] * 3))

    twice = ray_pccl.allreduce_refs(once)

    assert [value.tolist() for value in get(twice)] == [[9, 9]] * 3
    assert get(workers[0].run.remote(lambda value: value.tolist(), twice[2])) == [9, 9]


def test_the_driver_is_not_held_up_by_refs_that_are_not_ready(group: Any, workers: list[Any], gate: Gate) -> None:
    refs = [
        workers[0].make.remote(lambda: gate.hold(made(0))),
        *(worker.make.remote(made, 0) for worker in workers[1:]),
    ]
    gate.await_reached()

    results = [
        *ray_pccl.allreduce_refs(refs),
        *ray_pccl.allgather_refs(refs),
        *ray_pccl.reducescatter_refs([worker.make.remote(made, 0, 3) for worker in workers]),
        *ray_pccl.broadcast_ref(refs[0]),
        *group.barrier(),
        ray_pccl.reduce_refs(refs),
    ]

    # All of these calls have returned although the first actor is still held.
    assert ray.wait(results, timeout=0)[0] == []
    gate.open()
    assert get(results[0]).tolist() == [0, 3, 6, 9]
    assert len(get(results)) == 16


def test_many_calls_in_flight_give_each_its_own_result(group: Any, workers: list[Any]) -> None:
    calls = []
    for number in range(20):
        refs = [worker.make.remote(np.full, 8, float(number)) for worker in workers]
        calls.append(ray_pccl.allreduce_refs(refs))
        if number % 5 == 0:
            calls.append([ray_pccl.reduce_refs(refs, number % 3)] * 3)

    sums = [[value[0] for value in get(call)] for call in calls]

    due = [[3.0 * number] * 3 for number in range(20) for _ in range(2 if number % 5 == 0 else 1)]
    assert sums == due


def test_refs_that_are_dropped_right_after_the_call_are_reduced_all_the_same(group: Any, workers: list[Any]) -> None:
    results = [ray_pccl.allreduce_refs([w.make.remote(np.full, 8, float(n)) for w in workers]) for n in range(10)]
    last = [worker.run.remote(lambda value: value[0], ref) for worker, ref in zip(workers, results.pop(), strict=True)]

    assert get(last) == [27.0] * 3
    assert [get(call)[1][0] for call in results] == [3.0 * number for number in range(9)]


# --------------------------------------------------------------------------------------------------- kinds of actors


@pytest.mark.parametrize("kind", ["async", "threaded", "concurrency groups", "mixed"])
def test_actors_of_every_kind_reduce_and_pair_their_calls(ray_local: Any, gate: Gate, kind: str) -> None:
    classes = {
        "async": [AsyncActor] * 2,
        "threaded": [ThreadedActor] * 2,
        "concurrency groups": [GroupedActor] * 2,
        "mixed": [AsyncActor, ThreadedActor, GroupedActor, WorkerActor],
    }[kind]
    actors = [start(1, each)[0] for each in classes]
    group = ray_pccl.create_group(actors, f"kind-{kind}")
    count = len(actors)

    calls = [group.allreduce_refs([actor.make.remote(np.full, 4, float(n)) for actor in actors]) for n in range(10)]
    numbers = group.allreduce_refs([actor.run.remote(identity, 2) for actor in actors])
    gathered = group.allgather_refs([actor.make.remote(made, place) for place, actor in enumerate(actors)])

    assert [[value.tolist() for value in get(call)] for call in calls] == [[[n * count] * 4] * count for n in range(10)]
    assert get(numbers) == [2 * count] * count
    assert [[value[0] for value in values] for values in get(gathered)] == [list(range(count))] * count
    back = [actor.run.remote(lambda value: value.sum(), ref) for actor, ref in zip(actors, calls[9], strict=True)]
    assert get(back) == [36.0 * count] * count
    group.destroy()
    end(actors)


def test_an_async_actor_goes_on_while_its_collective_waits(ray_local: Any, gate: Gate) -> None:
    actors = start(2, AsyncActor)
    group = ray_pccl.create_group(actors, "loop")
    refs = [actors[0].make.remote(made, 0), actors[1].make_held.remote(gate, made, 1)]
    gate.await_reached()

    reduced = group.allreduce_refs(refs)
    later = group.allreduce_refs([actor.run.remote(identity, 1) for actor in actors])

    assert get([actor.run.remote(identity, "free") for actor in actors]) == ["free", "free"]
    assert ray.wait([*reduced, *later], timeout=0)[0] == []
    gate.open()
    assert [value.tolist() for value in get(reduced)] == [[1, 3, 5, 7]] * 2
    assert get(later) == [2, 2]
    group.destroy()
    end(actors)


def test_detached_actors_are_actors_like_any_other(ray_local: Any) -> None:
    actors = [start(1, lifetime="detached", name=f"detached-{place}", namespace="refs")[0] for place in range(2)]
    found = [ray.get_actor(f"detached-{place}", namespace="refs") for place in range(2)]
    group = ray_pccl.create_group(found, "detached")

    reduced = get(ray_pccl.allreduce_refs([actor.make.remote(made, 1) for actor in actors]))

    assert [value.tolist() for value in reduced] == [[2, 4, 6, 8]] * 2
    group.destroy()
    end(actors)


# --------------------------------------------------------------------------------------------- errors at the call


@pytest.mark.parametrize("call", ["allreduce_refs", "reduce_refs", "allgather_refs", "reducescatter_refs"])
@pytest.mark.parametrize("whose", ["ray_pccl", "the group"])
def test_refs_that_make_no_sense_are_refused_at_the_call(group: Any, workers: list[Any], call: str, whose: str) -> None:
    function = getattr(ray_pccl if whose == "ray_pccl" else group, call)
    good = ordinary(workers, [1.0] * 3)
    task = ray.remote(num_cpus=0)(identity).remote(1.0)

    for wrong, text in [
        ([ray.put(1.0), *good[1:]], r"refs\[0\] was made by no actor, but by a task or by ray\.put"),
        ([*good[:2], task], r"refs\[2\] was made by no actor, but by a task or by ray\.put"),
        ([good[0], good[1], *ordinary(workers[:1], [2.0])], r"refs\[0\] and refs\[2\] are both of actor"),
        ([], r"refs is a list of ObjectRefs"),
        (good[0], r"refs is a list of ObjectRefs"),
        (None, r"refs is a list of ObjectRefs"),
        ([*good[:2], 1.0], r"refs\[2\] is a float, not an ObjectRef"),
        ([*good[:2], workers[2]], r"refs\[2\] is a .*ActorHandle.*, not an ObjectRef"),
    ]:
        with pytest.raises(UsageError, match=text):
            function(wrong)
    assert works(workers)


def test_a_member_without_a_ref_is_an_error_at_the_call_that_names_it(group: Any, workers: list[Any]) -> None:
    refs = ordinary(workers, [1.0] * 3)

    with pytest.raises(UsageError, match=rf"needs a ref of each.*none was given of {workers[1]._actor_id.hex()}"):
        ray_pccl.allreduce_refs([refs[0], refs[2]])
    assert works(workers)


def test_arguments_that_make_no_sense_are_refused_at_the_call(group: Any, workers: list[Any]) -> None:
    good = ordinary(workers, [1.0] * 3)

    for call, text in [
        (lambda: ray_pccl.allreduce_refs(good, "sum"), r"op is a ray_pccl\.ReduceOp.*not 'sum'"),
        (lambda: ray_pccl.reducescatter_refs(good, 0), r"op is a ray_pccl\.ReduceOp"),
        (lambda: ray_pccl.allreduce_refs(good, on_loss="stop"), r"on_loss is 'continue' or 'raise', not 'stop'"),
        (lambda: ray_pccl.allgather_refs(good, on_loss=None), r"on_loss is"),
        (lambda: ray_pccl.barrier(group, on_loss=1), r"on_loss is"),
        (lambda: ray_pccl.reduce_refs(good, 3), r"root is a place in refs, from 0 to 2, or an actor: not 3"),
        (lambda: ray_pccl.reduce_refs(good, -1), r"root is a place in refs"),
        (lambda: ray_pccl.reduce_refs(good, True), r"root is a place in refs"),
        (lambda: ray_pccl.reduce_refs(good, "first"), r"root is a place in refs"),
        (lambda: ray_pccl.reduce_refs(good, 0, max), r"op is a ray_pccl\.ReduceOp"),
        (lambda: ray_pccl.broadcast_ref(ray.put(1)), r"was made by no actor"),
        (lambda: ray_pccl.broadcast_ref(good), r"refs\[0\] is a list, not an ObjectRef"),
        (lambda: ray_pccl.allreduce_refs(good, group="unheard of"), r"there is no group 'unheard of'"),
        (lambda: ray_pccl.barrier("unheard of"), r"there is no group 'unheard of'"),
    ]:
        with pytest.raises(UsageError, match=text):
            call()
    assert works(workers)


def test_actors_of_no_group_or_of_two_are_refused_at_the_call(group: Any, workers: list[Any]) -> None:
    [stranger, third] = start(2)
    mine = ordinary(workers, [1.0] * 3)
    strange = ordinary([stranger], [1.0])

    with pytest.raises(UsageError, match=rf"actor {stranger._actor_id.hex()} is in no group"):
        ray_pccl.allreduce_refs(strange)
    with pytest.raises(UsageError, match=rf"actor {stranger._actor_id.hex()} is not in group 'refs'"):
        ray_pccl.allreduce_refs([*mine, *strange])
    with pytest.raises(UsageError, match=rf"actor {stranger._actor_id.hex()} is not in group 'refs'"):
        group.broadcast_ref(strange[0])
    others = ray_pccl.create_group([stranger, third], "others")
    with pytest.raises(UsageError, match=r"in the groups 'others', 'refs': say which one, with group="):
        ray_pccl.allreduce_refs([*mine, *strange])
    with pytest.raises(UsageError, match=r"say which group is meant"):
        ray_pccl.barrier()
    with pytest.raises(UsageError, match="is not in group 'refs'"):
        ray_pccl.allreduce_refs(ordinary([stranger, third], [1.0] * 2), group="refs")
    others.destroy()
    end([stranger, third])
    assert works(workers)


# ------------------------------------------------------------------------------------------------ errors in results


NEVER_ALIKE = {
    "shapes": ({"w": np.ones(3)}, {"w": np.ones(4)}, ["leaf ['w']", "float64 [3]", "float64 [4]"]),
    "types": ({"w": np.ones(3)}, {"w": np.ones(3, np.float32)}, ["leaf ['w']", "float64 [3]", "float32 [3]"]),
    "dimensions": (np.ones(6), np.ones((2, 3)), ["the value", "float64 [6]", "float64 [2, 3]"]),
    "keys": ({"w": np.ones(3)}, {"v": np.ones(3)}, ["structure", "['w']", "['v']"]),
    "containers": ([np.ones(3)], (np.ones(3),), ["structure", "list", "tuple"]),
    "lengths": ([np.ones(3)], [np.ones(3), np.ones(3)], ["structure"]),
    "tensors and none": ({"w": np.ones(3)}, {"w": None}, ["structure", "['w']"]),
    "int and float": (1, 1.5, ["the value", "int64", "float64"]),
}


@pytest.mark.parametrize("how", list(NEVER_ALIKE))
def test_values_that_differ_are_an_error_on_all_that_names_leaf_and_actors(
    group: Any, workers: list[Any], how: str
) -> None:
    one, other, words = NEVER_ALIKE[how]

    results = ray_pccl.allreduce_refs(kept(workers, [one, one, other]))

    errors = raised(results, CollectiveMismatchError)
    for error in errors:
        for word in words:
            assert word in str(error)
        assert workers[2]._actor_id.hex() in str(error)
    assert works(workers)


def test_reduce_and_reducescatter_name_the_leaf_as_well(group: Any, workers: list[Any]) -> None:
    given = [{"a": np.ones(3), "b": [np.ones(3)]}] * 2 + [{"a": np.ones(3), "b": [np.ones(6)]}]

    results = [ray_pccl.reduce_refs(kept(workers, given)), *ray_pccl.reducescatter_refs(kept(workers, given))]

    for error in raised(results, CollectiveMismatchError):
        assert "leaf ['b'][0] is float64" in str(error)
        assert workers[2]._actor_id.hex() in str(error)
    assert works(workers)


@pytest.mark.parametrize("make", ["make", "run"])
@pytest.mark.parametrize(
    "call", ["allreduce_refs", "allgather_refs", "reducescatter_refs", "broadcast_ref", "reduce_refs"]
)
def test_a_method_that_raised_is_its_own_result_and_the_others_are_told(
    group: Any, workers: list[Any], call: str, make: str
) -> None:
    bad = getattr(workers[1], make).remote(fail, "no luck today")
    refs = [workers[0].make.remote(np.ones, 3), bad, workers[2].make.remote(np.ones, 3)]

    if call == "broadcast_ref":
        results = ray_pccl.broadcast_ref(bad)
    elif call == "reduce_refs":
        results = [ray_pccl.reduce_refs(refs, 0), None, ray_pccl.reduce_refs(refs, 2)]
        results[1] = ray_pccl.reduce_refs(refs, 1)
    else:
        results = getattr(ray_pccl, call)(refs)

    [own] = raised([results[1]], ValueError)
    assert "no luck today" in str(own)
    for error in raised([results[0], results[2]], InputFailedError):
        assert workers[1]._actor_id.hex() in str(error)
        assert "no luck today" in str(error)
        assert error.cause.actor == workers[1]._actor_id.hex()  # type: ignore[attr-defined]
    assert works(workers)


def test_two_methods_that_raised_have_each_their_own_error(group: Any, workers: list[Any]) -> None:
    refs = [
        workers[0].make.remote(fail, "first"),
        workers[1].make.remote(fail, "second"),
        workers[2].make.remote(made, 1),
    ]

    results = ray_pccl.allreduce_refs(refs)

    assert "first" in str(raised(results[:1], ValueError)[0])
    assert "second" in str(raised(results[1:2], ValueError)[0])
    raised(results[2:], InputFailedError)
    assert works(workers)


def test_a_result_that_is_an_error_is_one_for_the_next_call_too(group: Any, workers: list[Any]) -> None:
    first = ray_pccl.allreduce_refs([workers[0].make.remote(fail, "early"), *kept(workers[1:], [np.ones(1)] * 2)])

    second = ray_pccl.allreduce_refs(first)

    for ref in second:
        with pytest.raises((ValueError, InputFailedError)):
            get(ref)
    assert works(workers)


def test_the_average_of_integers_is_refused_on_all(group: Any, workers: list[Any]) -> None:
    for given in (np.arange(3), 1, {"a": np.ones(2), "n": np.ones(2, np.int32)}):
        for error in raised(ray_pccl.allreduce_refs(ordinary(workers, [given] * 3), ReduceOp.AVG), ray_pccl.PCCLError):
            assert "AVG" in str(error)
        assert works(workers)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("text", ["the value is a str", "can't be reduced"]),
        ({"w": np.ones(2), "name": "layer"}, ["['name'] is a str", "can't be reduced"]),
        ([np.ones(2), {1, 2}], ["[1] is a set", "can't be reduced"]),
        ([b"bytes"], ["[0] is a bytes", "can't be reduced"]),
        (np.array(["a", "b"]), ["<U1"]),
        (np.array([1j, 2j]), ["complex"]),
    ],
    ids=["text", "text leaf", "set", "bytes", "array of texts", "complex"],
)
def test_what_can_not_be_reduced_is_refused_on_all(
    group: Any, workers: list[Any], value: Any, words: list[str]
) -> None:
    errors = raised(ray_pccl.allreduce_refs(ordinary(workers, [value] * 3)), ray_pccl.PCCLError)

    for error in errors:
        for word in words:
            assert word in str(error)
    assert works(workers)


def test_what_one_alone_can_not_reduce_is_its_own_error_and_the_others_are_told(group: Any, workers: list[Any]) -> None:
    results = ray_pccl.allreduce_refs(ordinary(workers, [1.0, "text", 1.0]))

    [own] = raised([results[1]], UsageError)
    assert "is a str" in str(own)
    for error in raised([results[0], results[2]], InputFailedError):
        assert workers[1]._actor_id.hex() in str(error)
        assert "is a str" in str(error)
    assert works(workers)


def test_an_error_of_a_collective_ends_no_other_that_is_in_flight(group: Any, workers: list[Any]) -> None:
    good = [np.ones(2)] * 3
    calls = []
    for bad in (False, True, False, True, False):
        calls.append(ray_pccl.allreduce_refs(kept(workers, [*good[:2], np.ones(3)] if bad else good)))

    for call in calls[::2]:
        assert [value.tolist() for value in get(call)] == [[3, 3]] * 3
    for call in calls[1::2]:
        raised(call, CollectiveMismatchError)
