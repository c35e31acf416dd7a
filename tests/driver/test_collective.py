"""`@ray_pccl.collective`: values stay where they were made, and can be had anywhere."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import ray
import torch

import ray_pccl
from ray_pccl import PeerLostError, UsageError
from ray_pccl.testing import eventually
from tests.driver.workers import (
    AsyncActor,
    Decorated,
    DecoratedActor,
    DecoratedAsyncActor,
    Gate,
    WorkerActor,
    address_of,
    end,
    fail,
    get,
    identity,
    is_noted,
    kill,
    made,
    made_and_noted,
    start,
    total,
)

pytestmark = pytest.mark.ray


class Layer(NamedTuple):
    weight: Any
    bias: Any


@dataclasses.dataclass(frozen=True)
class Gradients:
    layers: list[Layer]
    step: int
    note: str


@pytest.fixture(scope="module")
def worker(workers: list[Any]) -> Any:
    return workers[0]


@pytest.fixture(scope="module")
def other(workers: list[Any]) -> Any:
    return workers[1]


@pytest.fixture(scope="module")
def async_worker(ray_local: Any) -> Iterator[Any]:
    actors = start(1, AsyncActor)
    yield actors[0]
    end(actors)


@pytest.fixture(scope="module")
def decorated(ray_local: Any) -> Iterator[dict[str, Any]]:
    actors = {"sync": DecoratedActor.remote(), "async": DecoratedAsyncActor.remote()}
    yield actors
    end(list(actors.values()))


@pytest.fixture(scope="module", params=["sync", "async"])
def maker(request: pytest.FixtureRequest, worker: Any, async_worker: Any) -> Any:
    """A plain actor, and one with an event loop."""
    return {"sync": worker, "async": async_worker}[request.param]


# ------------------------------------------------------------------------------------------------------ decorating


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("sync", "bare"),
        ("sync", "under_method"),
        ("sync", "over_method"),
        ("async", "bare"),
        ("async", "under_method"),
        ("async", "over_method"),
        ("async", "not_async"),
    ],
)
def test_it_decorates_methods_of_any_kind_alone_or_with_ray_method(
    decorated: dict[str, Any], kind: str, method: str
) -> None:
    value = get(getattr(decorated[kind], method).remote(3, scale=2.5))

    assert type(value) is np.ndarray
    assert value.tolist() == [2.5, 2.5, 2.5]


@pytest.mark.parametrize("method", ["under_method", "bare"])
def test_the_options_of_a_call_stay_in_force(decorated: dict[str, Any], method: str) -> None:
    ref = getattr(decorated["sync"], method).options(name="renamed").remote(2)

    assert get(ref).tolist() == [1.0, 1.0]


def test_a_method_with_several_returns_gives_each_of_them(decorated: dict[str, Any]) -> None:
    first, second = decorated["sync"].two.remote()

    assert get(first).tolist() == [1.0] * 3
    assert get(second)["w"].tolist() == [2.0] * 3


def test_a_method_that_its_own_actor_calls_returns_the_value_itself(decorated: dict[str, Any]) -> None:
    assert get(decorated["sync"].call_bare.remote()) == "ndarray"


def test_a_decorated_method_keeps_its_name_its_text_and_its_parameters() -> None:
    assert Decorated.under_method.__name__ == "under_method"
    assert Decorated.under_method.__doc__ == "Makes an array."
    assert list(inspect.signature(Decorated.bare).parameters)[:3] == ["self", "count", "scale"]


@pytest.mark.parametrize("wrong", [int, type("Worker", (), {}), "text", 3, None], ids=str)
def test_what_is_no_method_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"decorates a method of an actor"):
        ray_pccl.collective(wrong)


def test_a_generator_is_refused() -> None:
    def generate(self: Any) -> Any:
        yield np.ones(1)

    async def generate_async(self: Any) -> Any:
        yield np.ones(1)

    for method in (generate, generate_async):
        with pytest.raises(UsageError, match=rf"{method.__name__} is a generator; return a list instead"):
            ray_pccl.collective(method)


def test_an_error_of_the_method_is_its_result(maker: Any) -> None:
    with pytest.raises(ValueError, match="no luck"):
        get(maker.make.remote(fail, "no luck"))


def test_a_method_does_not_take_arguments_that_it_has_not(decorated: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="nonsense"):
        decorated["sync"].bare.remote(1, nonsense=2)
    with pytest.raises(TypeError, match="count"):
        decorated["sync"].bare.remote()


def test_the_handle_of_a_named_actor_that_was_looked_up_does_as_well(ray_local: Any) -> None:
    [actor] = start(1, name="looked-up", namespace="collective")
    found = ray.get_actor("looked-up", namespace="collective")

    ref = found.make.remote(made_and_noted, np.ones(3))

    assert get(found.run.remote(is_noted, ref))
    assert ray_pccl.store_stats(found).objects == 1
    assert get(ref).tolist() == [1, 1, 1]
    end([actor])


# ---------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", ["?", "i1", "u2", "i8", "f2", "f4", "f8"])
def test_a_numpy_array_comes_out_as_exactly_that(maker: Any, dtype: str) -> None:
    due = np.arange(6).reshape(2, 3).astype(dtype)

    value = get(maker.make.remote(lambda: due.copy()))

    assert type(value) is np.ndarray
    assert (value.dtype, value.shape) == (due.dtype, due.shape)
    assert value.tolist() == due.tolist()
    assert value.flags.writeable


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool], ids=str)
def test_a_torch_tensor_comes_out_as_exactly_that(maker: Any, dtype: Any) -> None:
    due = torch.arange(6).reshape(2, 3).to(dtype)

    value = get(maker.make.remote(lambda: due.clone()))

    assert type(value) is torch.Tensor
    assert (value.dtype, value.shape) == (dtype, due.shape)
    assert torch.equal(value, due)


@pytest.mark.parametrize(
    "due",
    [
        np.float32([[1, 2], [3, 4]]).T,
        np.arange(10)[::3],
        np.array(7.5),
        np.zeros((3, 0, 2)),
        torch.arange(6).reshape(2, 3).T,
        torch.tensor(7.5, dtype=torch.bfloat16),
        torch.zeros((3, 0, 2)),
    ],
    ids=["transposed", "strided", "0-d", "empty", "torch transposed", "torch 0-d", "torch empty"],
)
def test_a_tensor_of_any_shape_and_layout_comes_out_with_the_same_elements(worker: Any, due: Any) -> None:
    value = get(worker.make.remote(lambda: due))

    assert (type(value), value.shape, value.dtype) == (type(due), due.shape, due.dtype)
    assert value.tolist() == due.tolist()


@pytest.mark.parametrize(
    "due",
    [
        np.array([1 + 2j, 3j], np.complex64),
        np.array(["2026-01-01", "2026-01-02"], "datetime64[D]"),
        np.array(["an", "other"]),
        np.array([(1, 2.5)], [("a", "i4"), ("b", "f8")]),
        np.arange(3, dtype=">f4"),
        np.ma.masked_array([1.0, 2.0], mask=[True, False]),
        torch.tensor([1 + 2j]),
        torch.eye(3).to_sparse(),
    ],
    ids=["complex", "dates", "texts", "records", "big-endian", "masked", "torch complex", "torch sparse"],
)
def test_an_array_that_nobody_can_reduce_comes_out_all_the_same(worker: Any, due: Any) -> None:
    value = get(worker.make.remote(lambda: {"x": due, "w": np.ones(2)}))["x"]

    assert (type(value), value.shape, value.dtype) == (type(due), due.shape, due.dtype)
    assert str(value) == str(due)


def test_a_nest_comes_out_as_the_same_nest(maker: Any) -> None:
    def nest() -> Any:
        layers = [Layer(np.full((2, 2), place, np.float32), torch.full((3,), place)) for place in range(2)]
        return {"g": Gradients(layers, 7, "seventh"), "pair": (np.ones(1), [np.zeros(0)]), 3: None}

    value = get(maker.make.remote(nest))

    assert list(value) == ["g", "pair", 3]
    gradients = value["g"]
    assert type(gradients) is Gradients
    assert (gradients.step, gradients.note) == (7, "seventh")
    assert [type(layer) for layer in gradients.layers] == [Layer, Layer]
    assert [layer.weight.tolist() for layer in gradients.layers] == [[[0, 0], [0, 0]], [[1, 1], [1, 1]]]
    assert torch.equal(gradients.layers[1].bias, torch.ones(3, dtype=torch.int64))
    assert type(value["pair"]) is tuple
    assert type(value["pair"][1][0]) is np.ndarray
    assert value[3] is None


@pytest.mark.parametrize("due", [None, 7, "text", {"a": [1, 2]}, [], b"bytes"], ids=repr)
def test_a_value_without_tensors_travels_as_usual(worker: Any, due: Any) -> None:
    before = ray_pccl.store_stats(worker).objects

    ref = worker.make.remote(identity, due)

    assert get(ref) == due
    assert ray_pccl.store_stats(worker).objects <= before


def test_leaves_that_are_no_tensors_may_be_of_any_class(worker: Any) -> None:
    value = get(worker.make.remote(lambda: {"w": np.ones(2), "set": {1, 2}, "range": range(3), "type": int}))

    assert value["w"].tolist() == [1, 1]
    assert (value["set"], value["range"], value["type"]) == ({1, 2}, range(3), int)


# ----------------------------------------------------------------------------------------------------- same address


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_value_that_is_passed_back_to_its_own_actor_has_the_same_address(maker: Any, library: str) -> None:
    given = np.ones(1 << 16) if library == "numpy" else torch.ones(1 << 16)

    ref = maker.make.remote(made_and_noted, given)

    assert get(maker.run.remote(is_noted, ref))
    assert get(maker.run.remote(lambda refs: is_noted(ray.get(refs[0])), [ref]))
    assert get(maker.run.remote(lambda refs: is_noted(ray.get(refs["deep"][0])), {"deep": [ref]}))
    assert get(maker.make.remote(made_and_noted, ref)).tolist() == given.tolist()
    assert not get(maker.run.remote(is_noted, ref))


def test_a_value_that_is_awaited_in_its_own_actor_has_the_same_address(async_worker: Any) -> None:
    ref = async_worker.make.remote(made_and_noted, np.ones(1 << 16))

    assert get(async_worker.await_inside.remote([ref], is_noted))


def test_a_nest_that_is_passed_back_has_the_same_tensors(worker: Any) -> None:
    ref = worker.make.remote(lambda: {"w": [made_and_noted(np.ones(3))], "n": 1})

    assert get(worker.run.remote(lambda nest: is_noted(nest["w"][0]) and nest["n"] == 1, ref))


def test_a_value_that_its_actor_changed_in_place_is_seen_changed(worker: Any) -> None:
    def add_one(array: Any) -> None:
        array += 1

    ref = worker.make.remote(np.zeros, 3)
    get(worker.run.remote(add_one, ref))

    assert get(ref).tolist() == [1, 1, 1]


def test_a_copy_is_the_receivers_own(worker: Any) -> None:
    ref = worker.make.remote(np.zeros, 3)
    copy = get(ref)

    copy += 1

    assert get(ref).tolist() == [0, 0, 0]


# ----------------------------------------------------------------------------------------------- wherever it is used


def test_other_actors_have_it_as_an_argument_and_as_a_nested_ref(maker: Any, other: Any, async_worker: Any) -> None:
    ref = maker.make.remote(made, 1)

    assert get(other.run.remote(total, ref)) == 10
    assert get(other.run.remote(lambda refs: total(ray.get(refs[0])), [ref])) == 10
    assert get(async_worker.run.remote(total, ref)) == 10
    assert get(async_worker.await_inside.remote([ref], total)) == 10


def test_a_plain_task_has_it_and_may_return_its_ref(maker: Any) -> None:
    ref = maker.make.remote(made, 2)

    assert get(ray.remote(num_cpus=0)(total).remote(ref)) == 14
    [again] = get(ray.remote(num_cpus=0)(identity).remote([ref]))
    assert get(again).tolist() == [2, 3, 4, 5]


def test_another_actor_returns_it_as_its_own(worker: Any, other: Any) -> None:
    ref = worker.make.remote(made, 3)
    plain, kept = other.run.remote(identity, ref), other.make.remote(lambda value: value * 2, ref)
    del ref

    assert get(plain).tolist() == [3, 4, 5, 6]
    assert get(kept).tolist() == [6, 8, 10, 12]


def test_a_ref_in_a_put_object_is_good_wherever_that_goes(worker: Any, other: Any) -> None:
    box = ray.put({"ref": worker.make.remote(made, 4)})

    assert get(other.run.remote(lambda opened: total(ray.get(opened["ref"])), box)) == 22
    assert total(get(get(box)["ref"])) == 22


def test_a_ref_that_is_not_ready_may_be_passed_on(worker: Any, other: Any, async_worker: Any, gate: Gate) -> None:
    ref = worker.make.remote(lambda: gate.hold(made(5)))
    here, there, own = other.run.remote(total, ref), async_worker.await_inside.remote([ref], total), None
    gate.await_reached()
    own = worker.run.remote(total, ref)

    assert ray.wait([ref, here, there, own], timeout=0)[0] == []
    gate.open()

    assert get([here, there, own]) == [26, 26, 26]


def test_wait_tells_when_a_value_is_there_and_does_not_fetch_it(worker: Any) -> None:
    ref = worker.make.remote(made, 6)

    ready, _ = ray.wait([ref], timeout=60, fetch_local=False)

    assert ready == [ref]


def test_many_values_are_had_at_once(worker: Any, other: Any) -> None:
    refs = [each.make.remote(made, place) for place in range(10) for each in (worker, other)]

    values = get(refs)

    assert [value[0] for value in values] == [place for place in range(10) for _ in range(2)]


def test_an_actor_that_was_handed_to_another_one_makes_values_for_it(worker: Any, other: Any) -> None:
    def ask(maker: Any) -> Any:
        ref = maker.make.remote(made, 7)
        return total(ray.get(ref)), [ref]

    there, [ref] = get(other.run.remote(ask, worker))

    assert there == 34
    assert total(get(ref)) == 34
    assert get(worker.run.remote(total, ref)) == 34


def test_a_value_is_handed_out_while_its_actor_is_busy(maker: Any, other: Any, gate: Gate) -> None:
    ref = maker.make.remote(made, 8)
    ray.wait([ref])
    busy = maker.run.remote(gate.hold, "done")
    gate.await_reached()

    assert get(ref).tolist() == [8, 9, 10, 11]
    assert get(other.run.remote(total, ref)) == 38

    assert ray.wait([busy], timeout=0)[0] == []
    gate.open()
    assert get(busy) == "done"


def test_what_other_methods_return_is_as_it_would_be_without_us(worker: Any, other: Any) -> None:
    get(worker.make.remote(made, 1))
    ref = worker.run.remote(np.ones, 1 << 17)

    value, again = get(ref), get(ref)

    assert type(value) is np.ndarray
    assert not value.flags.writeable
    assert address_of(value) == address_of(again)
    assert get(other.run.remote(lambda given: (type(given).__name__, given.flags.writeable), ref)) == ("ndarray", False)


# --------------------------------------------------------------------------------------------------- lives of actors


def is_lost(error: BaseException, actor: Any) -> bool:
    return (
        isinstance(error, PeerLostError)
        and isinstance(error, ray.exceptions.ActorDiedError)
        and actor._actor_id.hex() in str(error)
    )


def test_the_value_of_a_dead_actor_raises_an_error_that_is_ours_and_rays(other: Any) -> None:
    [mortal] = start(1)
    ref, unread = mortal.make.remote(made, 1), mortal.make.remote(made, 2)
    get([ref, unread])
    [nested] = get([other.run.remote(lambda refs: refs, [unread])])

    kill(mortal)

    for lost in (ref, unread, nested[0]):
        with pytest.raises(PeerLostError) as caught:
            get(lost)
        assert is_lost(caught.value, mortal)
    with pytest.raises(ray.exceptions.ActorDiedError, match=mortal._actor_id.hex()):
        get(ref)
    with pytest.raises(PeerLostError, match=mortal._actor_id.hex()):
        get(other.run.remote(total, ref))
    with pytest.raises(PeerLostError, match=mortal._actor_id.hex()):
        get(other.run.remote(lambda refs: total(ray.get(refs[0])), [ref]))
    assert get(other.run.remote(total, other.make.remote(made, 0))) == 6


def test_an_actor_that_was_restarted_makes_values_again_and_its_old_ones_are_lost(worker: Any) -> None:
    [phoenix] = start(1, max_restarts=1, max_task_retries=-1)
    old = phoenix.make.remote(made, 1)
    assert get(old).tolist() == [1, 2, 3, 4]

    kill(phoenix)

    new = phoenix.make.remote(made_and_noted, made(2))
    assert get(new).tolist() == [2, 3, 4, 5]
    assert get(phoenix.run.remote(is_noted, new))
    assert get(worker.run.remote(total, new)) == 14
    with pytest.raises(PeerLostError) as caught:
        get(old)
    assert is_lost(caught.value, phoenix)
    with pytest.raises(PeerLostError):
        get(phoenix.run.remote(total, old))
    end([phoenix])


def test_a_receiver_that_dies_while_others_hold_the_value_changes_nothing_for_them(worker: Any, other: Any) -> None:
    [mortal] = start(1)
    ref = worker.make.remote(made, 3)
    assert get(mortal.run.remote(total, ref)) == 18

    kill(mortal)

    assert get(other.run.remote(total, ref)) == 18


def test_the_users_runtime_env_is_kept(ray_local: Any) -> None:
    env = {"env_vars": {"USERS_OWN": "kept"}}
    [actor] = start(1, runtime_env=env)

    value = get(actor.make.remote(lambda: {"w": np.ones(1), "variable": os.environ["USERS_OWN"]}))
    told = get(actor.run.remote(lambda: dict(ray.get_runtime_context().runtime_env)))

    assert value["variable"] == "kept"
    assert told["env_vars"] == env["env_vars"]
    end([actor])


def test_an_actor_made_by_an_actor_works_as_any(worker: Any) -> None:
    def use_one() -> float:
        inner = WorkerActor.remote()
        try:
            return total(ray.get(inner.make.remote(made, 1)))
        finally:
            ray.kill(inner)

    assert get(worker.run.remote(use_one)) == 10


def test_the_value_of_an_actor_that_was_ended_by_ray_kill_is_lost(ray_local: Any) -> None:
    [mortal] = start(1)
    ref = mortal.make.remote(made, 1)
    get(ref)

    end([mortal])

    def raised() -> BaseException | None:
        try:
            get(ref)
        except PeerLostError as error:
            return error
        return None

    assert is_lost(eventually(raised, 30), mortal)
