"""One peer process: calls what the workload says, step by step, and writes down what each call gave it."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ray_pccl.control.endpoint import Endpoint
from ray_pccl.descriptors import (
    DataType,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceDescriptor,
    ReduceInfo,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
)
from ray_pccl.errors import NotConnectedError, PCCLError, PeerEvictedError
from ray_pccl.peer.communicator import Communicator
from ray_pccl.ring import fault_points
from ray_pccl.settings import Settings
from tests.chaos import bugs
from tests.chaos.board import POINTS, Action, Board, State, Word
from tests.chaos.workload import SYNC_TAG, Call, Step, contribution, decode, plan

LOOK_FOR_NEWCOMERS_EVERY = 3
OP_TIMEOUT_S = 25.0
DELAY_S = 0.15
"""Longer than a recovery takes."""
STEPS_A_LAUNCH = 1_000_000
_QUANTISED = QuantizationOptions(DataType.UINT8, QuantizationAlgorithm.MIN_MAX)
_DATATYPES = {
    "float32": DataType.FLOAT,
    "float64": DataType.DOUBLE,
    "int32": DataType.INT32,
    "int64": DataType.INT64,
}


@dataclass(frozen=True)
class Config:
    """What a peer is started with."""

    name: str
    directory: str
    endpoint: str
    transport: str
    seed: int
    launch: int
    """The how manieth of its arena: later ones begin at higher steps."""
    slot: int
    bug: str = ""


class Peer:
    """A communicator, and what its process does with it."""

    def __init__(self, config: Config) -> None:
        self._config = config
        base = Path(config.directory) / config.name
        self._board = Board(base.with_suffix(".board"))
        self._log = os.open(base.with_suffix(".jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        settings = Settings.from_env(op_timeout_s=OP_TIMEOUT_S, last_call_s=0.3)
        self._delegates = config.transport == "gloo"
        backend = "gloo" if self._delegates else "ring"
        self._communicator = Communicator(
            "chaos", master=Endpoint.parse(config.endpoint), settings=settings, backend=backend
        )
        self._chance = random.Random(f"{config.seed}/{config.name}")

    # -------------------------------------------------------------------------------------------------- its life

    def live(self) -> None:
        """Joins, and goes on until it is put out, or killed."""
        fault_points.install(self._strike)
        self._communicator.connect(timeout=60.0)
        self._write(peer=self._communicator.peer_id, slot=self._config.slot)
        threading.Thread(target=self._cut_when_told, daemon=True).start()
        step = self._agree_on_step(self._config.launch * STEPS_A_LAUNCH)
        self._board[Word.STATE] = State.MEMBER
        while True:
            self._board[Word.STEP] = step
            self._board[Word.EPOCH] = self._communicator.epoch
            self._run(plan(self._config.seed, step, quantises=not self._delegates))
            step += 1
            if step % LOOK_FOR_NEWCOMERS_EVERY == 0 and self._communicator.are_peers_pending():
                self._communicator.update_topology()
                step = self._agree_on_step(step)

    def _agree_on_step(self, step: int) -> int:
        """Newcomers learn where the others are; all go on from the highest step."""
        steps = np.array([step], np.int64)
        with self._in_call():
            self._communicator.all_reduce(steps, op=ReduceOp.MAX, tag=SYNC_TAG)
        self._board[Word.PROGRESS] += 1
        return int(steps[0])

    def _run(self, step: Step) -> None:
        if step.way == "blocking":
            self._blocking(step.calls[0])
        elif step.way == "async":
            self._in_flight(step)
        else:
            self._many(step)

    # -------------------------------------------------------------------------------------------- its operations

    def _blocking(self, call: Call) -> None:
        given = _Tensors(call, self._config.slot)
        self._outcome(call, given, lambda: self._call(call, given))

    def _call(self, call: Call, given: _Tensors) -> ReduceInfo:
        communicator, retry = self._communicator, call.retry
        if call.kind == "barrier":
            return communicator.barrier(retry=retry)
        if call.kind == "broadcast":
            return communicator.broadcast(given.send, root=call.root, retry=retry)
        if call.kind == "reduce":
            return communicator.reduce(given.send, given.recv, root=call.root, retry=retry)
        options = _QUANTISED if call.quantised else None
        return communicator.all_reduce(given.send, given.recv, quantization_options=options, retry=retry)

    def _outcome(self, call: Call, given: _Tensors, operation: Callable[[], ReduceInfo]) -> None:
        try:
            with self._in_call():
                info = operation()
        except PCCLError as error:
            self._failed(call, given, error)
        else:
            self._returned(call, given, info.contributors, info.world_size)

    def _in_flight(self, step: Step) -> None:
        options = _QUANTISED if step.calls[0].quantised else None
        tensors = [_Tensors(call, self._config.slot) for call in step.calls]
        order = list(zip(step.calls, tensors, strict=True))
        self._chance.shuffle(order)  # they pair by tag, in any order of launch
        with self._in_call():
            handles = [
                self._communicator.all_reduce_async(
                    given.send, given.recv, tag=1 + call.index, quantization_options=options, retry=call.retry
                )
                for call, given in order
            ]
            for handle in handles:
                handle.wait()
        for (call, given), handle in zip(order, handles, strict=True):
            self._outcome(call, given, handle.result)

    def _many(self, step: Step) -> None:
        tensors = [_Tensors(call, self._config.slot) for call in step.calls]
        descriptors = []
        for call, given in zip(step.calls, tensors, strict=True):
            datatype = _DATATYPES[call.dtype]
            options = _QUANTISED if call.quantised else QuantizationOptions()
            operand = ReduceOperandDescriptor(datatype)
            what = ReduceDescriptor(call.count, ReduceOp.SUM, 1 + call.index, operand, options)
            recv = given.send if given.recv is None else given.recv
            descriptors.append(ReduceOpDescriptor.from_numpy(given.send, recv, what))
        try:
            with self._in_call():
                self._communicator.all_reduce_multiple_with_retry(descriptors, max_in_flight=8)
        except PCCLError as error:
            # Which of them committed is not known: only the error counts.
            self._failed(step.calls[0], None, error)
            return
        for call, given in zip(step.calls, tensors, strict=True):
            self._returned(call, given, None, None)  # the info sums all of them up

    # ------------------------------------------------------------------------------------------ what it writes down

    def _returned(self, call: Call, given: _Tensors, contributors: Any, world_size: int | None) -> None:
        record: dict[str, Any] = {"op": call.key, "kind": call.kind, "in_place": call.in_place}
        record |= {"contributors": list(contributors) if contributors is not None else None, "world_size": world_size}
        result = given.result
        if call.kind == "reduce":
            untouched = np.array_equal(given.send, given.input) if given.recv is None else not given.recv.any()
            result = None if untouched else result  # only the root has one
        if result is not None:
            found = decode(call, result)
            record |= {"digest": zlib.crc32(result), "decoded": list(found.slots), "garbled": found.garbled}
        self._write(**record, intact=given.intact(returned=True))
        self._board[Word.PROGRESS] += 1

    def _failed(self, call: Call, given: _Tensors | None, error: PCCLError) -> None:
        intact = given is None or given.intact(returned=False)
        self._write(op=call.key, kind=call.kind, error=type(error).__name__, text=str(error)[:300], intact=intact)
        self._board[Word.PROGRESS] += 1
        if isinstance(error, (PeerEvictedError, NotConnectedError)):
            raise error

    def _write(self, **record: Any) -> None:
        record |= {"at": round(time.monotonic(), 4), "epoch": self._epoch()}
        os.write(self._log, json.dumps(record).encode() + b"\n")

    def _epoch(self) -> int:
        try:
            return self._communicator.epoch
        except PCCLError:
            return 0

    def ended(self, error: BaseException) -> None:
        """It is no member any more, or something is wrong."""
        self._write(ended=type(error).__name__, text=str(error)[:500])
        self._board[Word.STATE] = State.ENDED

    # ------------------------------------------------------------------------------------------- what befalls it

    @contextlib.contextmanager
    def _in_call(self) -> Iterator[None]:
        self._board[Word.IN_CALL] += 1
        try:
            yield
        finally:
            self._board[Word.IN_CALL] -= 1

    def _strike(self, name: str) -> None:
        match self._board.visit(POINTS.index(name)):
            case Action.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Action.STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
            case Action.CUT:
                self._cut()
            case Action.DELAY:
                time.sleep(DELAY_S)

    def _cut_when_told(self) -> None:
        done = 0
        while True:
            if done < self._board[Word.CUTS]:
                done += 1
                self._cut()
            time.sleep(0.005)

    def _cut(self) -> None:
        """Breaks the link to another member, or all of Gloo's, in the middle of whatever is on it."""
        running = self._communicator._running
        if running is not None and self._delegates and self._chance.random() < 0.5:
            delegate = running._plane._delegate
            session = None if delegate is None else delegate._session
            if session is not None:
                self._write(cut_library=True)
                session._group.abort()
            return
        links = list(running._plane._mesh._links) if running is not None else []
        if links:
            link = self._chance.choice(links)
            self._write(cut=link.peer_id)
            with contextlib.suppress(OSError):
                link.sock.shutdown(socket.SHUT_RDWR)


class _Tensors:
    """The tensors of one call, and what was in them."""

    def __init__(self, call: Call, slot: int) -> None:
        self._call = call
        self.input = contribution(call, slot)
        self.send = self.input.copy()
        in_place = call.in_place or call.kind in ("broadcast", "barrier")
        self.recv = None if in_place else np.zeros(call.count, call.dtype)
        self.result = None if call.kind == "barrier" else self.send if self.recv is None else self.recv

    def intact(self, *, returned: bool) -> bool:
        """Whether the input is what it was; where it is an output as well, only an error promises that."""
        if self._call.kind == "broadcast" or (returned and self.recv is None):
            return True
        return bool(np.array_equal(self.send, self.input))


def main(config: Config) -> int:
    """The program: 0 if the peer was put out, 1 if something went wrong that should not."""
    base = Path(config.directory) / config.name
    said = base.with_suffix(".log").open("w")
    os.dup2(said.fileno(), 1)
    os.dup2(said.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, file=said, all_threads=True)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s.%(msecs)03d %(name)s %(message)s")
    os.environ["RAY_PCCL_TRANSPORT"] = "auto" if config.transport == "gloo" else config.transport
    bugs.plant(config.bug)
    peer = Peer(config)
    try:
        peer.live()
    except (PeerEvictedError, NotConnectedError) as error:
        peer.ended(error)
        return 0
    except BaseException as error:
        traceback.print_exc()
        peer.ended(error)
    return 1
