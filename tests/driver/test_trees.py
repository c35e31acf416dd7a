from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_pccl.driver.trees import Slot, is_tensor, paths, put_together, structure, take_apart


class Layer(NamedTuple):
    weight: Any
    bias: Any


Pair = namedtuple("Pair", "first second")  # users have untyped ones, too


@dataclass
class Gradient:
    values: Any
    name: Any
    kind: ClassVar[str] = "gradient"


@dataclass(frozen=True)
class Frozen:
    values: Any
    rest: Any


@dataclass(frozen=True, slots=True)
class Slotted:
    values: Any
    rest: Any


@dataclass
class Derived(Gradient):
    count: Any = 0
    made: Any = field(init=False, default=None)


@dataclass
class Checked:
    values: np.ndarray[Any, Any]
    checks: Any = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.values, np.ndarray):
            raise TypeError("values is an array")
        self.checks += 1


class Custom:
    """No container that is known here: a leaf, whatever it holds."""

    def __init__(self, array: Any) -> None:
        self.array = array


@st.composite
def tensors(draw: st.DrawFn) -> Any:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    return np.zeros(shape, draw(st.sampled_from(["f4", "f8", "i8", "u1", "?"])))


others = st.one_of(
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.none(),
    st.booleans(),
    st.builds(object),
    st.sets(st.integers(), max_size=3),
    st.just(np.float32(1.5)),
    st.just(np.array(["an", object()], object)),
    st.builds(Custom, tensors()),
)


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.one_of(st.text(max_size=3), st.integers(), st.tuples(st.integers(), st.text(max_size=1)))
    return st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
        st.dictionaries(keys, children, max_size=4),
        st.dictionaries(keys, children, max_size=4).map(OrderedDict),
        *(st.builds(cls, children, children) for cls in (Layer, Pair, Gradient, Frozen, Slotted, Derived)),
    )


nests = st.recursive(st.one_of(tensors(), others), containers, max_leaves=12)


def leaves_of(value: Any) -> list[Any]:
    return [leaf for _, leaf in paths(value)]


@given(nests)
@settings(max_examples=200, deadline=None)
def test_a_nest_that_was_taken_apart_is_put_together_again(value: Any) -> None:
    skeleton, taken = take_apart(value)
    again = put_together(skeleton, taken)

    assert [path for path, _ in paths(again)] == [path for path, _ in paths(value)]
    assert all(new is old for new, old in zip(leaves_of(again), leaves_of(value), strict=True))
    assert list(structure(again)) == list(structure(value))
    assert type(again) is type(value)


@given(nests)
@settings(max_examples=200, deadline=None)
def test_the_tensors_and_nothing_else_are_taken_in_order_and_are_the_same_objects(value: Any) -> None:
    due = [leaf for leaf in leaves_of(value) if is_tensor(leaf)]

    skeleton, taken = take_apart(value)

    assert len(taken) == len(due)
    assert all(new is old for new, old in zip(taken, due, strict=True))
    assert [leaf.index for leaf in leaves_of(skeleton) if type(leaf) is Slot] == list(range(len(taken)))
    assert not any(is_tensor(leaf) for leaf in leaves_of(skeleton))


@given(nests)
@settings(max_examples=100, deadline=None)
def test_taking_a_nest_apart_leaves_it_as_it_was(value: Any) -> None:
    before = paths(value)

    skeleton, taken = take_apart(value)
    put_together(skeleton, [np.ones(1) for _ in taken])

    after = paths(value)
    assert [path for path, _ in after] == [path for path, _ in before]
    assert all(new is old for (_, new), (_, old) in zip(after, before, strict=True))


@pytest.mark.parametrize("made", [Gradient, Frozen, Slotted, Derived])
def test_a_dataclass_comes_back_as_one_with_every_field(made: Any) -> None:
    array, rest = np.ones(3), {"lr": 0.1}
    value = made(array, rest)

    skeleton, taken = take_apart(value)
    again = put_together(skeleton, taken)

    assert type(again) is made
    assert again is not value
    assert again.values is array
    assert skeleton.values == Slot(0)
    if made is Derived:
        value.made = "later"
        assert put_together(take_apart(value)[0], taken).made == "later"


def test_the_checks_of_a_dataclass_see_no_slots() -> None:
    value = Checked(np.ones(2))

    skeleton, taken = take_apart(value)

    assert put_together(skeleton, taken).checks == 1


def test_what_a_dataclass_has_besides_its_fields_stays_there() -> None:
    value = Gradient(np.ones(2), "w")
    value.extra = "noted"  # type: ignore[attr-defined]

    assert put_together(*take_apart(value)).extra == "noted"


def test_a_class_is_a_leaf_even_if_it_is_a_dataclass() -> None:
    skeleton, taken = take_apart([Gradient, Layer, dict])

    assert skeleton == [Gradient, Layer, dict]
    assert not taken


def test_a_container_of_the_users_own_is_left_alone() -> None:
    class Mine(dict[str, Any]):
        def __init__(self) -> None:
            super().__init__(w=np.ones(1))

    value = Mine()

    skeleton, taken = take_apart([value])

    assert skeleton[0] is value
    assert not taken


def test_a_tensor_that_is_there_twice_is_there_twice_again() -> None:
    array = np.ones(3)

    again = put_together(*take_apart({"a": array, "b": [array]}))

    assert again["a"] is array
    assert again["b"][0] is array


def test_another_choice_of_leaves_takes_those() -> None:
    skeleton, taken = take_apart({"a": 1, "b": ["x", 2]}, lambda leaf: isinstance(leaf, int))

    assert skeleton == {"a": Slot(0), "b": ["x", Slot(1)]}
    assert taken == [1, 2]


def test_torch_tensors_are_tensors_and_numbers_and_arrays_of_objects_are_none() -> None:
    import torch

    assert is_tensor(torch.ones(2, dtype=torch.bfloat16))
    assert is_tensor(torch.nn.Parameter(torch.ones(2)))
    assert is_tensor(np.ones((), np.float16))
    assert not any(map(is_tensor, [1, 1.5, np.float32(1), "text", None, [np.ones(1)], np.array([object()])]))


def test_the_path_of_a_leaf_is_written_as_python_would() -> None:
    value = {"w": [np.ones(1), (2,)], 3: Layer(4, Gradient(5, 6))}

    places = [path for path, _ in paths(value)]

    assert places == ["['w'][0]", "['w'][1][0]", "[3][0]", "[3][1].values", "[3][1].name"]
    assert all(eval(f"value{place}", {"value": value}) is leaf for place, leaf in paths(value))
    assert paths(7) == [("", 7)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2], (1, 2)),
        ({"a": 1}, {"b": 1}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ([[1], 2], [1, [2]]),
        (Layer(1, 2), Pair(1, 2)),
        (Gradient(1, 2), Frozen(1, 2)),
        ([1], [1, 1]),
        ({"a": {}}, {"a": []}),
        ([None], [Slot(0)]),
    ],
)
def test_nests_of_different_structure_are_told_apart(one: Any, other: Any) -> None:
    assert list(structure(one)) != list(structure(other))


def test_nests_of_different_tensors_have_the_same_structure() -> None:
    one, other = take_apart({"w": [np.ones(3)]})[0], take_apart({"w": [np.ones((2, 2), np.int8)]})[0]

    assert list(structure(one)) == list(structure(other))
