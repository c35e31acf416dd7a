"""The parameters of a model as one row of numbers, cut into fragments of the same size."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ray_pccl.errors import UsageError


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements of a parameter, from `start` on, and where they are in their fragment."""

    parameter: torch.Tensor
    start: int
    place: int
    count: int


class Fragments:
    """The trained parameters, in `count` fragments. Each is read and written as a flat tensor, on the CPU.

    float32, whatever the parameters are, or float64 if any of them is.
    """

    def __init__(self, parameters: list[torch.Tensor], count: int) -> None:
        for parameter in parameters:
            if not parameter.is_floating_point():
                raise UsageError(f"DiLoCo trains parameters of floating point, not of {parameter.dtype}")
        total = sum(parameter.numel() for parameter in parameters)
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= total:
            raise UsageError(f"fragments is a whole number from 1 to {total}, the elements to train, not {count!r}")
        is_wide = any(parameter.dtype is torch.float64 for parameter in parameters)
        self.dtype = torch.float64 if is_wide else torch.float32
        ends = [total * (number + 1) // count for number in range(count)]
        self._pieces = [_cut(parameters, low, high) for low, high in zip([0, *ends], ends, strict=False)]

    def __len__(self) -> int:
        return len(self._pieces)

    def read(self, number: int) -> torch.Tensor:
        """What the parameters hold now, as a tensor of its own."""
        pieces = self._pieces[number]
        flat = torch.empty(sum(piece.count for piece in pieces), dtype=self.dtype)
        for piece in pieces:
            elements = piece.parameter.detach().flatten()[piece.start : piece.start + piece.count]
            flat[piece.place : piece.place + piece.count].copy_(elements)
        return flat

    def write(self, number: int, flat: torch.Tensor) -> None:
        """Puts these values into the parameters."""
        for piece in self._pieces[number]:
            values = flat[piece.place : piece.place + piece.count]
            whole = piece.parameter.detach()
            elements = whole.view(-1) if whole.is_contiguous() else whole.flatten()
            elements[piece.start : piece.start + piece.count].copy_(values)
            if not whole.is_contiguous():
                whole.copy_(elements.view(whole.shape))


def _cut(parameters: list[torch.Tensor], low: int, high: int) -> list[_Piece]:
    """What lies between two places of the row."""
    pieces, begin = [], 0
    for parameter in parameters:
        first, last = max(low, begin), min(high, begin + parameter.numel())
        if first < last:
            pieces.append(_Piece(parameter, first - begin, first - low, last - first))
        begin += parameter.numel()
    return pieces
