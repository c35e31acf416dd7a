"""The memory that peers of one host read in place."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import ray_pccl
from ray_pccl.errors import ProtocolError, UsageError
from ray_pccl.ring.arena import ARENA_BYTES, Arena
from ray_pccl.ring.segment import OwnSegment


def test_ranges_do_not_overlap_and_are_free_again_with_their_last_array() -> None:
    arena = Arena()
    first, second = arena.allocate(5000), arena.allocate(1)
    first[:], second[:] = 1, 2
    assert first.sum() == 5000 and arena.offset_of(first) == 0
    offset = arena.offset_of(second)
    part = first[100:200]
    del first
    gc.collect()
    assert arena.allocate(10).sum() == 0 and part.sum() == 100, "a part keeps the whole"
    del part
    gc.collect()
    third = arena.allocate(6000)
    assert arena.offset_of(third) == 0 and third.sum() == 0, "what was given back comes back empty"
    assert arena.offset_of(second) == offset and second.sum() == 2
    del second, third
    gc.collect()
    assert arena._free == [(0, ARENA_BYTES)]


def test_what_lies_elsewhere_has_no_place_in_it() -> None:
    assert Arena().offset_of(np.zeros(3)) is None


def test_a_neighbour_sees_what_was_written_and_can_not_write() -> None:
    arena = Arena()
    mine = arena.allocate(100)
    theirs = Arena(arena.fd)
    mine[:] = 7
    assert (theirs.bytes[:100] == 7).all()
    with pytest.raises(ValueError, match="read-only"):
        theirs.bytes[0] = 1


def test_memory_of_another_kind_is_refused() -> None:
    with pytest.raises(ProtocolError, match="arena"):
        Arena(OwnSegment().fd)


@pytest.mark.parametrize("shape", [(), 0, 3, (2, 3), (0, 5), [4]])
@pytest.mark.parametrize("dtype", [np.float32, "int8", np.bool_])
def test_a_tensor_has_the_shape_and_the_type_that_were_asked_for(shape: object, dtype: object) -> None:
    tensor = ray_pccl.empty(shape, dtype)
    wanted = np.empty(shape, dtype)
    assert (tensor.shape, tensor.dtype, type(tensor)) == (wanted.shape, wanted.dtype, np.ndarray)
    like = ray_pccl.empty_like(tensor)
    assert (like.shape, like.dtype) == (wanted.shape, wanted.dtype)


def test_a_torch_type_gives_a_torch_tensor() -> None:
    torch = pytest.importorskip("torch")
    tensor = ray_pccl.empty((3, 4), torch.bfloat16)
    assert (tensor.dtype, tuple(tensor.shape)) == (torch.bfloat16, (3, 4))
    assert ray_pccl.empty_like(tensor).dtype is torch.bfloat16


@pytest.mark.parametrize(("shape", "dtype"), [(-1, np.float32), ((2, 1.5), np.float32), (True, np.int8), (3, object)])
def test_what_is_no_tensor_is_refused(shape: object, dtype: object) -> None:
    with pytest.raises(UsageError):
        ray_pccl.empty(shape, dtype)
