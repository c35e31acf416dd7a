"""A user's tensor as named bytes: read for hashing and sending, written in place, whatever its library and layout."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ray_pccl.errors import UsageError

Bytes = NDArray[np.uint8]
_ACCEPTED = "accepted are numpy arrays, torch tensors and device arrays with get() and set() (CuPy)"
_PLAIN_KINDS = "biufcmM"
_PART_BYTES = {"complex64": 4, "complex128": 8}
"""Of what has parts, the bytes of one part: what has another order on other machines."""


class TensorInfo:
    """One tensor of a shared state, under a name.

    The tensor stays the user's: a sync reads it, and writes it only in its last step. Contents are compared and sent as
    the elements in their logical order, the least significant byte first: so layouts, libraries and machines mix.

    Args:
        name: The same on all members.
        tensor: A numpy array, a torch tensor or a device array; of any type but Python objects, with any strides.
        allow_content_inequality: Members may hold different contents: only newcomers are sent it.
    """

    def __init__(self, name: str, tensor: Any, *, allow_content_inequality: bool = False) -> None:
        if not isinstance(name, str) or not name:
            raise UsageError(f"a tensor's name is a text that is not empty, not {name!r}")
        self.name = name
        self.tensor = tensor
        self.allow_content_inequality = allow_content_inequality
        self._access = _access_to(tensor, f"tensor {name!r}")

    @classmethod
    def from_torch(cls, name: str, tensor: Any, allow_content_inequality: bool = False) -> TensorInfo:
        """From a torch tensor, on the CPU or a device."""
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(tensor, torch.Tensor):
            raise UsageError(f"tensor {name!r} is a {type(tensor).__name__}, not a torch tensor")
        return cls(name, tensor, allow_content_inequality=allow_content_inequality)

    @classmethod
    def from_numpy(cls, name: str, tensor: Any, allow_content_inequality: bool = False) -> TensorInfo:
        """From a numpy array."""
        if not isinstance(tensor, np.ndarray):
            raise UsageError(f"tensor {name!r} is a {type(tensor).__name__}, not a numpy array")
        return cls(name, tensor, allow_content_inequality=allow_content_inequality)

    @classmethod
    def from_cupy(cls, name: str, tensor: Any, allow_content_inequality: bool = False) -> TensorInfo:
        """From a CuPy array."""
        if not hasattr(tensor, "__cuda_array_interface__"):
            raise UsageError(f"tensor {name!r} is a {type(tensor).__name__}, not a CuPy array")
        return cls(name, tensor, allow_content_inequality=allow_content_inequality)

    @property
    def dtype(self) -> str:
        """The type's name, the same in all libraries."""
        return self._access.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self._access.shape

    @property
    def nbytes(self) -> int:
        """Bytes of all its elements."""
        return self._access.nbytes

    def load(self) -> Bytes:
        """Its contents: the tensor's own memory where that will do, else a copy, which `write` then changes."""
        return self._access.load()

    def write(self, contents: Bytes, start: int, piece: Bytes) -> None:
        """Puts a piece in its place, in what `load` returned. Any thread may do so."""
        np.copyto(contents[start : start + len(piece)], piece)

    def store(self, contents: Bytes) -> None:
        """Brings what `load` returned, with pieces written to it, to the user's tensor."""
        self._access.store(contents)

    def __repr__(self) -> str:
        return f"<TensorInfo {self.name!r} {self.dtype}{list(self.shape)}>"


class _Access:
    """How to reach a tensor's elements. This one: numpy."""

    def __init__(self, dtype: str, shape: tuple[int, ...], itemsize: int) -> None:
        self.dtype = dtype
        self.shape = tuple(int(size) for size in shape)
        self.itemsize = itemsize
        self.nbytes = int(np.prod(self.shape, dtype=np.int64)) * itemsize

    def load(self) -> Bytes:
        raise NotImplementedError

    def store(self, contents: Bytes) -> None:
        raise NotImplementedError

    def _portable(self, contents: Bytes) -> Bytes:
        """With the least significant byte first, and back again."""
        return contents if sys.byteorder == "little" else swapped(contents, _PART_BYTES.get(self.dtype, self.itemsize))


class _Array(_Access):
    def __init__(self, array: NDArray[Any], what: str) -> None:
        if isinstance(array, np.ma.MaskedArray):
            raise UsageError(f"{what} is a masked array, whose mask would not be shared: pass .data")
        name = array.dtype.name
        is_extension = array.dtype.kind == "V" and array.dtype.names is None and not name.startswith("void")
        if array.dtype.kind not in _PLAIN_KINDS and not is_extension:
            raise UsageError(f"{what} has elements of {array.dtype}, which have no plain bytes: {_ACCEPTED}")
        if not array.dtype.isnative:
            raise UsageError(f"{what} has bytes in the other order: pass array.astype(array.dtype.newbyteorder('='))")
        if not array.flags.writeable:
            raise UsageError(f"{what} is read-only, and a sync may have to write to it: pass a .copy()")
        _check_distinct(array.shape, array.strides, what)
        super().__init__(name, array.shape, array.dtype.itemsize)
        self._elements = array.view(np.ndarray)

    def load(self) -> Bytes:
        flat = np.ascontiguousarray(self._elements).reshape(-1).view(np.uint8)
        return self._portable(flat)

    def store(self, contents: Bytes) -> None:
        elements = self._elements
        if self.nbytes and not np.may_share_memory(contents, elements):
            np.copyto(elements, self._portable(contents).view(elements.dtype).reshape(self.shape))


class _TorchTensor(_Access):
    def __init__(self, torch: Any, tensor: Any, what: str) -> None:
        if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.is_quantized:
            raise UsageError(f"{what} is a torch tensor without plain memory: pass a dense one, as .to_dense() makes")
        _check_distinct(tensor.shape, tensor.stride(), what)
        super().__init__(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.element_size())
        self._torch = torch
        self._elements = tensor.detach()

    def _is_plain(self) -> bool:
        elements = self._elements
        is_view = elements.is_conj() or elements.is_neg()
        return bool(elements.device.type == "cpu" and elements.is_contiguous() and not is_view)

    def load(self) -> Bytes:
        if not self.nbytes:
            return np.empty(0, np.uint8)
        host = self._elements
        if not self._is_plain():
            host = self._torch.empty(self.shape, dtype=host.dtype)
            host.copy_(self._elements)
        flat: Bytes = host.reshape(-1).view(self._torch.uint8).numpy()
        return self._portable(flat)

    def store(self, contents: Bytes) -> None:
        if not self.nbytes:
            return
        elements = self._elements
        if self._is_plain() and contents.ctypes.data == elements.data_ptr():
            with contextlib.suppress(RuntimeError):  # an inference tensor has no version
                self._torch.autograd.graph.increment_version(elements)  # autograd is to know that it changed
            return
        flat = self._torch.from_numpy(np.ascontiguousarray(self._portable(contents)))
        elements.copy_(flat.view(elements.dtype).reshape(self.shape))


class _DeviceArray(_Access):
    """An array in a device's memory, reached by `get()` and `set()` as CuPy's is."""

    def __init__(self, array: Any, what: str) -> None:
        for needed in ("get", "set"):
            if not callable(getattr(array, needed, None)):
                raise UsageError(f"{what} is on a device, without a {needed}() to reach it: {_ACCEPTED}")
        if array.__cuda_array_interface__["data"][1]:
            raise UsageError(f"{what} is read-only, and a sync may have to write to it: pass a .copy()")
        dtype = np.dtype(array.dtype)
        super().__init__(dtype.name, tuple(array.shape), dtype.itemsize)
        self._array = array

    def load(self) -> Bytes:
        host = np.ascontiguousarray(np.asarray(self._array.get()))
        flat: Bytes = host.reshape(-1).view(np.uint8)
        return self._portable(flat if flat.flags.writeable else flat.copy())

    def store(self, contents: Bytes) -> None:
        elements = self._portable(contents).view(self._array.dtype).reshape(self.shape)
        if self._array.__cuda_array_interface__.get("strides") is None:
            self._array.set(elements)
        else:  # set() takes contiguous arrays only
            whole = sys.modules[type(self._array).__module__.partition(".")[0]].empty(self.shape, self._array.dtype)
            whole.set(elements)
            self._array[...] = whole


class Number(_Access):
    """A number in a container, such as an optimiser's learning rate: read when it is loaded, put back when stored."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], None], what: str) -> None:
        value = get()
        self._kind = next((kind for kind in (bool, int, float, complex) if type(value) is kind), None)
        if self._kind is None:
            raise UsageError(f"{what} is a {type(value).__name__}, which is no number")
        self._type = {bool: np.bool_, int: np.int64, float: np.float64, complex: np.complex128}[self._kind]
        super().__init__(np.dtype(self._type).name, (), np.dtype(self._type).itemsize)
        self._get, self._put, self._what = get, put, what

    def load(self) -> Bytes:
        """Its bytes now."""
        try:
            return self._portable(np.array([self._get()], self._type).view(np.uint8))
        except (OverflowError, TypeError, ValueError):
            raise UsageError(
                f"{self._what} is {self._get()!r} now, which does not fit a {self._type.__name__}"
            ) from None

    def store(self, contents: Bytes) -> None:
        """Puts the number of these bytes in its place."""
        assert self._kind is not None
        self._put(self._kind(self._portable(contents).view(self._type)[0]))


def _access_to(tensor: Any, what: str) -> _Access:
    if isinstance(tensor, Number):
        return tensor
    torch = sys.modules.get("torch")  # where nobody imported torch, this is none of its tensors
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _TorchTensor(torch, tensor, what)
    if isinstance(tensor, np.ndarray):
        return _Array(tensor, what)
    if not isinstance(tensor, type) and hasattr(tensor, "__cuda_array_interface__"):
        return _DeviceArray(tensor, what)
    if isinstance(tensor, int | float | complex | np.generic):
        raise UsageError(
            f"{what} is a number, which has no memory to write to: make it an array, as numpy.array(value) does, or "
            "use SharedState.from_state_dict(), which puts numbers back into their dict"
        )
    raise UsageError(f"{what} is a {type(tensor).__name__}: {_ACCEPTED}")


def swapped(contents: Bytes, part_bytes: int) -> Bytes:
    """Bytes with those of every part in the other order; a copy."""
    return np.ascontiguousarray(contents.reshape(-1, part_bytes)[:, ::-1]).reshape(-1)


def _check_distinct(shape: Any, strides: Any, what: str) -> None:
    if 0 not in shape and any(size > 1 and stride == 0 for size, stride in zip(shape, strides, strict=True)):
        raise UsageError(f"{what} is expanded: several of its elements share one place")
