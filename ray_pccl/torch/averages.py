"""Where a process group makes the averages of a model's gradients."""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch


class Averages:
    """Where averages are made: a tensor for each bucket, which is used again for the same one.

    Buckets are told apart by their address: two that live at the same time have two. The average of a bucket is read
    before the bucket is filled again. What was not used for long is let go of; if torch still reads it, torch holds it.
    """

    KEPT = 256

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tensors: OrderedDict[int, torch.Tensor] = OrderedDict()

    def beside(self, source: torch.Tensor) -> torch.Tensor:
        """The tensor for what is to be averaged."""
        address = source.data_ptr()
        with self._lock:
            found = self._tensors.pop(address, None)
            if found is None or found.shape != source.shape or found.dtype != source.dtype:
                found = torch.empty_like(source)
            self._tensors[address] = found
            if len(self._tensors) > self.KEPT:
                self._tensors.popitem(last=False)
            return found

    def clear(self) -> None:
        """Lets go of all."""
        with self._lock:
            self._tensors.clear()
