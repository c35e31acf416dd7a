from __future__ import annotations

import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_pccl.driver.tensors import ALIGNMENT, Form, bytes_of, form_of
from tests.ring.test_tensors import DeviceArray

SHAPES = [(), (0,), (3, 0, 2), (1,), (5,), (2, 3), (2, 1, 4)]
NUMPY_TYPES = [
    *map(np.dtype, ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"]),
    np.dtype(ml_dtypes.bfloat16),
]
TORCH_TYPES = [
    torch.bool,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]


def numpy_array(shape: tuple[int, ...], dtype: Any) -> Any:
    return (np.arange(np.prod(shape, dtype=int)) % 2 + 1).astype(dtype).reshape(shape)


def torch_tensor(shape: tuple[int, ...], dtype: Any) -> Any:
    return (torch.arange(int(np.prod(shape))) % 2 + 1).to(dtype).reshape(shape)


def moved(tensor: Any) -> tuple[Any, np.ndarray[Any, Any]]:
    """What another process makes of a tensor, and the memory that it makes it in."""
    form = pickle.loads(pickle.dumps(form_of(tensor)))
    memory = np.zeros(form.room, np.uint8)
    memory[: form.nbytes] = bytes_of(tensor)
    return form.over(memory), memory


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", NUMPY_TYPES, ids=str)
def test_a_numpy_array_is_made_again_of_its_form_and_its_bytes(dtype: Any, shape: tuple[int, ...]) -> None:
    array = numpy_array(shape, dtype)

    again, memory = moved(array)

    assert type(again) is np.ndarray
    assert (again.dtype, again.shape) == (dtype, shape)
    np.testing.assert_array_equal(again, array)
    assert again.flags.writeable
    assert not array.size or again.ctypes.data == memory.ctypes.data


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TORCH_TYPES, ids=str)
def test_a_torch_tensor_is_made_again_of_its_form_and_its_bytes(dtype: Any, shape: tuple[int, ...]) -> None:
    tensor = torch_tensor(shape, dtype)

    again, memory = moved(tensor)

    assert type(again) is torch.Tensor
    assert (again.dtype, tuple(again.shape)) == (dtype, shape)
    assert torch.equal(again, tensor)
    assert not tensor.numel() or again.data_ptr() == memory.ctypes.data


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12).reshape(3, 4).T,
        np.arange(12)[::-1],
        np.arange(24).reshape(2, 3, 4)[:, ::2, 1:],
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.broadcast_to(np.arange(3), (2, 3)),
        np.arange(4).view(np.matrix),
        np.frombuffer(b"01234567x", np.uint8)[1:].view(np.int64),
    ],
    ids=["transposed", "reversed", "strided", "fortran", "broadcast", "matrix", "unaligned"],
)
def test_an_array_that_is_not_in_a_row_comes_out_as_a_plain_one_with_the_same_elements(array: Any) -> None:
    again, _ = moved(array)

    assert type(again) is np.ndarray
    np.testing.assert_array_equal(again, array)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).reshape(3, 4).T,
        torch.arange(3, dtype=torch.bfloat16).expand(2, 3),
        torch.arange(24.0).reshape(2, 3, 4)[:, ::2, 1:],
        torch.nn.Parameter(torch.arange(3.0)),
        torch.arange(3.0, requires_grad=True) * 2,
    ],
    ids=["transposed", "expanded", "strided", "parameter", "in a graph"],
)
def test_a_torch_tensor_that_is_not_in_a_row_or_has_a_gradient_comes_out_with_the_same_elements(tensor: Any) -> None:
    again, _ = moved(tensor)

    assert again.is_contiguous()
    assert torch.equal(again, tensor.detach())


def test_the_bytes_of_a_contiguous_tensor_are_where_it_is() -> None:
    array, tensor = np.arange(6.0).reshape(2, 3), torch.arange(6.0).to(torch.bfloat16)

    assert bytes_of(array).ctypes.data == array.ctypes.data
    assert bytes_of(tensor).ctypes.data == tensor.data_ptr()


@given(st.lists(st.tuples(st.integers(0, 200), st.sampled_from(["u1", "f4", "f8", "i2"])), max_size=6))
@settings(max_examples=100, deadline=None)
def test_tensors_in_a_row_begin_where_their_elements_are_aligned(made: list[tuple[int, str]]) -> None:
    arrays = [np.arange(size).astype(dtype) for size, dtype in made]
    forms = [form_of(array) for array in arrays]
    row = np.empty(sum(form.room for form in forms) + ALIGNMENT, np.uint8)
    row = row[-row.ctypes.data % ALIGNMENT :]
    starts = [sum(form.room for form in forms[:index]) for index in range(len(forms))]
    for form, array, start in zip(forms, arrays, starts, strict=True):
        row[start : start + form.nbytes] = bytes_of(array)

    for form, array, start in zip(forms, arrays, starts, strict=True):
        again = form.over(row[start : start + form.room])
        assert again.ctypes.data % ALIGNMENT == 0
        np.testing.assert_array_equal(again, array)


def test_a_form_tells_its_type_and_shape() -> None:
    assert str(form_of(np.ones((2, 3), np.float32))) == "float32 [2, 3]"
    assert "bfloat16 [4]" in str(form_of(torch.ones(4, dtype=torch.bfloat16)))
    assert (form_of(np.ones(3, np.int16)).nbytes, form_of(np.ones(3, np.int16)).room) == (6, ALIGNMENT)
    assert (form_of(np.ones(0)).nbytes, form_of(np.ones(0)).room) == (0, 0)


def test_forms_are_equal_where_tensors_can_be_swapped_and_only_there() -> None:
    one = form_of(np.ones((2, 3)))

    assert one == form_of(np.zeros((2, 3)))
    assert len({one, form_of(np.ones((3, 2))), form_of(np.ones((2, 3), np.float32)), form_of(torch.ones(2, 3))}) == 4


def test_an_array_on_a_device_has_the_form_of_its_library() -> None:
    class Array(DeviceArray):
        nbytes = 24

    Array.__module__ = "cupy.core"
    form = form_of(Array(np.arange(3.0)))

    assert form == Form("cupy", (3,), np.dtype("f8"), 24, "cuda")
    assert bytes_of(Array(np.arange(3.0))).view(np.float64).tolist() == [0, 1, 2]


def test_a_tensor_of_a_device_that_is_not_here_is_made_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    form = Form("torch", (3,), torch.float32, 12, "cuda:0")

    again = form.over(bytes_of(torch.arange(3.0)))

    assert again.device.type == "cpu"
    assert torch.equal(again, torch.arange(3.0))


def test_torch_tensors_where_torch_is_not_installed_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray_pccl import UsageError

    form = form_of(torch.ones(3))
    monkeypatch.setattr("ray_pccl.driver.tensors.import_torch", lambda: None)

    with pytest.raises(UsageError, match="torch is not installed"):
        form.over(np.zeros(form.room, np.uint8))
