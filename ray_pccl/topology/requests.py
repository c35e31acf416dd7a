"""What is asked of a process that orders rings, and what it answers: msgpack, on its standard input and output."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ray_pccl.errors import PCCLError, SettingsError
from ray_pccl.topology.ordering import order_ring
from ray_pccl.topology.rings import NoRingError, RingOrder

LARGEST = 10_000
"""Peers: a matrix of more would not fit in memory several times."""


class Request(msgspec.Struct, frozen=True):
    """The arguments of `order_ring`; the matrix as float64 in little endian, row after row."""

    peers: int
    bandwidth: bytes
    hosts: list[int] | None
    budget_s: float
    seed: int
    start: list[int] | None


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A `RingOrder`, or the error that came instead: `error` is what it says, `edges` those of a `NoRingError`."""

    order: list[int] = []
    bottleneck: float = 0.0
    total: float = 0.0
    optimal: bool = False
    error: str | None = None
    edges: list[tuple[int, int]] | None = None


def asked(
    bandwidth: NDArray[np.float64],
    hosts: Sequence[int] | None,
    *,
    budget_s: float,
    seed: int,
    start: Sequence[int] | None,
) -> bytes:
    """The request for these arguments."""
    matrix = np.ascontiguousarray(bandwidth, dtype="<f8")
    request = Request(len(matrix), matrix.tobytes(), _listed(hosts), budget_s, seed, _listed(start))
    return msgspec.msgpack.encode(request)


def answered(request: bytes) -> bytes:
    """Does what is asked. Never raises for what the request holds: errors are answers too."""
    try:
        return msgspec.msgpack.encode(_ordered(request))
    except NoRingError as error:
        return msgspec.msgpack.encode(Answer(error=str(error), edges=list(error.edges)))
    except (PCCLError, msgspec.MsgspecError) as error:
        return msgspec.msgpack.encode(Answer(error=f"{type(error).__name__}: {error}"))


def told(answer: bytes) -> RingOrder:
    """The ring of the answer. Raises what it tells: `NoRingError`, or `SettingsError` for a request that was wrong."""
    read = msgspec.msgpack.decode(answer, type=Answer)
    if read.edges is not None:
        raise NoRingError(read.error or "", edges=tuple(read.edges))
    if read.error is not None:
        raise SettingsError(read.error)
    return RingOrder(tuple(read.order), read.bottleneck, read.total, read.optimal)


def _ordered(request: bytes) -> Answer:
    asked = msgspec.msgpack.decode(request, type=Request)
    if not 0 < asked.peers <= LARGEST or len(asked.bandwidth) != 8 * asked.peers**2:
        raise SettingsError(f"{asked.peers} peers and {len(asked.bandwidth)} bytes of bandwidth do not fit")
    if not math.isfinite(asked.budget_s):
        raise SettingsError(f"budget_s must be a number of seconds, not {asked.budget_s}")
    if asked.seed < 0:
        raise SettingsError(f"seed must not be negative, and is {asked.seed}")
    matrix = np.frombuffer(asked.bandwidth, dtype="<f8").reshape(asked.peers, asked.peers).astype(np.float64)
    ring = order_ring(matrix, asked.hosts, budget_s=asked.budget_s, seed=asked.seed, start=asked.start)
    return Answer(list(ring.order), ring.bottleneck, ring.total, ring.optimal)


def _listed(numbers: Sequence[int] | None) -> list[int] | None:
    return None if numbers is None else [int(number) for number in numbers]
