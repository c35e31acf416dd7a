"""The drop-in has all that Ray's module has, under the same names and with the same signatures."""

from __future__ import annotations

import inspect
import pickle
from enum import Enum
from typing import Any

import pytest
import ray.util.collective as theirs
from ray.util.collective.backend_registry import _global_registry

import ray_pccl
import ray_pccl.util.collective as ours
from ray_pccl import errors
from ray_pccl.errors import PCCLError
from ray_pccl.util.collective.errors import as_runtime_error
from ray_pccl.util.collective.types import Backend, ReduceOp, as_pccl_op, as_rays_op

ERRORS = [cls for cls in vars(errors).values() if inspect.isclass(cls) and issubclass(cls, PCCLError)]


def _parameters(function: Any) -> list[tuple[str, Any, Any]]:
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default.value if isinstance(p.default, Enum) else p.default) for p in found]


def test_every_public_name_of_rays_module_is_there() -> None:
    assert set(theirs.__all__) <= set(ours.__all__)
    assert all(hasattr(ours, name) for name in ours.__all__)


@pytest.mark.parametrize("name", theirs.__all__)
def test_a_function_has_the_parameters_of_rays(name: str) -> None:
    assert _parameters(getattr(ours, name)) == _parameters(getattr(theirs, name))


def test_every_public_name_of_rays_types_is_there() -> None:
    names = [name for name in vars(theirs.types) if not name.startswith("_")]
    assert {"Backend", "ReduceOp", "AllReduceOptions", "torch_available", "th"} <= set(names)
    assert [name for name in names if not hasattr(ours.types, name)] == []
    assert ours.types.torch_available() is theirs.types.torch_available()
    assert ours.types.cupy_available() is theirs.types.cupy_available()
    with pytest.raises(AttributeError):
        _ = ours.types.no_such_name


def test_reduce_ops_are_rays_with_rays_values_and_avg() -> None:
    assert {op.name: op.value for op in theirs.types.ReduceOp}.items() <= {op.name: op.value for op in ReduceOp}.items()
    assert {op.name for op in ReduceOp} - {op.name for op in theirs.types.ReduceOp} == {"AVG"}
    assert ours.types.ReduceOp is ReduceOp and ours.types.Backend is Backend


@pytest.mark.parametrize("enumeration", [ReduceOp, theirs.types.ReduceOp, ray_pccl.ReduceOp])
def test_an_op_of_any_of_the_three_is_taken_by_its_name(enumeration: Any) -> None:
    for op in enumeration:
        assert as_pccl_op(op).name == op.name.removesuffix("UCT")
    assert as_rays_op(enumeration.MIN) is theirs.types.ReduceOp.MIN
    assert as_rays_op(list(enumeration)[1]).name in ("PRODUCT", "AVG")


@pytest.mark.parametrize("wrong", ["SUM", 0, None])
def test_what_is_no_op_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"ReduceOp\.SUM") as caught:
        as_pccl_op(wrong)
    assert isinstance(caught.value, RuntimeError)


def test_every_backend_that_ray_knows_is_available_and_no_other() -> None:
    assert ours.nccl_available() is ours.gloo_available() is True
    for name in ("nccl", "GLOO", "torch_gloo", "Pccl"):
        assert ours.is_backend_available(name)
    assert not ours.is_backend_available("carrier pigeons")


def test_the_backend_is_registered_with_ray_once() -> None:
    ours.register_backend()
    assert _global_registry.get("pccl") is ours.PCCLGroup and theirs.is_backend_available("PCCL")
    assert Backend("pccl") == Backend.PCCL == ours.PCCLGroup.backend() == "PCCL"
    with pytest.raises(ValueError, match="already registered"):
        ours.register_collective_backend("PCCL", ours.PCCLGroup)


@pytest.mark.parametrize("cls", ERRORS)
def test_every_error_can_be_had_as_a_runtime_error_with_all_that_it_says(cls: type[PCCLError]) -> None:
    both: Any = as_runtime_error(cls("rank 1 died", reason="its process is exiting", peers=("a",)))
    assert isinstance(both, cls) and isinstance(both, RuntimeError)
    copy = pickle.loads(pickle.dumps(both))
    assert type(copy) is type(both) and str(copy) == "rank 1 died"
    assert (copy.reason, copy.peers) == ("its process is exiting", ("a",))
    assert as_runtime_error(both) is both
    assert type(errors.error_named(cls.__name__, "", {})) is cls, "the plain one is still found by its name"


def test_an_error_of_another_module_becomes_what_it_derives_from() -> None:
    class Special(errors.StoreTimeoutError):
        pass

    both = as_runtime_error(Special("too late"))
    assert isinstance(both, RuntimeError) and isinstance(both, errors.StoreTimeoutError) and str(both) == "too late"


@pytest.mark.parametrize("call", [ours.get_rank, ours.barrier, ours.destroy_collective_group, ours.get_group_handle])
def test_outside_an_actor_calls_are_refused(call: Any) -> None:
    with pytest.raises(RuntimeError, match="inside a Ray actor or task"):
        call("default")
    with pytest.raises(RuntimeError, match="inside a Ray actor or task"):
        ours.init_collective_group(1, 0)
    assert not ours.is_group_initialized("default")
