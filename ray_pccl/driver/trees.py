"""Nests of tensors: dicts, lists, tuples, named tuples and dataclasses, with tensors and other things as leaves."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """Stands for the tensor that was taken from this place."""

    index: int


def is_tensor(value: Any) -> bool:
    """Whether it is an array or a dense tensor of numpy, torch or CuPy, and no more than that: no mask, no objects."""
    if isinstance(value, np.ndarray):
        return type(value) in (np.ndarray, np.memmap) and not value.dtype.hasobject
    torch = sys.modules.get("torch")  # where nobody imported torch, this is none of its tensors
    if torch is not None and isinstance(value, torch.Tensor):
        return bool(value.layout is torch.strided and not value.is_quantized)
    return hasattr(type(value), "__cuda_array_interface__")


def take_apart(value: Any, is_leaf: Callable[[Any], bool] = is_tensor) -> tuple[Any, list[Any]]:
    """The nest with a `Slot` at the place of each leaf, and the leaves in order. The nest is a new one."""
    leaves: list[Any] = []

    def take(leaf: Any, _path: str) -> Any:
        if not is_leaf(leaf):
            return leaf
        leaves.append(leaf)
        return Slot(len(leaves) - 1)

    return _rebuild(value, take, ""), leaves


def put_together(skeleton: Any, leaves: list[Any]) -> Any:
    """The opposite of `take_apart`."""
    return _rebuild(skeleton, lambda leaf, _: leaves[leaf.index] if type(leaf) is Slot else leaf, "")


def paths(skeleton: Any) -> list[tuple[str, Any]]:
    """Every leaf of a nest with its place, written as Python would: ``['w']``, ``[0]``, ``.bias``; empty at the top."""
    found: list[tuple[str, Any]] = []

    def note(leaf: Any, path: str) -> Any:
        found.append((path, leaf))
        return leaf

    _rebuild(skeleton, note, "")
    return found


def structure(skeleton: Any) -> Iterator[str]:
    """A text for every part of a nest: equal lists for nests of the same structure."""

    def walk(value: Any, path: str) -> Iterator[str]:
        children = _children(value)
        if children is None:
            yield f"{path}: {'a tensor' if type(value) is Slot else repr(value)}"
            return
        yield f"{path}: {type(value).__qualname__}"
        for key, child in children:
            yield from walk(child, path + key)

    return walk(skeleton, "")


def _children(value: Any) -> list[tuple[str, Any]] | None:
    """The parts of a container with their places; None for a leaf."""
    if type(value) in (dict, OrderedDict):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if type(value) in (list, tuple) or _is_named_tuple(value):
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    if _is_dataclass(value):
        return [(f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


def _rebuild(value: Any, change: Callable[[Any, str], Any], path: str) -> Any:
    children = _children(value)
    if children is None:
        return change(value, path)
    items = [_rebuild(child, change, path + place) for place, child in children]
    if isinstance(value, dict):
        return type(value)(zip(value, items, strict=True))
    if _is_named_tuple(value):
        return type(value)(*items)
    if isinstance(value, list | tuple):
        return type(value)(items)
    new = copy.copy(value)
    for field, item in zip(dataclasses.fields(value), items, strict=True):
        object.__setattr__(new, field.name, item)  # also where it is frozen
    return new


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(type(value), "_fields")


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type | Slot)
