"""The tensors and numbers in torch's modules and optimisers, in schedulers, and in nests of dicts and lists."""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
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


def _walk(value: Any, name: str, place: _Place | None = None, *, live: bool = True) -> Iterator[TensorInfo]:
    """Every tensor and number in a nest. A number that has no place can't be put back, and is left out.

    `live`: what is written to a container in it is written to the source, and not to a copy.
    """
    if isinstance(value, MutableMapping | MutableSequence) or type(value) is tuple:
        is_live = live and type(value) is not tuple
        for key, item in value.items() if isinstance(value, MutableMapping) else enumerate(value):
            inside = _in(value, key) if is_live else _anew(place, key) if place is not None else None
            yield from _walk(item, f"{name}.{key}", inside, live=live)
    elif type(value) in (bool, int, float, complex):
        if place is not None:
            yield TensorInfo(name, Number(place.get, place.put, repr(name)))
    elif isinstance(value, np.ndarray) or hasattr(value, "__cuda_array_interface__") or _is_torch(value):
        yield TensorInfo(name, value)


def _in(container: Any, key: Any) -> _Place:
    return _Place(lambda: container[key], lambda value: container.__setitem__(key, value))


def _anew(whole: _Place, key: Any) -> _Place:
    """A place in what can't be changed, or is a copy: a new one takes the old one's place."""

    def put(value: Any) -> None:
        old = whole.get()
        items = list(old) if type(old) is tuple else copy.copy(old)
        items[key] = value
        whole.put(tuple(items) if type(old) is tuple else items)

    return _Place(lambda: whole.get()[key], put)


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
    """Has an optimiser that never stepped make its state, by a step that leaves parameters and gradients alone.

    Raises `UsageError` if it would step otherwise afterwards than it would have without.
    """
    try:
        neutral = all(_is_neutral(torch, optimizer, group) for group in optimizer.param_groups)
        if neutral:
            _step_in_vain(torch, optimizer)
    except Exception as error:
        raise _unstepped(name, f"can't make one with gradients of zero ({type(error).__name__}: {error})") from error
    if not neutral:
        raise _unstepped(name, "would train otherwise after one with gradients of zero")


def _unstepped(name: str, why: str) -> UsageError:
    return UsageError(
        f"{name} has not made a step yet, so it has no state to share, and it {why}: let it step once, on every "
        "member, before its state is shared"
    )


def _is_neutral(torch: Any, optimizer: Any, group: dict[str, Any]) -> bool:
    """Whether a step in vain changes none of the steps after it: tried with this group's settings, on two numbers."""

    def trained(*, in_vain: bool) -> Any:
        parameter = torch.nn.Parameter(torch.tensor([0.5, -1.0]))
        small = copy.copy(optimizer)
        small.param_groups = [
            {**copy.deepcopy({k: v for k, v in group.items() if k != "params"}), "params": [parameter]}
        ]
        small.state = defaultdict(dict)
        if in_vain:
            _step_in_vain(torch, small)
        for gradient in ([0.25, -0.5], [-0.125, 0.75], [0.5, 0.5]):
            parameter.grad = torch.tensor(gradient)
            small.step()
        return parameter.detach()

    return bool(torch.equal(trained(in_vain=False), trained(in_vain=True)))


def _step_in_vain(torch: Any, optimizer: Any) -> None:
    parameters = [
        parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad
    ]
    kept = [(parameter, parameter.grad, parameter.detach().clone()) for parameter in parameters]
    rates = [group.get("lr") for group in optimizer.param_groups]
    decays = [group.get("weight_decay") for group in optimizer.param_groups]
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = torch.zeros_like(rate) if _is_torch(rate) else 0.0
        for group in optimizer.param_groups:
            if "weight_decay" in group:  # it would be a gradient, and go into the averages
                group["weight_decay"] = 0
        optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            if decay is not None:
                group["weight_decay"] = decay
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
    return [info for key in state for info in _walk(state[key], f"{name}.{key}", place(key), live=False)]
