"""What these tests have peers do, in the peers' own processes."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from ray_pccl import Communicator, PCCLError, SharedState, SharedStateSyncInfo, SharedStateSyncStrategy, TensorInfo
from ray_pccl.ring import fault_points

MIB = 1 << 20
_held: dict[str, SharedState] = {}


@dataclass(frozen=True, kw_only=True)
class Content:
    """A state, described so that it can be sent to a peer."""

    seed: int = 0
    revision: int = 0
    nbytes: int = MIB
    loose: float | None = None
    """What the tensor that may differ is full of, if there is one."""
    loose_bytes: int = 400
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a sync ended."""

    error: str = ""
    text: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    info: SharedStateSyncInfo | None = None
    before: str = ""
    after: str = ""
    """A digest of all that the peer holds."""
    revision: int = 0
    seconds: float = 0.0


def weights(seed: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(nbytes // 4, np.float32)


def hold(comm: Communicator, content: Content) -> str:
    """The peer holds this state from now on; its digest."""
    infos = [
        TensorInfo.from_numpy("weights", weights(content.seed, content.nbytes)),
        TensorInfo.from_numpy("bias", np.full(7, content.seed, np.float64)),
        *(TensorInfo(name, value) for name, value in content.more.items()),
    ]
    if content.loose is not None:
        infos.append(TensorInfo.from_numpy("own", np.full(content.loose_bytes // 4, content.loose, np.float32), True))
    _held["state"] = SharedState(infos, content.revision)
    return _digest()


def touch(comm: Communicator, name: str, index: int, value: float) -> str:
    """Changes one element."""
    _array(name).reshape(-1)[index] = value
    return _digest()


def values(comm: Communicator, name: str) -> list[float]:
    """All different ones."""
    return [float(each) for each in np.unique(_array(name))]


def value(comm: Communicator, name: str, index: int = 0) -> float:
    return float(_array(name).reshape(-1)[index])


def sync(comm: Communicator, strategy: str = "ENFORCE_POPULAR", step: int = 0, timeout: float | None = None) -> Outcome:
    """Synchronises what the peer holds, with `step` added to its revision first."""
    state = _held["state"]
    state.revision += step
    before, began = _digest(), time.monotonic()
    failed: dict[str, Any] = {}
    info = None
    try:
        info = comm.sync_shared_state(state, SharedStateSyncStrategy[strategy], timeout=timeout)
    except PCCLError as error:
        failed = {"error": type(error).__name__, "text": str(error), "details": error.details}
    seconds = time.monotonic() - began
    return Outcome(info=info, before=before, after=_digest(), revision=state.revision, seconds=seconds, **failed)


def strike(comm: Communicator, point: str, nth: int, what: str) -> None:
    """At the n-th time that this peer comes to a point: kill, stop, change a tensor, or raise an interrupt."""
    left = [nth]

    def reached(name: str) -> None:
        if name != point:
            return
        left[0] -= 1
        if left[0] != 0:
            return
        match what:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "change":
                _array("weights")[:] = 13
            case "interrupt":
                raise KeyboardInterrupt

    fault_points.install(reached)


def interrupted(comm: Communicator) -> str:
    """The name of what a sync raised, that is no error of ours."""
    try:
        comm.sync_shared_state(_held["state"])
    except BaseException as error:
        return type(error).__name__
    return ""


def sync_unreadable(comm: Communicator, strategy: str, step: int) -> Outcome:
    """Synchronises, once, where there is no memory to hash what the peer holds."""
    from ray_pccl.state import syncing

    right = syncing.digests_of

    def digests_of(*_: Any) -> Any:
        syncing.digests_of = right
        raise MemoryError

    syncing.digests_of = digests_of
    try:
        return sync(comm, strategy, step)
    except MemoryError:
        return Outcome(error="MemoryError")


def _array(name: str) -> Any:
    return next(info.tensor for info in _held["state"].infos if info.name == name)


def _digest() -> str:
    text = xxhash.xxh3_128()
    for info in _held["state"].infos:
        text.update(np.ascontiguousarray(info.load()))
    return text.hexdigest()


def sync_and_change(comm: Communicator, step: int) -> Outcome:
    """Synchronises, and changes everything as soon as that has returned."""
    outcome = sync(comm, step=step)
    _array("weights")[:] = 4
    return outcome


def sync_twice_at_once(comm: Communicator) -> str:
    """What a second call says while the first one waits for the others."""
    states = comm._operations().shared_states
    with states._busy:
        try:
            comm.sync_shared_state(_held["state"])
        except PCCLError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def misuse(comm: Communicator) -> list[str]:
    """The errors of calls that make no sense."""
    found = []
    for state, strategy in (({"w": np.zeros(3)}, None), (_held["state"], "ENFORCE_POPULAR")):
        try:
            comm.sync_shared_state(state, strategy)
        except PCCLError as error:
            found.append(type(error).__name__)
    _held["state"].revision = -3
    try:
        comm.sync_shared_state(_held["state"])
    except PCCLError as error:
        found.append(type(error).__name__)
    return found
