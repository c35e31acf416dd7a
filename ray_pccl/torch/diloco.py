"""DiLoCo: peers train alone for many steps, and then average how far each has come (arXiv 2311.08105, 2501.18512)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from ray_pccl.descriptors import DataType, QuantizationAlgorithm, QuantizationOptions, ReduceInfo, ReduceOp
from ray_pccl.errors import PCCLError, UsageError
from ray_pccl.peer.communicator import Communicator
from ray_pccl.peer.handles import Handle
from ray_pccl.ring import fault_points
from ray_pccl.torch.fragments import Fragments
from ray_pccl.torch.meeting import Meeting
from ray_pccl.torch.roll_call import RetryError, Row, Table

DILOCO_TAG = (1 << 30) + 1
"""The tag of DiLoCo's operations, unless it is given another."""
IN_BYTES = QuantizationOptions(DataType.UINT8, QuantizationAlgorithm.MIN_MAX)
"""A byte an element."""


@dataclass(frozen=True, slots=True)
class OuterInfo:
    """An outer step that has committed: the same on all members, but for the bytes."""

    step: int
    """Its number, from 1."""
    fragment: int
    """Which part of the parameters it was about."""
    contributors: tuple[str, ...]
    """The `peer_id` of everyone whose pseudo-gradient is in it, in rank order."""
    tx_bytes: int
    """Bytes that this peer handed to others for it."""


@dataclass(slots=True)
class _Flight:
    """An average that is under way."""

    fragment: int
    pseudo_gradient: torch.Tensor
    table: Table
    handle: Handle


def nesterov(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    """The outer optimiser of the papers: SGD with a rate of 0.7, and Nesterov momentum of 0.9."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


class DiLoCo:
    """Makes the inner steps of a peer, and the outer steps of all members alike.

    Every member has a copy of the *outer* parameters: the same bits on all. Each trains parameters of its own, with its
    own optimiser and data. What these have moved away from the outer ones after `sync_every` inner steps is its
    pseudo-gradient. The average of all is the gradient of an outer step; all go on from the outer parameters then.

    Args:
        communicator: Connected. Its shared state is DiLoCo's.
        model: The same architecture on all members.
        optimizer: The inner one. Its state is everyone's own.
        scheduler: Makes a step with each of the inner optimiser's.
        sync_every: Inner steps from one outer step of a parameter to its next.
        outer_optimizer: Makes the outer optimiser of a list of tensors.
        fragments: The parameters are averaged in so many parts, one after another, evenly spread over `sync_every`,
            which they divide: the same bytes, but never all at once.
        delay: A part's average may take so many inner steps, and runs behind them. Less than from one part to the next.
        mixing: How much of its own parameters a peer keeps in an outer step, from 0 (nothing) to below 1. With a delay,
            what it has learned meanwhile is not lost where that is more than 0; the paper has 0.5.
        quantization: What travels instead of the values; None for the values themselves.
        tag: Of its operations. Trainings that run at the same time need one each.

    The arguments are the same on all members. `join` comes before the first step.
    """

    def __init__(
        self,
        communicator: Communicator,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        *,
        sync_every: int,
        outer_optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer] = nesterov,
        fragments: int = 1,
        delay: int = 0,
        mixing: float = 0.0,
        quantization: QuantizationOptions | None = IN_BYTES,
        tag: int = DILOCO_TAG,
    ) -> None:
        self.communicator = communicator
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self._fragments = Fragments(
            [parameter for parameter in model.parameters() if parameter.requires_grad], fragments
        )
        self._every = _interval(sync_every, fragments, delay)
        if not 0 <= mixing < 1:
            raise UsageError(f"mixing is a number from 0 to below 1, not {mixing!r}")
        self._delay, self._mixing, self._quantization = delay, mixing, quantization
        self._outer = [self._fragments.read(number) for number in range(fragments)]
        self.outer_optimizer = outer_optimizer(self._outer)
        self._meeting = Meeting(
            communicator, tag, live=self._live, loose=self._loose, parts={"outer_optimizer": self.outer_optimizer}
        )
        arguments = repr((sync_every, fragments, delay, mixing, quantization))
        self._arguments = xxhash.xxh3_64_intdigest(arguments.encode())
        self._flight: _Flight | None = None

    @property
    def steps(self) -> int:
        """How many outer steps have committed."""
        return self._meeting.progress.steps

    @property
    def outer(self) -> tuple[torch.Tensor, ...]:
        """The outer parameters, a flat tensor a fragment: not to be changed."""
        return tuple(self._outer)

    def join(self) -> None:
        """Blocks until all members hold the same outer parameters, and begins with them; see `ElasticTrainer.join`.

        The inner optimiser keeps the state that it has. Gradients are None after it.
        """
        self._meeting.begin()
        self.optimizer.zero_grad(set_to_none=True)
        if self._flight is not None:
            with contextlib.suppress(PCCLError):
                self._flight.handle.result()  # its tag is in use until then
        self._flight = None
        self._meeting.settle()
        self._begin_from_outer()

    def step(self) -> OuterInfo | None:
        """Makes an inner step with this peer's own gradients, which are None after it; an outer one when it is due.

        Only with that it waits for others, and lets in who waits. If someone dies, the average is that of the others.
        An outer step is made on all survivors, or on none.

        Raises:
            UsageError: `join` was not called.
            StepMismatchError: On all: members have made different numbers of outer steps.
            TooFewPeersError, PeerEvictedError, OperationTimeoutError, MasterUnreachableError: As for all collectives.
        """
        self._meeting.require_ready()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None:
            self.scheduler.step()
        progress = self._meeting.progress
        progress.inner_steps += 1
        if progress.inner_steps == self._every:
            progress.inner_steps = 0
            self._start()
        if self._flight is not None and progress.inner_steps == self._delay:
            return self._land(self._flight)
        return None

    def finish(self) -> None:
        """Ends the training: completes the outer step that is under way, and gives the model the outer parameters.

        All members call it, after the same step. The model's parameters are the same on all of them then, bit for bit;
        its buffers (running averages of a batch norm) are everyone's own.
        """
        if self._flight is not None:
            self._land(self._flight, admits=False)
        self._begin_from_outer()

    # ------------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """All that a training needs to go on; an outer step that is under way is not in it."""
        parts = {name: part.state_dict() for name, part in self._meeting.parts.items()}
        own = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self.scheduler is not None:
            own["scheduler"] = self.scheduler.state_dict()
        return {**own, "outer": [flat.clone() for flat in self._outer], **parts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint, once `join` was called: if it is further than what any other member has."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        for flat, stored in zip(self._outer, state["outer"], strict=True):
            flat.detach().copy_(stored)
        for name, part in self._meeting.parts.items():
            part.load_state_dict(state[name])
        self._meeting.is_ready = False

    # -------------------------------------------------------------------------------------------- an outer step

    def _start(self) -> None:
        """Has the average of the next fragment begin."""
        fragment = self.steps % len(self._fragments)
        pseudo_gradient = self._outer[fragment].detach() - self._fragments.read(fragment)
        self._flight = self._launch(fragment, pseudo_gradient)

    def _launch(self, fragment: int, pseudo_gradient: torch.Tensor) -> _Flight:
        roll_call = self._meeting.roll_call
        while True:
            try:
                table = self._meeting.meet(
                    Row(
                        self.steps,
                        is_ready=True,
                        is_stepping=True,
                        sees_waiting=roll_call.sees_waiting,
                        pattern=self._arguments,
                    )
                )
            except RetryError:
                continue
            if all(row.is_stepping for row in table.values()):
                break  # else a newcomer was healed just now, and makes its first inner steps
        other = [peer for peer, row in table.items() if row.pattern != self._arguments]
        if other:
            raise UsageError(
                f"DiLoCo has other arguments on {', '.join(other)} than on {self.communicator.peer_id}: sync_every, "
                "fragments, delay, mixing and quantization have to be the same on all members"
            )
        handle = self.communicator.all_reduce_async(
            pseudo_gradient,
            op=ReduceOp.AVG,
            tag=roll_call.tag,
            quantization_options=self._quantization,
            retry=True,
        )
        return _Flight(fragment, pseudo_gradient, table, handle)

    def _land(self, flight: _Flight, *, admits: bool = True) -> OuterInfo:
        """Waits for the average, and makes the outer step with it."""
        while True:
            try:
                with self._meeting.roll_call.retrying():
                    info = flight.handle.result()
                break
            except RetryError:  # too few are left, and newcomers have to come first: what was sent is untouched
                flight = self._launch(flight.fragment, flight.pseudo_gradient)
        self._flight = None
        admits = admits and any(row.sees_waiting for row in flight.table.values())
        with self._meeting.updating(admits=admits):
            made = self._update(flight, info)
        if admits:
            self._meeting.admit()
        return made

    def _update(self, flight: _Flight, info: ReduceInfo) -> OuterInfo:
        fault_points.reach("training_committed")
        outer = self._outer[flight.fragment]
        outer.grad = flight.pseudo_gradient
        self.outer_optimizer.step()
        outer.grad = None
        values = outer.detach()
        if self._mixing:
            values = torch.lerp(values, self._fragments.read(flight.fragment), self._mixing)
        self._fragments.write(flight.fragment, values)
        self._meeting.progress.steps += 1
        return OuterInfo(self.steps, flight.fragment, tuple(info.contributors), info.tx_bytes)

    # ------------------------------------------------------------------------------------------- what is shared

    def _begin_from_outer(self) -> None:
        for number, flat in enumerate(self._outer):
            self._fragments.write(number, flat.detach())

    def _live(self) -> dict[str, torch.Tensor]:
        named = self.model.named_parameters()
        frozen = {f"frozen.{name}": parameter for name, parameter in named if not parameter.requires_grad}
        return {f"outer.{number}": flat for number, flat in enumerate(self._outer)} | frozen

    def _loose(self) -> dict[str, torch.Tensor]:
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        return {name: value for name, value in self.model.state_dict().items() if name not in parameters}


def _interval(sync_every: int, fragments: int, delay: int) -> int:
    """Inner steps from one outer step to the next."""
    for name, value, least in (("sync_every", sync_every, 1), ("delay", delay, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UsageError(f"{name} is a whole number from {least}, not {value!r}")
    if sync_every % fragments:
        raise UsageError(f"sync_every={sync_every} is not a multiple of fragments={fragments}")
    interval = sync_every // fragments
    if delay >= interval:
        raise UsageError(f"delay={delay} is not less than the {interval} inner steps from one fragment to the next")
    return interval
