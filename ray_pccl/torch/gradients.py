"""The gradients of a model as a few flat tensors: reduced as wholes, and written back only when all of it is there."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from ray_pccl.errors import UsageError

Kind = tuple[torch.dtype, torch.device]
Present = NDArray[np.uint8]


class Gradients:
    """The gradients of an optimiser's parameters. Its flat tensors are kept for the next step."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
        self._optimizer = optimizer
        self._model = model
        self._flat: dict[Kind, torch.Tensor] = {}

    def present(self) -> Present:
        """Which parameters have a gradient here: 1 or 0 each.

        Raises `UsageError` for a gradient that is not dense.
        """
        for parameter in self._parameters():
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise UsageError(
                    f"the gradient of {self._name(parameter)} is sparse ({parameter.grad.layout}), and only dense ones "
                    "can be averaged: make its layer with sparse=False"
                )
        return np.array([parameter.grad is not None for parameter in self._parameters()], np.uint8)

    @staticmethod
    def pattern(present: Present) -> int:
        """A hash of it."""
        return int(xxhash.xxh3_64_intdigest(present.tobytes()))

    def pack(self, present: Iterable[int], scale: float) -> list[torch.Tensor]:
        """One flat tensor for each type and device, with the gradients times `scale`; zeros where there is none."""
        with torch.no_grad():
            for kind, members in self._by_kind(present).items():
                flat = self._flat_of(kind, sum(_real(parameter).numel() for parameter in members))
                start = 0
                for parameter in members:
                    part = flat[start : start + _real(parameter).numel()]
                    start += part.numel()
                    if parameter.grad is None:
                        part.zero_()
                    else:
                        part.view(_real(parameter).shape).copy_(_real(parameter.grad))
                if scale != 1.0:
                    flat.mul_(scale)
            return [self._flat[kind] for kind in self._by_kind(present)]

    def unpack(self, present: Iterable[int]) -> None:
        """Writes what is in the flat tensors to the parameters' gradients. Who has none anywhere, has none after it."""
        with torch.no_grad():
            for kind, members in self._by_kind(present).items():
                start = 0
                for parameter in members:
                    part = self._flat[kind][start : start + _real(parameter).numel()]
                    start += part.numel()
                    if parameter.grad is None:
                        parameter.grad = torch.empty_like(parameter)
                    _real(parameter.grad).copy_(part.view(_real(parameter).shape))

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _by_kind(self, present: Iterable[int]) -> dict[Kind, list[torch.Tensor]]:
        kinds: dict[Kind, list[torch.Tensor]] = {}
        for parameter, is_present in zip(self._parameters(), present, strict=True):
            if is_present:
                kinds.setdefault((_real(parameter).dtype, parameter.device), []).append(parameter)
        return kinds

    def _flat_of(self, kind: Kind, count: int) -> torch.Tensor:
        flat = self._flat.get(kind)
        if flat is None or flat.numel() != count:
            flat = self._flat[kind] = torch.empty(count, dtype=kind[0], device=kind[1])
        return flat

    def _name(self, parameter: torch.Tensor) -> str:
        found = (name for name, other in self._model.named_parameters() if other is parameter)
        return next(found, f"a parameter of shape {list(parameter.shape)}")


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
