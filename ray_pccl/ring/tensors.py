"""The user's tensors as flat numpy arrays: views where the memory allows it, staging copies where it does not.

numpy arrays and torch CPU tensors that are contiguous are worked on in place. What is strided, or lives on a device,
goes through a private array in host memory: `load` fills it, `store` writes it back.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ray_pccl.descriptors import DataType
from ray_pccl.errors import UsageError
from ray_pccl.ring.kernels import storage_dtype

Array: TypeAlias = NDArray[Any]

_ACCEPTED = (
    "accepted are numpy arrays, torch tensors and device arrays with __cuda_array_interface__ and get()/set() (CuPy), "
    "of bool, int8 to int64, uint8 to uint64, float16, bfloat16, float32 or float64"
)
_DATATYPES: dict[np.dtype[Any], DataType] = {
    storage_dtype(datatype): datatype for datatype in DataType if datatype is not DataType.BFLOAT16
}
_TORCH_NAMES = {datatype: storage_dtype(datatype).name for datatype in DataType} | {DataType.BFLOAT16: "bfloat16"}
_torch_datatypes: dict[Any, DataType] = {}


class Operand:
    """A user's tensor and its elements as a flat array of the storage dtype; this one is a view of the user's memory.

    Subclasses are staged: `array` is their own, valid only between `load` or the collective and `store`.
    """

    __slots__ = ("array", "count", "datatype", "shape", "source")
    staged: ClassVar[bool] = False

    def __init__(self, source: Any, array: Array, datatype: DataType, shape: tuple[int, ...]) -> None:
        self.source = source
        self.array = array
        self.datatype = datatype
        self.shape = shape
        self.count = array.size

    def load(self) -> None:
        """Copy the user's tensor into a staging array; views need nothing."""

    def store(self) -> None:
        """Copy a staging array back into the user's tensor; views need nothing. Done when it returns."""

    def bounds(self) -> tuple[int, int]:
        """The addresses, first and one past the last, between which the user's elements lie."""
        start: int = self.array.__array_interface__["data"][0]
        return start, start + self.array.nbytes

    def __repr__(self) -> str:
        kind = "staged" if self.staged else "view"
        return f"<{kind} operand {self.datatype.name}{list(self.shape)} of {type(self.source).__qualname__}>"


class _StridedArray(Operand):
    """A numpy array that is not contiguous or not aligned."""

    __slots__ = ("_elements",)
    staged = True

    def __init__(self, source: Array, elements: Array, datatype: DataType) -> None:
        super().__init__(source, np.empty(elements.size, elements.dtype), datatype, elements.shape)
        self._elements = elements

    def load(self) -> None:
        np.copyto(self.array.reshape(self.shape), self._elements)

    def store(self) -> None:
        np.copyto(self._elements, self.array.reshape(self.shape))

    def bounds(self) -> tuple[int, int]:
        elements = self._elements
        start = elements.__array_interface__["data"][0]
        return _bounds(start, elements.shape, elements.strides, elements.itemsize)


class _TorchTensor(Operand):
    """A torch tensor that is not contiguous, or not in host memory."""

    __slots__ = ("_elements", "_host")
    staged = True

    def __init__(self, source: Any, elements: Any, datatype: DataType) -> None:
        torch = sys.modules["torch"]
        # torch owns the memory: of numpy's it could not make a bfloat16 tensor of no dimensions.
        self._host = torch.empty(elements.shape, dtype=elements.dtype, device="cpu")
        self._elements = elements
        super().__init__(source, _flat_numpy(self._host, datatype), datatype, tuple(elements.shape))

    def load(self) -> None:
        self._host.copy_(self._elements)

    def store(self) -> None:
        self._elements.copy_(self._host)

    def bounds(self) -> tuple[int, int]:
        tensor = self._elements
        itemsize = tensor.element_size()
        return _bounds(tensor.data_ptr(), self.shape, [stride * itemsize for stride in tensor.stride()], itemsize)


class _DeviceArray(Operand):
    """An array in a device's memory, reached by `get()` and `set()` as CuPy's is."""

    __slots__ = ()
    staged = True

    def load(self) -> None:
        elements = np.asarray(self.source.get())
        np.copyto(self.array, elements.reshape(-1).view(self.array.dtype))

    def store(self) -> None:
        dtype = getattr(self.source, "dtype", self.array.dtype)  # may be a bfloat16 that CuPy knows and numpy does not
        self.source.set(self.array.view(dtype).reshape(self.shape))

    def bounds(self) -> tuple[int, int]:
        interface = self.source.__cuda_array_interface__
        itemsize = self.datatype.itemsize
        return _bounds(interface["data"][0], self.shape, interface.get("strides"), itemsize)


def as_input(tensor: Any, what: str = "send") -> Operand:
    """The operand to read from: staged ones are loaded already. `UsageError`, naming `what`, if it is no tensor."""
    if type(tensor) is np.ndarray:
        datatype = _DATATYPES.get(tensor.dtype)
        flags = tensor.flags
        if datatype is not None and flags.c_contiguous and flags.aligned:
            return Operand(tensor, tensor if tensor.ndim == 1 else tensor.reshape(-1), datatype, tensor.shape)
    operand = _operand(tensor, what, writes=False)
    operand.load()
    return operand


def as_output(tensor: Any, what: str = "recv") -> Operand:
    """The operand to write to: staged ones are not loaded, and reach the user's tensor with `store`.

    Raises `UsageError`, naming `what`, if it is no tensor or none that may be written to.
    """
    if type(tensor) is np.ndarray:
        datatype = _DATATYPES.get(tensor.dtype)
        if datatype is not None and tensor.flags.carray:  # contiguous, aligned and writable
            return Operand(tensor, tensor if tensor.ndim == 1 else tensor.reshape(-1), datatype, tensor.shape)
    return _operand(tensor, what, writes=True)


def overlaps(a: Operand, b: Operand) -> bool:
    """Whether the two users' memories may overlap: whether they are one object, or their ranges of addresses overlap.

    Addresses of devices and of the host are all different ones (CUDA's unified addressing).
    """
    if a.source is b.source:
        return True
    if not a.staged and not b.staged:
        return np.may_share_memory(a.array, b.array)
    if a.count == 0 or b.count == 0:
        return False
    a_start, a_end = a.bounds()
    b_start, b_end = b.bounds()
    return a_start < b_end and b_start < a_end


def _operand(tensor: Any, what: str, writes: bool) -> Operand:
    torch = sys.modules.get("torch")  # where nobody imported torch, this is none of its tensors
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _torch_operand(torch, tensor, what, writes)
    if isinstance(tensor, np.ndarray):
        return _numpy_operand(tensor, what, writes)
    if not isinstance(tensor, type) and hasattr(tensor, "__cuda_array_interface__"):
        return _device_operand(tensor, what, writes)
    if isinstance(tensor, int | float | complex | np.generic):
        raise UsageError(
            f"{what} is a number ({_name(tensor)}), which has no memory to share: "
            "make it an array, as numpy.array([value], dtype=numpy.float32) does"
        )
    raise UsageError(f"{what} is a {_name(tensor)}: {_ACCEPTED}")


def _numpy_operand(array: Array, what: str, writes: bool) -> Operand:
    if isinstance(array, np.ma.MaskedArray):
        raise UsageError(f"{what} is a masked array, whose mask would be lost: pass .filled(value) or .data")
    elements = array.view(np.ndarray)  # memmap, matrix: a matrix can't be made flat
    datatype = _numpy_datatype(array.dtype, what)
    if datatype is DataType.BFLOAT16:
        elements = elements.view(np.uint16)
    if writes:
        if not elements.flags.writeable:
            raise UsageError(f"{what} is a read-only numpy array, and results are written to it: pass a .copy()")
        _check_distinct(elements.shape, elements.strides, what)
    if elements.flags.c_contiguous and elements.flags.aligned:
        return Operand(array, elements.reshape(-1), datatype, elements.shape)
    return _StridedArray(array, elements, datatype)


def _torch_operand(torch: Any, tensor: Any, what: str, writes: bool) -> Operand:
    if not _torch_datatypes:
        _torch_datatypes.update({getattr(torch, name): datatype for datatype, name in _TORCH_NAMES.items()})
    datatype = _torch_datatypes.get(tensor.dtype)
    if datatype is None:
        raise UsageError(f"{what} is a torch tensor of {tensor.dtype}: {_ACCEPTED}")
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        raise UsageError(
            f"{what} is a torch tensor without plain memory ({tensor.layout}, device {tensor.device}): "
            "pass a dense one, as .to_dense() makes"
        )
    if writes:
        if tensor.requires_grad and tensor.is_leaf:
            raise UsageError(
                f"{what} is a leaf tensor that requires grad, and autograd would not see it change: "
                "pass .detach() or .data"
            )
        if not tensor.is_contiguous():
            _check_distinct(tensor.shape, tensor.stride(), what)
    elements = tensor.detach()
    try:
        if elements.device.type == "cpu" and elements.is_contiguous() and not elements.is_neg():
            return Operand(tensor, _flat_numpy(elements, datatype), datatype, tuple(elements.shape))
        return _TorchTensor(tensor, elements, datatype)
    except (RuntimeError, TypeError) as error:  # subclasses that only look like tensors: fake, distributed
        raise UsageError(f"{what} is a {_name(tensor)} whose memory torch won't hand out: {error}") from error


def _flat_numpy(tensor: Any, datatype: DataType) -> Array:
    if datatype is DataType.BFLOAT16:
        tensor = tensor.view(sys.modules["torch"].uint16)
    flat: Array = tensor.numpy().reshape(-1)
    return flat


def _device_operand(tensor: Any, what: str, writes: bool) -> Operand:
    interface: dict[str, Any] = tensor.__cuda_array_interface__
    needed = "set" if writes else "get"
    if not callable(getattr(tensor, needed, None)):
        raise UsageError(f"{what} is a {_name(tensor)} on a device, without a {needed}() to reach it: {_ACCEPTED}")
    datatype = _numpy_datatype(np.dtype(getattr(tensor, "dtype", interface["typestr"])), what)
    shape = tuple(interface["shape"])
    if writes:
        if interface["data"][1]:
            raise UsageError(f"{what} is a read-only {_name(tensor)}, and results are written to it: pass a copy")
        strides = interface.get("strides")
        if strides is not None and tuple(strides) != _contiguous_strides(shape, datatype.itemsize):
            raise UsageError(
                f"{what} is a {_name(tensor)} that is not contiguous, which set() can't write: "
                "pass a contiguous one and copy from it"
            )
    array = np.empty(int(np.prod(shape, dtype=np.int64)), storage_dtype(datatype))
    return _DeviceArray(tensor, array, datatype, shape)


def _numpy_datatype(dtype: np.dtype[Any], what: str) -> DataType:
    datatype = _DATATYPES.get(dtype)
    if datatype is not None:
        return datatype
    if dtype.name == "bfloat16" and dtype.itemsize == DataType.BFLOAT16.itemsize:  # ml_dtypes, jax, tensorflow
        return DataType.BFLOAT16
    if not dtype.isnative:
        raise UsageError(
            f"{what} has bytes in the other order ({dtype.str}): pass array.astype(array.dtype.newbyteorder('='))"
        )
    raise UsageError(f"{what} has elements of {dtype}: {_ACCEPTED}")


def _check_distinct(shape: Sequence[int], strides: Sequence[int], what: str) -> None:
    if 0 not in shape and any(size > 1 and stride == 0 for size, stride in zip(shape, strides, strict=True)):
        raise UsageError(f"{what} is expanded: several of its elements share one place, and each gets its own result")


def _contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides: list[int] = []
    for size in reversed(shape):
        strides.append(itemsize)
        itemsize *= size
    return tuple(reversed(strides))


def _bounds(start: int, shape: Sequence[int], strides: Sequence[int] | None, itemsize: int) -> tuple[int, int]:
    shape = tuple(shape)
    end = start + itemsize
    for size, stride in zip(shape, strides or _contiguous_strides(shape, itemsize), strict=True):
        extent = (size - 1) * stride
        start, end = (start, end + extent) if extent > 0 else (start + extent, end)
    return start, end


def _name(value: object) -> str:
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
