"""Tensors as `ray.util.collective` is given them: read-only ones out of Ray's object store, lists, parts of one."""

from __future__ import annotations

import mmap
import sys
import warnings
from typing import Any

import numpy as np

from ray_pccl.errors import SettingsError, UsageError


class _SameMemory:
    """Hands out the memory of an array as one that may be written."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self.array = array  # keeps the memory


def writable(tensor: Any) -> Any:
    """The tensor, as one that results can be written to, in the same memory.

    A torch tensor that requires grad is written behind autograd's back, as torch's own collectives do. What an actor
    is given as an argument, or takes out of Ray's object store, is a read-only numpy array: `ray.util.collective`
    writes to it nevertheless, so programs rely on it, and so do we, with a warning. Files that are mapped read-only
    stay what they are: a write would end the process.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return tensor.detach()
    if type(tensor) is not np.ndarray or tensor.flags.writeable or tensor.dtype.hasobject or _is_mapped_file(tensor):
        return tensor
    warnings.warn(
        "a read-only numpy array, probably out of Ray's object store, is written to in place, as ray.util.collective "
        "does: whoever else holds the object may see it change; pass a .copy() to avoid that",
        stacklevel=2,
    )
    return np.asarray(_SameMemory(tensor)).view(tensor.dtype)


def _is_mapped_file(array: np.ndarray[Any, Any]) -> bool:
    owner: Any = array
    while owner is not None:
        if isinstance(owner, np.memmap | mmap.mmap):
            return True
        owner = owner.obj if isinstance(owner, memoryview) else getattr(owner, "base", None)
    return False


def shape_of(tensor: Any) -> tuple[int, ...]:
    """The shape of a numpy, torch or CuPy tensor."""
    return tuple(tensor.shape)


def host_buffer(like: Any, count: int) -> Any:
    """`count` elements in host memory, flat, of the type that a tensor has."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        return torch.empty(count, dtype=like.dtype)
    return np.empty(count, dtype=like.dtype)


def require_shapes(tensors: list[Any], like: Any, what: str) -> None:
    """Raises unless all tensors have the shape of `like`."""
    for place, tensor in enumerate(tensors):
        if shape_of(tensor) != shape_of(like):
            raise SettingsError(
                f"{what}: tensor {place} of the list has shape {shape_of(tensor)}, and the single tensor "
                f"{shape_of(like)}: all have to be of one shape"
            )


def first_elements(tensor: Any, count: int) -> Any:
    """The first elements of a tensor, flat, in its own memory; all of it if `count` is 0."""
    if count == 0:
        return tensor
    size = int(np.prod(shape_of(tensor), dtype=np.int64))
    contiguous = tensor.is_contiguous() if hasattr(tensor, "is_contiguous") else tensor.flags.c_contiguous
    if count > size or not contiguous:
        raise UsageError(
            f"n_elements={count} asks for the first elements of a contiguous tensor with at least as many; this one "
            f"has {size} and is {'' if contiguous else 'not '}contiguous"
        )
    return tensor.reshape(-1)[:count]
