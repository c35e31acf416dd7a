"""What a tensor is made of, so that another process can have one like it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ray_pccl.errors import UsageError
from ray_pccl.ring.kernels import import_torch
from ray_pccl.ring.tensors import as_output

ALIGNMENT = 64
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Form:
    """A tensor without its elements."""

    library: str
    shape: tuple[int, ...]
    dtype: Any
    nbytes: int
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"

    @property
    def room(self) -> int:
        """The bytes that it takes in a row of tensors, with the gap to the next."""
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT

    def _on_device(self) -> Any:
        """A tensor of this form; in host memory where this process has no such device."""
        if self.library == "torch":
            torch = import_torch()
            if torch is None:
                raise UsageError("the value holds torch tensors, and torch is not installed in this process")
            has = self.device == "cpu" or torch.cuda.is_available()
            return torch.empty(self.shape, dtype=self.dtype, device=self.device if has else "cpu")
        library = sys.modules.get(self.library) or __import__(self.library)
        return library.empty(self.shape, self.dtype)

    def over(self, memory: Bytes) -> Any:
        """A tensor of this form with these elements, in this very memory where that is possible."""
        elements = memory[: self.nbytes]
        if self.library == "numpy":
            return elements.view(self.dtype).reshape(self.shape)
        if self.library == "torch" and self.device == "cpu" and self.nbytes and (torch := import_torch()) is not None:
            return torch.from_numpy(elements).view(self.dtype).reshape(self.shape)
        tensor = self._on_device()
        if self.nbytes:
            operand = as_output(tensor)
            np.copyto(operand.array.view(np.uint8), elements)
            operand.store()
        return tensor


def form_of(tensor: Any) -> Form:
    """The form of a tensor."""
    if isinstance(tensor, np.ndarray):
        return Form("numpy", tensor.shape, tensor.dtype, tensor.nbytes)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        nbytes = tensor.numel() * tensor.element_size()
        return Form("torch", tuple(tensor.shape), tensor.dtype, nbytes, str(tensor.device))
    library = type(tensor).__module__.partition(".")[0]
    return Form(library, tuple(tensor.shape), tensor.dtype, int(tensor.nbytes), "cuda")


def bytes_of(tensor: Any) -> Bytes:
    """The elements of a tensor, of whichever type, as bytes in host memory: where they lie, if that is possible."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        return np.asarray(flat.view(torch.uint8).numpy()) if len(flat) else np.empty(0, np.uint8)
    host = np.asarray(tensor if isinstance(tensor, np.ndarray) else tensor.get())
    return np.ascontiguousarray(host).reshape(-1).view(np.uint8)
