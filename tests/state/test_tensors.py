"""Tensors of every type and layout as bytes, and bytes back into them, in place."""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np
import pytest
import torch

from ray_pccl import SharedState, TensorInfo, UsageError
from ray_pccl.state import tensors
from ray_pccl.state.hashing import digest_of, digests_of
from ray_pccl.state.pieces import cut
from ray_pccl.state.storing import store

TORCH = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
NUMPY = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "M8[s]", "m8[us]"]


def _bytes(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2, count, dtype=np.uint8)  # what is valid for a bool, too


def _exchange(target: TensorInfo, content: np.ndarray, piece_bytes: int = 5) -> None:
    """Brings a content into a tensor as a sync does."""
    pieces = cut([target.nbytes], [False], piece_bytes)
    arrived = {index: content[piece.start : piece.start + piece.length] for index, piece in enumerate(pieces)}
    assert store([target], [target.load()], pieces, arrived) == (("t",) if pieces else ())


def _check(make) -> None:
    """A tensor takes a content over, in its own memory."""
    tensor = make()
    info = TensorInfo("t", tensor)
    content = _bytes(1, info.nbytes)
    _exchange(info, content)
    assert info.load().tobytes() == TensorInfo("t", tensor).load().tobytes() == content.tobytes()


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 4), (2, 0, 3)])
@pytest.mark.parametrize("dtype", TORCH, ids=str)
def test_torch_tensors_of_all_types_and_layouts(dtype, shape) -> None:
    def zeros(shape) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8).to(dtype) if dtype.itemsize > 1 else torch.zeros(shape).to(dtype)

    _check(lambda: zeros(shape))
    if len(shape) == 2:
        _check(lambda: zeros((4, 3)).t())
        _check(lambda: zeros((6, 8))[::2, ::2])
    assert TensorInfo("t", zeros(shape)).dtype == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 4)])
@pytest.mark.parametrize("dtype", [*NUMPY, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn], ids=str)
def test_numpy_arrays_of_all_types_and_layouts(dtype, shape) -> None:
    _check(lambda: np.zeros(shape, dtype))
    if shape == (3, 4):
        _check(lambda: np.zeros((4, 3), dtype).T)
        _check(lambda: np.zeros((6, 8), dtype)[::2, ::-2])


def test_a_layout_and_a_library_do_not_change_a_content() -> None:
    elements = np.arange(12, dtype=np.float32).reshape(3, 4)
    ways = [elements, elements.copy(order="F"), torch.from_numpy(elements), torch.from_numpy(elements.T.copy()).t()]
    infos = [TensorInfo("t", way) for way in ways]
    assert len({(info.dtype, info.shape, digest_of(info.load())) for info in infos}) == 1
    brain = TensorInfo("t", torch.from_numpy(elements).to(torch.bfloat16))
    other = TensorInfo("t", elements.astype(ml_dtypes.bfloat16))
    assert (brain.dtype, brain.load().tobytes()) == (other.dtype, other.load().tobytes())


def test_a_digest_is_the_same_on_every_machine() -> None:
    assert digest_of(b"").hex() == "99aa06d3014798d86001c324468d497f", "as the definition of XXH3 has it"
    assert digest_of(np.arange(5, dtype=np.uint8)).hex() == "9434532106a7c141c920d2347a85929b"
    pieces = cut([20], [False], 8)
    assert [row.tobytes() for row in digests_of([np.arange(20, dtype=np.uint8)], pieces)] == [
        digest_of(bytes(range(start, min(start + 8, 20)))) for start in (0, 8, 16)
    ]


@pytest.mark.parametrize("tensor", [np.arange(6, dtype=np.int32), np.arange(6) * 1j, np.array(3, np.float32)])
def test_a_machine_of_the_other_byte_order_hashes_and_writes_the_same(tensor, monkeypatch) -> None:
    little = TensorInfo("t", tensor).load().tobytes()
    foreign = tensor.astype(tensor.dtype.newbyteorder(">")).view(tensor.dtype)  # what such a machine has in memory
    monkeypatch.setattr(sys, "byteorder", "big")
    info = TensorInfo("t", foreign)
    contents = info.load()
    assert contents.tobytes() == little
    foreign[...] = 0
    info.store(contents)
    assert info.load().tobytes() == little


def test_a_parameter_is_written_in_place_and_autograd_knows() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    address, version = parameter.data_ptr(), parameter._version
    loss = (parameter * parameter).sum()
    _exchange(TensorInfo.from_torch("t", parameter), np.full(4, 2, np.float32).view(np.uint8))
    assert parameter.tolist() == [2.0] * 4 and parameter.data_ptr() == address and parameter.requires_grad
    assert parameter._version > version
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


class _Device:
    """What CuPy's arrays do, as far as it matters here."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self.shape, self.dtype = array.shape, array.dtype
        self.__cuda_array_interface__ = {"data": (1, False), "strides": None, "shape": array.shape, "typestr": "<f4"}

    def get(self) -> np.ndarray:
        return self._array.copy()

    def set(self, array: np.ndarray) -> None:
        assert array.shape == self.shape and array.dtype == self.dtype
        self._array[...] = array


def test_device_arrays_go_through_host_memory() -> None:
    device = _Device(np.zeros((2, 3), np.float32))
    _exchange(TensorInfo.from_cupy("t", device), np.arange(6, dtype=np.float32).view(np.uint8))
    assert device.get().tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_what_is_no_tensor_or_can_not_be_written_to_is_refused_by_name() -> None:
    read_only = np.zeros(3)
    read_only.flags.writeable = False
    for wrong in (
        3.0, "text", [1.0], read_only, np.array([object()]), np.zeros(3, "S4"), np.zeros(3, "f4,i4"),
        np.zeros(3, ">f4"),
        np.broadcast_to(np.zeros(1), (3,)), torch.zeros(1).expand(3), torch.zeros(3).to_sparse(), np.ma.zeros(3),
        torch.zeros(3, device="meta"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match="'w'"):
            SharedState({"w": wrong})
    with pytest.raises(UsageError, match="torch"):
        TensorInfo.from_torch("w", np.zeros(3))
    with pytest.raises(UsageError, match="numpy"):
        TensorInfo.from_numpy("w", torch.zeros(3))
    with pytest.raises(UsageError, match="CuPy"):
        TensorInfo.from_cupy("w", np.zeros(3))
    with pytest.raises(UsageError, match="'w'"):
        SharedState([TensorInfo("w", np.zeros(3)), TensorInfo("w", np.zeros(3))])
    for revision in (-1, 1.5, True, 1 << 62):
        with pytest.raises(UsageError, match="revision"):
            SharedState({}, revision)
    with pytest.raises(UsageError, match="TensorInfo"):
        SharedState([np.zeros(3)])
    with pytest.raises(UsageError, match="name"):
        TensorInfo("", np.zeros(3))
    assert tensors.swapped(np.arange(4, dtype=np.uint8), 2).tolist() == [1, 0, 3, 2]
