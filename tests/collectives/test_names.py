"""PCCL's vocabulary, as its users import it."""

from __future__ import annotations

import inspect
import pickle

import numpy as np
import pytest
import torch

import ray_pccl
from ray_pccl import (
    Attribute,
    Communicator,
    DataType,
    DistributionHint,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceDescriptor,
    ReduceInfo,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    UsageError,
)

NAMES = [
    "Communicator",
    "ReduceOp",
    "Attribute",
    "DataType",
    "DistributionHint",
    "QuantizationOptions",
    "QuantizationAlgorithm",
    "ReduceOperandDescriptor",
    "ReduceDescriptor",
    "ReduceOpDescriptor",
    "ReduceInfo",
    "PCCLError",
]
DATATYPES = {
    "UINT8",
    "INT8",
    "UINT16",
    "INT16",
    "UINT32",
    "INT32",
    "UINT64",
    "INT64",
    "FLOAT16",
    "BFLOAT16",
    "FLOAT",
    "DOUBLE",
}


@pytest.mark.parametrize("name", NAMES)
def test_pccls_name_can_be_imported(name: str) -> None:
    assert name in ray_pccl.__all__ and getattr(ray_pccl, name).__name__ == name


def test_pccls_values_are_there() -> None:
    assert [op.name for op in ReduceOp] == ["SUM", "AVG", "PROD", "MAX", "MIN"]
    assert {datatype.name for datatype in DataType} >= DATATYPES
    assert [hint.name for hint in DistributionHint] == ["NONE", "NORMAL", "UNIFORM"]
    assert [algorithm.name for algorithm in QuantizationAlgorithm] == ["NONE", "MIN_MAX", "ZERO_POINT_SCALE"]
    assert Attribute.LOCAL_WORLD_SIZE is Attribute.PEER_GROUP_WORLD_SIZE
    for name in ("GLOBAL_WORLD_SIZE", "NUM_DISTINCT_PEER_GROUPS", "LARGEST_PEER_GROUP_WORLD_SIZE"):
        assert hasattr(Attribute, name)
    info = ReduceInfo(1, 2, 3, ("a", "b", "c"))
    assert (info.tx_bytes, info.rx_bytes, info.world_size, info.contributors) == (1, 2, 3, ("a", "b", "c"))


def _descriptor(count: int) -> ReduceDescriptor:
    return ReduceDescriptor(
        count=count,
        op=ReduceOp.SUM,
        tag=7,
        operand_descriptor=ReduceOperandDescriptor(DataType.FLOAT, DistributionHint.NORMAL),
        quantization_options=QuantizationOptions(DataType.FLOAT, QuantizationAlgorithm.NONE),
    )


def test_descriptors_hold_the_tensors_of_their_library() -> None:
    tensor = torch.ones(2, 3)
    made = ReduceOpDescriptor.from_torch(send=tensor, recv=tensor, reduce_descriptor=_descriptor(6))
    assert made.send is made.recv is tensor and made.reduce_descriptor.tag == 7
    array = np.ones(6, np.float32)
    made = ReduceOpDescriptor.from_numpy(send=array, recv=array, reduce_descriptor=_descriptor(6))
    assert made.send is made.recv is array


def test_a_descriptor_whose_count_is_wrong_is_refused() -> None:
    with pytest.raises(UsageError, match=r"count=5.*6 elements"):
        ReduceOpDescriptor.from_torch(torch.ones(6), torch.ones(6), _descriptor(5))
    with pytest.raises(UsageError, match=r"count=5.*6 elements"):
        ReduceOpDescriptor.from_numpy(np.ones(6), np.ones(6), _descriptor(5))


@pytest.mark.parametrize("make", [ReduceOpDescriptor.from_torch, ReduceOpDescriptor.from_numpy])
def test_a_descriptor_of_no_tensor_is_refused(make: object) -> None:
    with pytest.raises(UsageError):
        make([1.0], [1.0], _descriptor(1))  # type: ignore[operator]


def test_descriptors_and_infos_pickle() -> None:
    for thing in (_descriptor(3), ReduceInfo(1, 2, 3, ("a",)), QuantizationOptions()):
        assert pickle.loads(pickle.dumps(thing)) == thing


@pytest.mark.parametrize("name", ["all_reduce", "reduce", "broadcast", "barrier"])
def test_blocking_forms_retry_by_default_and_async_forms_do_not(name: str) -> None:
    for form, default in ((name, True), (f"{name}_async", False)):
        parameters = inspect.signature(getattr(Communicator, form)).parameters
        assert parameters["retry"].default is default and parameters["tag"].default == 0


@pytest.mark.parametrize("name", ["reduce", "broadcast", "gather", "scatter"])
def test_the_root_is_rank_0_and_the_op_is_a_sum_unless_told_otherwise(name: str) -> None:
    for form in (name, f"{name}_async"):
        parameters = inspect.signature(getattr(Communicator, form)).parameters
        assert parameters["root"].default == 0
        assert "op" not in parameters or parameters["op"].default is ReduceOp.SUM
