"""What peers do wrong in these tests."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ray_pccl import (
    Communicator,
    DataType,
    PCCLError,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceDescriptor,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    SettingsError,
    UsageError,
)
from ray_pccl.control.messages import OperationState
from ray_pccl.testing import eventually
from tests.collectives.calls import Outcome

_MIN_MAX = QuantizationOptions(DataType.UINT8, QuantizationAlgorithm.MIN_MAX)


def _ones(count: int = 4, dtype: str = "float32") -> Any:
    return np.ones(count, dtype)


def _read_only() -> Any:
    array = _ones()
    array.flags.writeable = False
    return array


def _in_flight_twice(comm: Communicator) -> None:
    first = comm.all_reduce_async(_ones(), tag=1)
    try:
        comm.all_reduce(_ones(), tag=1)
    finally:
        first.result(10)


def _descriptor(tag: int, count: int = 4) -> ReduceOpDescriptor:
    what = ReduceDescriptor(count, ReduceOp.SUM, tag, ReduceOperandDescriptor(DataType.FLOAT))
    return ReduceOpDescriptor.from_numpy(_ones(), _ones(), what)


MISTAKES: dict[str, tuple[Callable[[Communicator], Any], str]] = {
    "a list": (lambda comm: comm.all_reduce([1.0, 2.0]), "list.*numpy arrays"),
    "a number": (lambda comm: comm.all_reduce(1.0), "number.*make it an array"),
    "a list to receive into": (lambda comm: comm.all_reduce(_ones(), [0.0]), "recv is a list"),
    "None to gather": (lambda comm: comm.all_gather(None, _ones()), "send"),
    "None to receive into": (lambda comm: comm.all_gather(_ones(), None), "needs a tensor to receive into"),
    "None to broadcast": (lambda comm: comm.broadcast(None), "tensor"),
    "None to reduce": (lambda comm: comm.reduce(None), "send"),
    "no tensor to exchange": (lambda comm: comm.all_to_all(None, _ones()), "send"),
    "None to scatter into": (lambda comm: comm.scatter(_ones(), None), "needs a tensor to receive into"),
    "complex numbers": (lambda comm: comm.all_reduce(_ones(dtype="complex64")), "complex64"),
    "text": (lambda comm: comm.broadcast(np.array(["a"])), "U1"),
    "a read-only result": (lambda comm: comm.all_reduce(_ones(), _read_only()), "read-only.*copy"),
    "a read-only input in place": (lambda comm: comm.all_reduce(_read_only()), "read-only"),
    "other counts": (lambda comm: comm.all_reduce(_ones(4), _ones(5)), "4 elements.*5"),
    "other types": (lambda comm: comm.all_reduce(_ones(), _ones(dtype="float64")), "FLOAT.*DOUBLE"),
    "the average of integers": (
        lambda comm: comm.all_reduce(_ones(dtype="int32"), op=ReduceOp.AVG),
        "AVG of INT32.*SUM and divide.*world_size",
    ),
    "the average of integers, scattered": (
        lambda comm: comm.reduce_scatter(_ones(4, "uint8"), _ones(2, "uint8"), op=ReduceOp.AVG),
        "AVG of UINT8",
    ),
    "the sum of booleans": (lambda comm: comm.all_reduce(_ones(dtype="bool")), "MAX.*MIN"),
    "the product of booleans": (lambda comm: comm.reduce(_ones(dtype="bool"), op=ReduceOp.PROD), "MAX.*MIN"),
    "no op": (lambda comm: comm.all_reduce(_ones(), op="sum"), "ReduceOp.SUM"),
    "a tag below 0": (lambda comm: comm.all_reduce(_ones(), tag=-1), "tag.*-1"),
    "a tag that is too large": (lambda comm: comm.all_reduce(_ones(), tag=2**31), "tag"),
    "a tag that is no number": (lambda comm: comm.barrier(tag="a"), "tag.*'a'"),
    "a tag that is a truth": (lambda comm: comm.barrier(tag=True), "tag.*True"),
    "a root outside the world": (lambda comm: comm.broadcast(_ones(), root=2), "root.*0 to 1.*2"),
    "a root below 0": (lambda comm: comm.reduce(_ones(), root=-1), "root is a rank.*-1"),
    "a root that is no number": (lambda comm: comm.broadcast(_ones(), root="first"), "root.*'first'"),
    "a root that is a fraction": (lambda comm: comm.gather(_ones(), _ones(8), root=0.0), "root.*0.0"),
    "another operand": (
        lambda comm: comm.all_reduce(_ones(), operand_descriptor=ReduceOperandDescriptor(DataType.DOUBLE)),
        "DOUBLE.*FLOAT",
    ),
    "quantised integers": (
        lambda comm: comm.all_reduce(_ones(dtype="int8"), quantization_options=_MIN_MAX),
        "INT8.*can't be quantized",
    ),
    "a float as code": (
        lambda comm: comm.all_reduce(
            _ones(), quantization_options=QuantizationOptions(DataType.FLOAT, QuantizationAlgorithm.MIN_MAX)
        ),
        "UINT8",
    ),
    "a timeout below 0": (lambda comm: comm.barrier(timeout=-1), "timeout"),
    "the same tag twice in flight": (_in_flight_twice, "tag 1 is in flight already"),
    "the same tag in two descriptors": (
        lambda comm: comm.all_reduce_multiple_with_retry([_descriptor(1), _descriptor(1)]),
        "tag of its own",
    ),
    "nothing in flight": (
        lambda comm: comm.all_reduce_multiple_with_retry([_descriptor(1)], max_in_flight=0),
        "max_in_flight",
    ),
    "a descriptor of another count": (lambda comm: _descriptor(1, count=5), "count=5.*4 elements"),
    "a message to oneself": (lambda comm: comm.send(_ones(), comm.rank), "another rank"),
    "a message to nobody": (lambda comm: comm.recv(_ones(), 7), "source.*0 to 1.*7"),
    "a message that is no tensor": (lambda comm: comm.send("text", 1 - comm.rank), "str"),
    "a message of a bad tag": (lambda comm: comm.send(_ones(), 1 - comm.rank, tag=-5), "tag.*-5"),
}


def commit(comm: Communicator, mistake: str) -> list[str]:
    """Makes a mistake. Nothing has changed by it: the same tags go on."""
    call, wanted = MISTAKES[mistake]
    complaints = []
    try:
        call(comm)
        complaints.append("nothing was said")
    except (UsageError, SettingsError) as error:
        if not re.search(wanted, str(error)):
            complaints.append(f"it said {error}")
    for tag in (0, 1):
        array = _ones()
        comm.all_reduce(array, tag=tag, timeout=5)
        if array[0] != comm.world_size:
            complaints.append(f"afterwards the sum was {array[0]}")
    return complaints


def _wrong_all_gather(comm: Communicator, wrong: int) -> None:
    comm.all_gather(_ones(4), _ones(4 * comm.world_size + wrong), tag=1)


def _wrong_reduce_scatter(comm: Communicator, wrong: int) -> None:
    comm.reduce_scatter(_ones(4 * comm.world_size + wrong), _ones(4), tag=1)


def _wrong_all_to_all(comm: Communicator, wrong: int) -> None:
    count = 4 * comm.world_size + wrong
    comm.all_to_all(_ones(count), _ones(count), tag=1)


def _wrong_gather(comm: Communicator, wrong: int) -> None:
    comm.gather(_ones(4), _ones(4 * comm.world_size + wrong) if comm.rank == 0 else None, tag=1)


def _no_gather(comm: Communicator, wrong: int) -> None:
    comm.gather(_ones(4), _ones(4 * comm.world_size) if comm.rank == 0 and not wrong else None, tag=1)


def _wrong_scatter(comm: Communicator, wrong: int) -> None:
    comm.scatter(_ones(4 * comm.world_size + wrong) if comm.rank == 0 else None, _ones(4), tag=1)


def _no_scatter(comm: Communicator, wrong: int) -> None:
    comm.scatter(_ones(4 * comm.world_size) if comm.rank == 0 and not wrong else None, _ones(4), tag=1)


MISFITS = {
    "all_gather": _wrong_all_gather,
    "reduce_scatter": _wrong_reduce_scatter,
    "all_to_all": _wrong_all_to_all,
    "gather": _wrong_gather,
    "gather to nothing": _no_gather,
    "scatter": _wrong_scatter,
    "scatter of nothing": _no_scatter,
}


def misfit(comm: Communicator, name: str, everyone: bool) -> Outcome:
    """Brings a tensor that does not fit the world: everyone does, or rank 0 alone."""
    wrong = 1 if everyone or comm.rank == 0 else 0
    entered = time.monotonic()
    try:
        MISFITS[name](comm, wrong)
    except PCCLError as error:
        return Outcome(entered=entered, ended=time.monotonic(), error=type(error).__name__, text=str(error))
    return Outcome(entered=entered, ended=time.monotonic())


def hears_late(comm: Communicator, gate: str) -> Outcome:
    """Rank 0's tensor does not fit; the others hear of it between two steps of theirs: after they have entered the
    operation, and before they have begun to work on it.
    """
    assert comm._running is not None and comm._connection is not None
    plane, operations = comm._running._plane, comm._connection.membership.ledger.operations
    begin = plane.attempt

    def begin_late(*args: Any, **kwargs: Any) -> Any:
        comm.store.add(gate, 1)
        refused = [OperationState.FAILED]
        eventually(lambda: refused == [op.state for key, op in list(operations.items()) if key[0] == 1][-1:], 10)
        return begin(*args, **kwargs)

    if comm.rank:
        plane.attempt = begin_late  # type: ignore[method-assign]
    else:
        eventually(lambda: comm.store.add(gate, 0) == comm.world_size - 1, 10)
    try:
        return misfit(comm, "all_gather", everyone=False)
    finally:
        plane.attempt = begin  # type: ignore[method-assign]


def many_misfits(comm: Communicator, number: int) -> int:
    """How many of so many misfits in a row were told to be such. Rank 0, whose tensors do not fit, comes last."""
    told = 0
    for _ in range(number):
        comm.barrier(tag=2)
        if comm.rank == 0:
            time.sleep(0.0005)
        told += misfit(comm, "all_gather", everyone=False).error == "WorldChangedError"
    return told
