"""One call of a peer, described so that it can be sent there, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ray_pccl import (
    Communicator,
    DataType,
    PCCLError,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceInfo,
    ReduceOp,
)
from ray_pccl.control.messages import OperationState

FOLLOW_WORLD = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")


@dataclass(frozen=True, kw_only=True)
class Call:
    """A collective whose input is one number, over and over."""

    kind: str = "all_reduce"
    value: float = 1
    count: int = 16
    dtype: str = "float32"
    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    algorithm: QuantizationAlgorithm = QuantizationAlgorithm.NONE
    quantized: DataType = DataType.UINT8
    retry: bool = True
    in_place: bool = False
    tag: int = 0
    timeout: float | None = None
    behind: bool = False
    """Whether by its `_async` form."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a call ended; times are of the clock that all processes of a host share."""

    entered: float
    ended: float
    error: str = ""
    text: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    info: ReduceInfo | None = None
    results: tuple[float, ...] = ()
    """The different values in the output; for gathering ones, one of each part."""
    untouched: bool = True
    """Whether the input is what it was."""


def perform(comm: Communicator, call: Call) -> Outcome:
    """Does it, and catches what it raises."""
    send, recv, do = _prepare(comm, call)
    before = None if send is None else send.copy()
    entered = time.monotonic()
    try:
        info = do()
    except PCCLError as error:
        same = before is None or np.array_equal(send, before)
        failure = {"error": type(error).__name__, "text": str(error), "details": error.details}
        return Outcome(entered=entered, ended=time.monotonic(), untouched=same, **failure)
    ended = time.monotonic()
    in_place = recv is send
    untouched = in_place or before is None or np.array_equal(send, before)
    results = () if recv is None else tuple(_distinct(recv, call, comm))
    return Outcome(entered=entered, ended=ended, info=info, results=results, untouched=untouched)


def _distinct(recv: Any, call: Call, comm: Communicator) -> list[float]:
    if call.kind in ("all_gather", "gather", "all_to_all") and len(recv):
        return [float(value) for part in recv.reshape(comm.world_size, -1) for value in np.unique(part)]
    return [float(value) for value in np.unique(recv)]


def _prepare(comm: Communicator, call: Call) -> tuple[Any, Any, Callable[[], ReduceInfo]]:
    size, is_root = comm.world_size, comm.rank == call.root
    dtype = np.dtype(call.dtype)
    given: dict[str, Any] = {"tag": call.tag, "timeout": call.timeout}
    if call.kind not in FOLLOW_WORLD:
        given["retry"] = call.retry
    if call.kind in ("reduce", "broadcast", "gather", "scatter"):
        given["root"] = call.root
    if call.kind in ("all_reduce", "reduce", "reduce_scatter"):
        given["op"] = call.op
    if call.kind == "all_reduce" and call.algorithm is not QuantizationAlgorithm.NONE:
        given["quantization_options"] = QuantizationOptions(call.quantized, call.algorithm)
    send_times = size if call.kind in ("reduce_scatter", "all_to_all", "scatter") else 1
    recv_times = size if call.kind in ("all_gather", "all_to_all", "gather") else 1
    send: Any = np.full(send_times * call.count, call.value, dtype)
    recv: Any = np.full(recv_times * call.count, 0, dtype)
    name = call.kind + ("_async" if call.behind else "")
    method = getattr(comm, name)
    arguments: tuple[Any, ...]
    match call.kind:
        case "barrier":
            send = recv = None
            arguments = ()
        case "broadcast":
            recv = send
            arguments = (send,)
        case "scatter":
            send = send if is_root else None
            arguments = (send, recv)
        case "gather" | "reduce":
            recv = send if call.in_place and is_root else recv if is_root else None
            arguments = (send,) if recv is send else (send, recv)
        case _:
            recv = send if call.in_place else recv
            arguments = (send, recv)

    def do() -> ReduceInfo:
        done = method(*arguments, **given)
        return done.result() if call.behind else done

    return send, recv, do


def is_inside(comm: Communicator, tag: int = 0) -> bool:
    """Whether the peer has entered an operation of this tag, and not left it yet."""
    assert comm._connection is not None
    operations = comm._connection.membership.ledger.operations
    waiting = (OperationState.RUNNING, OperationState.PREPARED)
    return any(key[0] == tag and operation.state in waiting for key, operation in list(operations.items()))
