from __future__ import annotations

import ctypes
import timeit
from typing import Any

import numpy as np
import pytest

from ray_pccl.descriptors import DataType
from ray_pccl.errors import UsageError
from ray_pccl.ring.kernels import storage_dtype
from ray_pccl.ring.tensors import as_input, as_output, overlaps

NUMPY_DATATYPES = [datatype for datatype in DataType if datatype is not DataType.BFLOAT16]


class DeviceArray:
    """A CuPy-like array: its memory is its own, and nothing but get() and set() reaches it."""

    def __init__(self, values: np.ndarray[Any, Any], read_only: bool = False, strides: Any = None) -> None:
        self._memory = ctypes.create_string_buffer(values.tobytes(), max(1, values.nbytes))
        self._read_only = read_only
        self._strides = strides
        self.dtype, self.shape = values.dtype, values.shape
        self.gets = self.sets = 0

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (ctypes.addressof(self._memory), self._read_only),
            "strides": self._strides,
            "version": 3,
        }

    def get(self) -> np.ndarray[Any, Any]:
        self.gets += 1
        count = int(np.prod(self.shape))
        return np.frombuffer(self._memory.raw, self.dtype, count).reshape(self.shape).copy()

    def set(self, values: np.ndarray[Any, Any]) -> None:
        assert type(values) is np.ndarray
        assert (values.dtype, values.shape) == (self.dtype, self.shape)
        self.sets += 1
        self._memory[: values.nbytes] = values.tobytes()


@pytest.mark.parametrize("convert", [as_input, as_output])
@pytest.mark.parametrize("datatype", NUMPY_DATATYPES)
def test_a_contiguous_numpy_array_is_viewed_in_place(datatype: DataType, convert: Any) -> None:
    for shape in [(6,), (2, 3), (1, 2, 3), (), (0,), (3, 0)]:
        array = np.ones(shape, storage_dtype(datatype))
        operand = convert(array)
        assert (operand.datatype, operand.shape, operand.count, operand.staged) == (datatype, shape, array.size, False)
        assert operand.array.shape == (array.size,)
        assert operand.array.dtype == storage_dtype(datatype)
        assert operand.array.ctypes.data == array.ctypes.data
        assert operand.source is array
        operand.load()
        operand.store()
        operand.array[:] = 0
        assert not array.any()


def strided_arrays() -> list[np.ndarray[Any, Any]]:
    unaligned = np.frombuffer(bytearray(41), np.uint8)[1:].view(np.float32)
    return [
        np.zeros((4, 6), np.float32).T,
        np.zeros(20, np.float32)[::2],
        np.zeros(10, np.float32)[::-1],
        np.zeros((4, 6), np.float32)[1:3, 2:],
        unaligned,
    ]


@pytest.mark.parametrize("index", range(5))
def test_a_strided_numpy_array_is_staged_and_written_back(index: int) -> None:
    array = strided_arrays()[index]
    array[...] = np.arange(array.size).reshape(array.shape)
    original = array.copy()
    operand = as_input(array)
    assert operand.staged
    assert operand.array.flags.carray
    np.testing.assert_array_equal(operand.array, original.ravel())

    output = as_output(array)
    output.array[:] = -original.ravel()
    np.testing.assert_array_equal(array, original)
    output.store()
    np.testing.assert_array_equal(array, -original)


def test_load_takes_what_the_tensor_holds_by_then() -> None:
    array = np.zeros(10, np.int32)[::2]
    operand = as_output(array)
    array[:] = 7
    operand.load()
    assert operand.array.tolist() == [7] * 5


def test_subclasses_of_numpy_arrays_are_viewed_too() -> None:
    class Matrix(np.ndarray[Any, Any]):
        def reshape(self, *shape: Any, **options: Any) -> Any:
            raise AssertionError("a matrix stays two-dimensional")

    matrix = np.zeros((2, 3), np.float32).view(Matrix)
    operand = as_output(matrix)
    assert type(operand.array) is np.ndarray
    assert operand.array.shape == (6,)
    operand.array[:] = 1
    assert matrix.sum() == 6


def test_a_read_only_array_is_an_input_but_no_output() -> None:
    array = np.arange(4, dtype=np.float32)
    array.flags.writeable = False
    assert as_input(array).array.tolist() == [0, 1, 2, 3]
    with pytest.raises(UsageError, match=r"result is a read-only numpy array.*copy"):
        as_output(array, "result")
    with pytest.raises(UsageError, match="read-only"):
        as_output(array[::2])


def test_an_array_whose_elements_share_a_place_is_an_input_but_no_output() -> None:
    array = np.lib.stride_tricks.as_strided(np.ones(1, np.float32), (4,), (0,))
    assert as_input(array).array.tolist() == [1, 1, 1, 1]
    with pytest.raises(UsageError, match="expanded"):
        as_output(array)


def test_bytes_in_the_other_order_are_refused_with_a_way_out() -> None:
    for convert in (as_input, as_output):
        with pytest.raises(UsageError, match=r"other order.*newbyteorder"):
            convert(np.zeros(3, ">f4"))


@pytest.mark.parametrize("value", [[1.0, 2.0], None, "text", b"bytes", (1,), object(), np.ndarray, DeviceArray])
def test_what_is_no_tensor_is_refused_by_its_name_and_type(value: Any) -> None:
    for convert in (as_input, as_output):
        with pytest.raises(UsageError, match=rf"input is a .*{type(value).__name__}.*accepted are numpy arrays, torch"):
            convert(value, "input")


@pytest.mark.parametrize("number", [1, 1.5, True, 1j, np.float32(1), np.int64(1), np.bool_(True)])
def test_numbers_are_refused_with_a_way_out(number: Any) -> None:
    for convert in (as_input, as_output):
        with pytest.raises(UsageError, match=r"is a number .* make it an array"):
            convert(number)


@pytest.mark.parametrize("dtype", [np.complex64, np.object_, "U3", "M8[s]", np.longdouble, "i4,f4", "V2"])
def test_elements_of_other_types_are_refused(dtype: Any) -> None:
    for convert in (as_input, as_output):
        with pytest.raises(UsageError, match=r"has elements of .*: accepted"):
            convert(np.zeros(3, dtype))


def test_masked_arrays_are_refused_rather_than_stripped_of_their_mask() -> None:
    with pytest.raises(UsageError, match=r"mask.*filled"):
        as_input(np.ma.masked_array(np.zeros(3, np.float32), [0, 1, 0]))


def test_bfloat16_of_ml_dtypes_is_viewed_as_its_bits() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes gives numpy its bfloat16")
    array = np.array([1.0, -2.0, 3.0, 4.0], ml_dtypes.bfloat16)
    operand = as_output(array)
    assert (operand.datatype, operand.array.dtype, operand.staged) == (DataType.BFLOAT16, np.uint16, False)
    assert operand.array.tolist() == [0x3F80, 0xC000, 0x4040, 0x4080]
    strided = as_input(array[::2])
    assert strided.staged
    assert strided.array.tolist() == [0x3F80, 0x4040]
    device = DeviceArray(array)
    copy = as_input(device)
    assert copy.array.tolist() == [0x3F80, 0xC000, 0x4040, 0x4080]
    copy.array[:] = 0x3F80
    copy.store()
    assert device.get().astype(np.float32).tolist() == [1, 1, 1, 1]


def test_torch_cpu_tensors_are_viewed_in_place() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    names = {
        DataType.UINT8: "uint8",
        DataType.INT8: "int8",
        DataType.UINT16: "uint16",
        DataType.INT16: "int16",
        DataType.UINT32: "uint32",
        DataType.INT32: "int32",
        DataType.UINT64: "uint64",
        DataType.INT64: "int64",
        DataType.FLOAT16: "float16",
        DataType.BFLOAT16: "bfloat16",
        DataType.FLOAT: "float32",
        DataType.DOUBLE: "float64",
        DataType.BOOL: "bool",
    }
    assert set(names) == set(DataType)
    for datatype, name in names.items():
        for shape in [(6,), (2, 3), (), (0,), (3, 0)]:
            tensor = torch.ones(shape, dtype=getattr(torch, name))
            for convert in (as_input, as_output):
                operand = convert(tensor)
                assert (operand.datatype, operand.shape, operand.staged) == (datatype, shape, False)
                assert operand.array.shape == (tensor.numel(),)
                assert operand.array.dtype == storage_dtype(datatype)
                assert operand.source is tensor
            operand.array[:] = 0
            assert not tensor.to(torch.float32).any()


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_strided_torch_tensors_are_staged_and_written_back(name: str) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    tensor = torch.arange(24).reshape(4, 6).to(getattr(torch, name)).T
    original = tensor.clone()
    operand = as_input(tensor)
    assert operand.staged
    assert operand.shape == (6, 4)
    output = as_output(tensor)
    output.array[:] = operand.array[::-1]
    assert torch.equal(tensor, original)
    output.store()
    assert torch.equal(tensor.flatten(), original.flatten().flip(0))


def test_torch_outputs_that_autograd_watches_are_refused_with_a_way_out() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    parameter = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(UsageError, match=r"recv is a leaf tensor that requires grad.*detach\(\) or \.data"):
        as_output(parameter)
    as_output(parameter.data).array[:] = 5
    assert as_input(parameter).array.tolist() == [5, 5, 5]
    assert as_input(parameter * 2).array.tolist() == [10, 10, 10]
    strided = torch.nn.Parameter(torch.ones(4, 4)).T[::2]
    assert as_input(strided).array.tolist() == [1] * 8


def test_torch_tensors_without_plain_memory_are_refused() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    for tensor in (torch.eye(3).to_sparse(), torch.ones(3, device="meta")):
        with pytest.raises(UsageError, match="without plain memory"):
            as_input(tensor)
    with pytest.raises(UsageError, match=r"torch\.complex64"):
        as_input(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(UsageError, match="expanded"):
        as_output(torch.ones(1).expand(4))
    assert as_input(torch.ones(1).expand(4)).array.tolist() == [1, 1, 1, 1]


def test_a_lazily_negated_torch_tensor_is_read_with_its_sign() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    negated = torch.tensor([1 + 2j, 3 + 4j]).conj().imag
    assert negated.is_neg()
    assert as_input(negated).array.tolist() == [-2, -4]
    contiguous = negated[:1]
    assert contiguous.is_contiguous()
    assert as_input(contiguous).array.tolist() == [-2]


@pytest.mark.parametrize("datatype", NUMPY_DATATYPES)
def test_device_arrays_are_staged_through_host_memory(datatype: DataType) -> None:
    for shape in [(6,), (2, 3), (), (0,)]:
        device = DeviceArray(np.ones(shape, storage_dtype(datatype)))
        operand = as_input(device)
        assert (operand.datatype, operand.shape, operand.staged, device.gets) == (datatype, shape, True, 1)
        assert operand.array.dtype == storage_dtype(datatype)
        assert operand.array.all()
        output = as_output(device)
        assert device.gets == 1
        output.array[:] = 0
        assert device.get().all()
        output.store()
        assert device.sets == 1
        assert not device.get().any()


def test_device_arrays_that_cannot_be_written_are_refused_as_outputs_only() -> None:
    values = np.arange(4, dtype=np.float32)
    with pytest.raises(UsageError, match="read-only"):
        as_output(DeviceArray(values, read_only=True))
    with pytest.raises(UsageError, match="not contiguous"):
        as_output(DeviceArray(values, strides=(8,)))
    as_output(DeviceArray(values, strides=(4,)))
    assert as_input(DeviceArray(values, read_only=True, strides=(8,))).array.tolist() == [0, 1, 2, 3]


def test_device_arrays_without_get_or_set_are_refused() -> None:
    class Opaque:
        __cuda_array_interface__ = DeviceArray(np.zeros(3, np.float32)).__cuda_array_interface__

    with pytest.raises(UsageError, match=r"Opaque on a device, without a get\(\)"):
        as_input(Opaque())
    with pytest.raises(UsageError, match=r"Opaque on a device, without a set\(\)"):
        as_output(Opaque())


def test_overlaps_of_host_memory_are_seen_whatever_the_views() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    whole = np.zeros(100, np.float32)
    strided = as_output(whole[10:50:2])
    cases = [
        (as_output(whole), as_output(whole), True),
        (as_output(whole[:50]), as_output(whole[49:]), True),
        (as_output(whole[:50]), as_output(whole[50:]), False),
        (as_output(whole), as_output(whole.copy()), False),
        (strided, as_output(whole[48:60]), True),
        (strided, as_output(whole[49:60]), False),
        (strided, as_output(whole[:11]), True),
        (strided, as_output(whole[:10]), False),
        (as_output(whole[49:9:-1]), as_output(whole[:10]), False),
        (as_output(whole[49:9:-1]), as_output(whole[:11]), True),
        (strided, as_output(whole[20:30][:0]), False),
        (as_output(whole[:0]), as_output(whole[:0]), False),
        (as_output(torch.from_numpy(whole)), as_output(whole[3:5]), True),
        (as_output(torch.from_numpy(whole)[10:50:2]), as_output(whole[48:49]), True),
        (as_output(torch.from_numpy(whole)[10:50:2]), as_output(whole[49:]), False),
    ]
    for index, (a, b, expected) in enumerate(cases):
        assert overlaps(a, b) is expected, index
        assert overlaps(b, a) is expected, index
    empty = whole[:0]
    assert overlaps(as_output(empty), as_output(empty))


def test_overlaps_of_device_memory_are_seen_by_their_addresses() -> None:
    device, other = DeviceArray(np.zeros(8, np.float32)), DeviceArray(np.zeros(8, np.float32))

    class Alias(DeviceArray):
        start = 0

        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            address = ctypes.addressof(device._memory) + self.start
            return super().__cuda_array_interface__ | {"data": (address, False)}

    alias = Alias(np.zeros(2, np.float32))
    assert overlaps(as_output(device), as_output(device))
    assert overlaps(as_output(device), as_output(alias))
    alias.start = 28
    assert overlaps(as_output(device), as_output(alias))
    alias.start = 32
    assert not overlaps(as_output(device), as_output(alias))
    assert not overlaps(as_output(device), as_output(other))
    assert not overlaps(as_output(device), as_output(np.zeros(8, np.float32)))


def test_the_common_case_costs_about_a_microsecond() -> None:
    array = np.zeros(16, np.float32)
    for convert in (as_input, as_output):
        best = min(timeit.repeat(lambda convert=convert: convert(array), number=2_000, repeat=7)) / 2_000
        assert best < 5e-6  # 0.5 us when measured; a slow machine may take longer
