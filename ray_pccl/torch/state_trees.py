"""Any state dict as bytes and tensors: the bytes say where each tensor belongs, and hold all that is none."""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Slot(NamedTuple):
    """Stands for a tensor in a tree."""

    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def empty(self) -> torch.Tensor:
        """A tensor that fits."""
        return torch.zeros(self.shape, dtype=self.dtype)


def dismantle(tree: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Bytes that are equal where trees are, and the tensors themselves.

    Pickled without a memo, which would make the bytes depend on which values are the same object.
    """
    tensors: list[torch.Tensor] = []
    text = io.BytesIO()
    pickler = pickle.Pickler(text, protocol=4)
    pickler.fast = True
    pickler.dump(_with_slots(tree, tensors))
    return text.getvalue(), tensors


def blanks(skeleton: bytes) -> list[torch.Tensor]:
    """Tensors to receive into, one for each slot."""
    slots: list[Slot] = []
    _map(_load(skeleton), slots.append)
    return [slot.empty() for slot in sorted(slots)]


def assemble(skeleton: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """The tree again, with these tensors in their slots."""
    return _map(_load(skeleton), lambda slot: tensors[slot.number])


def is_alike(skeleton: bytes, other: bytes) -> bool:
    """Whether trees have equal values, and tensors of the same types and shapes."""
    if skeleton == other:
        return True
    try:  # equal values may have been pickled to other bytes: those of a set, for instance
        return bool(_load(skeleton) == _load(other))
    except ValueError:  # arrays, of which equal ones are equal bytes
        return False


def _load(skeleton: bytes) -> Any:
    # From members of the group, who have proved that they hold its key.
    return pickle.loads(skeleton)  # noqa: S301


def _with_slots(tree: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        tensors.append(tree.detach())
        return Slot(len(tensors) - 1, tree.dtype, tuple(tree.shape))
    return _rebuilt(tree, lambda item: _with_slots(item, tensors))


def _map(tree: Any, of_slot: Any) -> Any:
    return of_slot(tree) if isinstance(tree, Slot) else _rebuilt(tree, lambda item: _map(item, of_slot))


def _rebuilt(tree: Any, of_item: Any) -> Any:
    """The same nest of dicts, lists and tuples, with other items; anything else as it is."""
    if isinstance(tree, dict):
        items = {key: of_item(item) for key, item in tree.items()}
        return Counter(items) if type(tree) is Counter else items  # MultiStepLR counts its milestones
    if type(tree) in (list, tuple):
        return type(tree)(of_item(item) for item in tree)
    return tree
