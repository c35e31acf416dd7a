"""A world of one: the identity, at once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ray_pccl import (
    Communicator,
    DataType,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceDescriptor,
    ReduceInfo,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    Settings,
    UsageError,
)
from ray_pccl.testing import MasterProcess


@pytest.fixture(scope="module")
def hermit(shared_master: MasterProcess) -> Iterator[Communicator]:
    with Communicator("alone", master=shared_master.endpoint, settings=Settings(last_call_s=0.0)) as communicator:
        yield communicator


def _is_alone(info: ReduceInfo, hermit: Communicator) -> bool:
    return info == ReduceInfo(0, 0, 1, (hermit.peer_id,))


@pytest.mark.parametrize("op", ReduceOp)
@pytest.mark.parametrize("shape", [(5,), (), (0,), (3, 4)])
def test_every_reduction_is_the_identity(hermit: Communicator, op: ReduceOp, shape: tuple[int, ...]) -> None:
    given = np.full(shape, 2.5)
    for reduce in (hermit.all_reduce, hermit.reduce, hermit.reduce_scatter):
        out = np.zeros(shape)
        assert _is_alone(reduce(given, out, op=op), hermit)
        assert np.array_equal(out, given) and (given == 2.5).all()
    assert _is_alone(hermit.all_reduce(given, op=op), hermit)
    assert (given == 2.5).all()


def test_every_other_collective_is_the_identity(hermit: Communicator) -> None:
    given = np.arange(6)
    for move in (hermit.all_gather, hermit.all_to_all, hermit.gather, hermit.scatter):
        out = np.zeros_like(given)
        assert _is_alone(move(given, out), hermit)
        assert np.array_equal(out, given)
    assert _is_alone(hermit.broadcast(given), hermit) and np.array_equal(given, np.arange(6))
    assert _is_alone(hermit.barrier(), hermit)


def test_a_quantised_reduction_and_a_strided_one_are_the_identity_too(hermit: Communicator) -> None:
    given = np.linspace(0, 1, 10_000).astype(np.float32)
    out = np.zeros_like(given)
    options = QuantizationOptions(DataType.UINT8, QuantizationAlgorithm.MIN_MAX)
    assert _is_alone(hermit.all_reduce(given, out, quantization_options=options), hermit)
    assert np.array_equal(out, given)
    wide = np.zeros(20_000, np.float32)
    hermit.all_reduce(given, wide[::2])
    assert np.array_equal(wide[::2], given) and not wide[1::2].any()


def test_handles_and_many_at_once_work_alone(hermit: Communicator) -> None:
    ok, _, info = hermit.all_reduce_async(np.ones(3), op=ReduceOp.AVG).wait()
    assert ok and info is not None and info.world_size == 1
    descriptors = [
        ReduceOpDescriptor.from_numpy(
            np.ones(3, np.float32),
            np.zeros(3, np.float32),
            ReduceDescriptor(3, ReduceOp.SUM, tag, ReduceOperandDescriptor(DataType.FLOAT)),
        )
        for tag in range(20)
    ]
    assert hermit.all_reduce_multiple_with_retry(descriptors).world_size == 1
    assert all((descriptor.recv == 1).all() for descriptor in descriptors)
    assert hermit.all_reduce_multiple_with_retry([]).contributors == (hermit.peer_id,)


def test_mistakes_are_mistakes_alone_too(hermit: Communicator) -> None:
    for mistake in (
        lambda: hermit.all_reduce(np.ones(3, np.int32), op=ReduceOp.AVG),
        lambda: hermit.all_gather(np.ones(3), np.ones(4)),
        lambda: hermit.broadcast(np.ones(3), root=1),
        lambda: hermit.send(np.ones(3), 0),
        lambda: hermit.recv(np.ones(3), 0),
    ):
        with pytest.raises(UsageError):
            mistake()
