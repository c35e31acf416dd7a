"""Has a part of a training go on from a state, and sees to it that it holds exactly that."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ray_pccl.errors import UsageError
from ray_pccl.torch.state_trees import dismantle, is_alike


class Stateful(Protocol):
    """What has a state to share: an optimiser, a scheduler, a sampler."""

    def state_dict(self) -> Any:
        """Its state: a nest of dicts, lists, tensors and values that can be pickled."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Goes on from there."""


def load_exactly(name: str, part: Stateful, state: Any) -> None:
    """Loads it. Raises `UsageError` if the part holds another state then: it would differ from the others' for good."""
    given, _ = dismantle(state)  # before: what is loaded may be changed in place
    part.load_state_dict(state)
    if isinstance(part, torch.optim.Optimizer):
        _undo_casts(part, state)
    held, _ = dismantle(part.state_dict())
    if not is_alike(given, held):
        raise UsageError(
            f"the {name} ({type(part).__name__}) holds another state than it was given, after load_state_dict(): "
            "values, shapes or types of tensors differ. Make it as on the other members, and let load_state_dict() "
            "take over all that state_dict() returns"
        )


def _undo_casts(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Torch casts what it loads to the parameter's type; what was made in another (float32 of bfloat16) stays so."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in state["state"].items():
        if not isinstance(index, int):  # of the optimiser as a whole, which torch leaves alone
            continue
        held = optimizer.state[parameters[index]]
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and key in held and held[key].dtype != value.dtype:
                held[key] = value.to(held[key].device, copy=True)
