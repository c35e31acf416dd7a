"""The tensors and numbers in torch's modules and optimisers, in schedulers, and in nests of dicts and lists."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ray_pccl.errors import UsageError
from ray_pccl.state.tensors import Number, TensorInfo


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a value was found: how to read it again, and how to put another one there."""

    get: Callable[[], Any]
    put: Callable[[Any], None]


def tensors_of(source: Any, name: str) -> list[TensorInfo]:
    """What a source has to share, with names that begin with its own."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(source, torch.nn.Module):
        return list(_walk(source.state_dict(), name))
    if torch is not None and isinstance(source, torch.optim.Optimizer):
        return _optimizer(torch, source, name)
    if callable(getattr(source, "state_dict", None)) and callable(getattr(source, "load_state_dict", None)):
        return _stateful(source, name)
    return list(_walk(source, name))


def _walk(value: Any, name: str, place: _Place | None = None) -> Iterator[TensorInfo]:
    """Every tensor and number in a nest. A number that has no place can't be put back, and is left out."""
    if isinstance(value, MutableMapping):
        for key in value:
            yield from _walk(value[key], f"{name}.{key}", _in(value, key))
    elif isinstance(value, MutableSequence):
        for index, item in enumerate(value):
            yield from _walk(item, f"{name}.{index}", _in(value, index))
    elif type(value) is tuple:
        for index, item in enumerate(value):
            yield from _walk(item, f"{name}.{index}", _in_tuple(place, index) if place is not None else None)
    elif type(value) in (bool, int, float, complex):
        if place is not None:
            yield TensorInfo(name, Number(place.get, place.put, repr(name)))
    elif isinstance(value, np.ndarray) or hasattr(value, "__cuda_array_interface__") or _is_torch(value):
        yield TensorInfo(name, value)


def _in(container: Any, key: Any) -> _Place:
    return _Place(lambda: container[key], lambda value: container.__setitem__(key, value))


def _in_tuple(whole: _Place, index: int) -> _Place:
    """Tuples can't be changed: a new one takes the old one's place."""

    def put(value: Any) -> None:
        items = list(whole.get())
        items[index] = value
        whole.put(tuple(items))

    return _Place(lambda: whole.get()[index], put)


def _is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _optimizer(torch: Any, optimizer: Any, name: str) -> list[TensorInfo]:
    """Live, not through `state_dict()`, whose groups are copies. Parameters are numbered as it numbers them."""
    if not optimizer.state:
        _make_state(torch, optimizer, name)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    infos: list[TensorInfo] = []
    for number, parameter in enumerate(parameters):
        if parameter in optimizer.state:
            infos += _walk(optimizer.state[parameter], f"{name}.state.{number}")
    for number, group in enumerate(optimizer.param_groups):
        for key in group:
            if key != "params":
                infos += _walk(group[key], f"{name}.param_groups.{number}.{key}", _in(group, key))
    return infos


def _make_state(torch: Any, optimizer: Any, name: str) -> None:
    """Has an optimiser that never stepped make its state, by a step that leaves parameters and gradients alone."""
    parameters = [
        parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad
    ]
    kept = [(parameter, parameter.grad, parameter.detach().clone()) for parameter in parameters]
    rates = [group.get("lr") for group in optimizer.param_groups]
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = torch.zeros_like(rate) if _is_torch(rate) else 0.0
        optimizer.step()
    except Exception as error:
        raise UsageError(
            f"{name} has not made a step yet, so it has no state to share, and it can't make one with gradients of "
            f"zero ({type(error).__name__}: {error}): let it step once, on every member, before its state is shared"
        ) from error
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
        for parameter, gradient, content in kept:
            parameter.grad = gradient
            parameter.detach().copy_(content)
    for state in optimizer.state.values():
        if _is_torch(state.get("step")):
            state["step"].zero_()
        elif "step" in state:
            state["step"] = 0


def _stateful(source: Any, name: str) -> list[TensorInfo]:
    """A scheduler, say: what is written to its state dict reaches it only through `load_state_dict`."""

    def place(key: Any) -> _Place:
        def put(value: Any) -> None:
            source.load_state_dict({**source.state_dict(), key: value})

        return _Place(lambda: source.state_dict()[key], put)

    state = source.state_dict()
    return [info for key in state for info in _walk(state[key], f"{name}.{key}", place(key))]
