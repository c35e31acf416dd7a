"""Data-parallel training that goes on while peers come and go: each step commits on all members, or on none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ray_pccl.descriptors import ReduceInfo, ReduceOp
from ray_pccl.errors import UsageError
from ray_pccl.peer.communicator import Communicator
from ray_pccl.ring import fault_points
from ray_pccl.torch.buffers import Buffers
from ray_pccl.torch.gradients import Gradients, Present
from ray_pccl.torch.loading import Stateful
from ray_pccl.torch.meeting import Meeting
from ray_pccl.torch.roll_call import RetryError, Row, Table
from ray_pccl.torch.sampling import ElasticSampler

TRAINING_TAG = 1 << 30
"""The tag of a trainer's operations, unless it is given another."""


@dataclass(frozen=True, slots=True)
class StepInfo:
    """A step that has committed: the same on all members."""

    step: int
    """Its number, from 1."""
    contributors: tuple[str, ...]
    """The `peer_id` of everyone whose gradients are in it, in rank order."""
    weight: float
    """The sum of the contributors' weights: with a sampler, the number of samples."""
    loss: float
    """The contributors' losses, averaged by their weights; NaN if they gave none."""
    attempts: int
    """How often it was begun: more than once if someone died, or came, in it."""


class ElasticTrainer:
    """Makes the steps of a training on all members of a group alike.

    Args:
        communicator: Connected. Its shared state is the trainer's.
        model: The same architecture on all members. Its weights need not be.
        optimizer: Of the model's parameters.
        scheduler: Makes a step with each of the optimiser's.
        sampler: Tells each member which samples are its own.
        before_update: Called between the averaging and the optimiser's step, to clip gradients for instance.
        others: More that newcomers shall get: whatever has `state_dict` and `load_state_dict`.
        share_buffers: With each step all take over the buffers (running averages of a batch norm) of the lowest rank.
        tag: Of its operations. Trainers that run at the same time need one each.

    `join` comes before the first batch, `step` after each backward pass. All members hold the same bits after each.
    """

    def __init__(
        self,
        communicator: Communicator,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        sampler: ElasticSampler | None = None,
        *,
        before_update: Callable[[], object] | None = None,
        others: Mapping[str, Stateful] | None = None,
        share_buffers: bool = True,
        tag: int = TRAINING_TAG,
    ) -> None:
        self.communicator = communicator
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.sampler = sampler
        self._before_update = before_update
        self._gradients = Gradients(optimizer, model)
        self._buffers = Buffers(model) if share_buffers else None
        taken = {"model", "optimizer", "scheduler", "sampler", "progress"} & set(others or {})
        if taken:
            raise UsageError(f"others has {', '.join(sorted(taken))}, which the trainer has itself: use other names")
        given = {"optimizer": optimizer, "scheduler": scheduler, "sampler": sampler, **(others or {})}
        parts: dict[str, Stateful] = {name: part for name, part in given.items() if part is not None}
        self._meeting = Meeting(communicator, tag, live=model.state_dict, loose=dict, parts=parts)

    @property
    def steps(self) -> int:
        """How many steps have committed."""
        return self._meeting.progress.steps

    def join(self) -> None:
        """Blocks until this peer and all other members hold the same state; all begin with it.

        In a group that trains already this peer is a newcomer: the others let it in with their next step, and it is
        given all that they hold, bit for bit. In a new one all begin with the state of whoever has made the most steps
        (see `load_state_dict`), of several the lowest rank.

        Gradients are None after it. To be called again after a `PeerEvictedError`, or any error of `before_update` or
        of the optimiser, and whenever the communicator has connected again.
        """
        self._meeting.begin()
        self.optimizer.zero_grad(set_to_none=True)  # of a state that is replaced
        if self.sampler is not None:
            self.sampler.bind(self.communicator.peer_id)
        self._assign(self._meeting.settle())

    def step(self, loss: torch.Tensor | float | None = None, *, weight: float | None = None) -> StepInfo:
        """Averages all members' gradients, and makes the optimiser's step with them: on all survivors, or on none.

        After it gradients are None, scheduler and sampler have gone on, and who waited is in.

        Args:
            loss: This peer's, if `StepInfo.loss` is to be all contributors'.
            weight: How much this peer's gradients count in the average: the number of samples that they are the mean
                of. With a sampler, the size of its batch if not given; else 1.

        A parameter that has a gradient on some members only has zeros on the others; one that has none on any has
        none after it. If someone dies in it, all is averaged anew without: what counts are the contributors.

        Raises:
            UsageError: `join` was not called; no batch was drawn from the sampler; a gradient is sparse. Only here: the
                others wait for this peer, until it calls again, leaves, or ``op_timeout_s`` is over.
            StepMismatchError: On all: members have made different numbers of steps.
            TooFewPeersError: The group fell below its minimum, and no newcomer came in time.
            PeerEvictedError, OperationTimeoutError, MasterUnreachableError: As for all collectives. If `steps` is what
                it was, nothing has changed: gradients are what they were, and step() may be called again. If it is one
                more, the step was made, and the error came of letting in who waited: go on with the next batch.

        A newcomer that was let in is waited for: in this step, and if it has not called `join` within ``op_timeout_s``
        in the next one as long, which raises `OperationTimeoutError` then.
        """
        self._require_batch()
        present = self._gradients.present()
        mine = Row(
            step=self.steps,
            is_ready=True,
            is_stepping=True,
            sees_waiting=self._meeting.roll_call.sees_waiting,
            pattern=self._gradients.pattern(present),
            weight=self._weight(weight),
            loss=_number(loss),
        )
        attempts = 0
        while True:
            attempts += 1
            try:
                table = self._meeting.meet(mine)
                self._assign(table)
                if not all(row.is_stepping for row in table.values()):
                    continue  # a newcomer was healed just now, and works on its first gradients
                anywhere = self._reduce(table, present)
                break
            except RetryError:
                continue
        info = self._committed(table, attempts)
        admits = any(row.sees_waiting for row in table.values())
        with self._meeting.updating(admits=admits):
            self._update(anywhere, info)
        if admits and (settled := self._meeting.admit()) is not None:
            self._assign(settled)
        return info

    # ------------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """All that a training needs to go on: of the model, the optimiser and the rest, and the number of steps."""
        parts = {name: part.state_dict() for name, part in self._meeting.parts.items()}
        return {"model": self.model.state_dict(), **parts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint, once `join` was called: if it is further than what any other member has."""
        self.model.load_state_dict(state["model"])
        for name, part in self._meeting.parts.items():
            part.load_state_dict(state[name])
        self._meeting.is_ready = False

    # ------------------------------------------------------------------------------------------- all together

    def _assign(self, table: Table) -> None:
        if self.sampler is not None:
            self.sampler.assign(tuple(table))

    def _reduce(self, table: Table, present: Present) -> Present:
        """The average, in the flat tensors, of exactly those that are in the table; which parameters have one."""
        roll_call, comm = self._meeting.roll_call, self.communicator
        infos: list[ReduceInfo | None] = []
        with roll_call.retrying():
            if len({row.pattern for row in table.values()}) > 1:
                present = present.copy()
                infos.append(comm.all_reduce(present, op=ReduceOp.MAX, tag=roll_call.tag))
            weights = {row.weight for row in table.values()}
            is_even = len(weights) == 1
            scale = 1.0 if is_even else table[comm.peer_id].weight / sum(row.weight for row in table.values())
            for flat in self._gradients.pack(present, scale):
                fault_points.reach("training_reducing")
                infos.append(comm.all_reduce(flat, op=ReduceOp.AVG if is_even else ReduceOp.SUM, tag=roll_call.tag))
            if self._buffers is not None:
                infos.append(self._buffers.spread(roll_call, is_source=comm.peer_id == next(iter(table))))
        if any(tuple(info.contributors) != tuple(table) for info in infos if info is not None):
            raise RetryError  # someone died between two of them: not all parameters would have the same contributors
        return present

    # --------------------------------------------------------------------------------------------- each for itself

    def _committed(self, table: Table, attempts: int) -> StepInfo:
        weight = sum(row.weight for row in table.values())
        loss = sum(row.loss * row.weight for row in table.values()) / weight
        return StepInfo(self.steps + 1, tuple(table), weight, loss, attempts)

    def _update(self, anywhere: Present, info: StepInfo) -> None:
        fault_points.reach("training_committed")
        self._gradients.unpack(anywhere)
        if self._buffers is not None:
            self._buffers.take_over()
        if self._before_update is not None:
            self._before_update()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(info.loss)
        elif self.scheduler is not None:
            self.scheduler.step()
        if self.sampler is not None:
            self.sampler.commit(info.contributors)
        self._meeting.progress.steps = info.step

    def _require_batch(self) -> None:
        self._meeting.require_ready()
        if self.sampler is not None and not self.sampler.drawn:
            raise UsageError("no batch was drawn for this step: call sampler.next_batch() before each step")

    def _weight(self, given: float | None) -> float:
        weight = (self.sampler.batch_size if self.sampler is not None else 1) if given is None else given
        if not 0 < weight < math.inf:
            raise UsageError(f"the weight of a peer's gradients is a number above 0, not {weight!r}")
        return float(weight)


def _number(loss: torch.Tensor | float | None) -> float:
    if loss is None:
        return math.nan
    return float(loss.detach()) if isinstance(loss, torch.Tensor) else float(loss)
