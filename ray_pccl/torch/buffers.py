"""A model's buffers, such as the running averages of a batch norm: everyone's own until one member's become all's."""

from __future__ import annotations

import torch

from ray_pccl.descriptors import ReduceInfo, ReduceOp
from ray_pccl.torch.roll_call import RollCall


class Buffers:
    """The buffers of a model that are part of its state."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def spread(self, roll_call: RollCall, *, is_source: bool) -> ReduceInfo | None:
        """Collects the source's, as bytes: all others have zeros to add. None if there are no buffers."""
        parts = [buffer.detach().cpu().contiguous().view(-1).view(torch.uint8) for buffer in self._all()]
        if not parts:
            return None
        self._bytes = torch.cat(parts)
        if not is_source:
            self._bytes.zero_()
        return roll_call.communicator.all_reduce(self._bytes, op=ReduceOp.SUM, tag=roll_call.tag)

    def take_over(self) -> None:
        """Writes what was collected to the model."""
        start = 0
        for buffer in self._all():
            part = self._bytes[start : start + buffer.nbytes]
            start += buffer.nbytes
            buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))

    def _all(self) -> list[torch.Tensor]:
        state = self._model.state_dict(keep_vars=True)
        return [buffer for name, buffer in self._model.named_buffers() if name in state and buffer.numel()]
