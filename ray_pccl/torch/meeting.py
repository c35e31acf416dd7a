"""The members of a training come together: all with the same state, and as far as one another."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping

import torch

from ray_pccl.errors import OperationTimeoutError, PCCLError, StepMismatchError, UsageError
from ray_pccl.peer.communicator import Communicator
from ray_pccl.ring import fault_points
from ray_pccl.torch.healing import Healing
from ray_pccl.torch.loading import Stateful
from ray_pccl.torch.roll_call import RetryError, RollCall, Row, Table

log = logging.getLogger("ray_pccl.torch")


class Progress:
    """How far a training has come."""

    def __init__(self) -> None:
        self.steps = 0
        """Steps that have committed."""
        self.inner_steps = 0
        """Of DiLoCo: local ones since the last that all began together."""

    def state_dict(self) -> dict[str, int]:
        """For newcomers and checkpoints."""
        return {"steps": self.steps, "inner_steps": self.inner_steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on from there."""
        self.steps, self.inner_steps = state["steps"], state["inner_steps"]


class Meeting:
    """One peer's part in a training's roll calls, and in the healing of newcomers.

    Args:
        communicator: The group's.
        tag: Of the training's operations, all of which have the same: so a newcomer that was let in amid one of them
            meets it with its roll call, which is an error at once and tried again, and nobody waits in vain.
        live: Tensors by name that all members have, and that are written in place.
        loose: Those of which members may hold different contents: only newcomers get them.
        parts: All else that newcomers get, by name.
    """

    def __init__(
        self,
        communicator: Communicator,
        tag: int,
        *,
        live: Callable[[], Mapping[str, torch.Tensor]],
        loose: Callable[[], Mapping[str, torch.Tensor]],
        parts: Mapping[str, Stateful],
    ) -> None:
        self.progress = Progress()
        self.parts: dict[str, Stateful] = {**parts, "progress": self.progress}
        self.roll_call = RollCall(communicator, tag)
        self.is_ready = False
        """Whether this peer holds the group's state."""
        self._joined_as = ""
        self._healing = Healing(self.roll_call, live, loose, self.parts)

    def begin(self) -> None:
        """This peer is a newcomer, whatever it was before."""
        self.is_ready = False
        self._joined_as = self.roll_call.communicator.peer_id

    def require_ready(self) -> None:
        """Raises `UsageError` if this peer holds no state to make a step from, or one of before it connected again."""
        if not self.is_ready or self._joined_as != self.roll_call.communicator.peer_id:
            raise UsageError(
                "call join() before the first step, after an error that ended the last one, and after each connect()"
            )

    def settle(self) -> Table:
        """Returns when all members hold the same."""
        while True:
            began = time.monotonic()
            try:
                return self.meet(Row(self.progress.steps, self.is_ready))
            except RetryError:
                continue
            except OperationTimeoutError:
                # What ends at once for a newcomer are roll calls in which the others have waited for it in vain.
                patience_s = self.roll_call.communicator._settings.op_timeout_s
                if self.is_ready or time.monotonic() > began + patience_s / 2:
                    raise

    def meet(self, mine: Row) -> Table:
        """One roll call. Raises `RetryError` if some had to be healed first, or someone was lost in it.

        Raises:
            StepMismatchError: On all: some are further than others.
        """
        table = self.roll_call.take(mine)
        if not all(row.is_ready for row in table.values()):
            self._healing.heal(table)
            self.is_ready = True
            raise RetryError
        steps = {peer: row.step for peer, row in table.items()}
        if len(set(steps.values())) > 1:
            counts = ", ".join(f"{peer} {count}" for peer, count in steps.items())
            group = self.roll_call.communicator.peer_group
            raise StepMismatchError(f"members of group {group!r} have made different numbers of steps: {counts}: "
                                    "each has to call step() as often as the others", steps=steps)  # fmt: skip
        fault_points.reach("training_met")
        return table

    @contextlib.contextmanager
    def updating(self, *, admits: bool) -> Iterator[None]:
        """While this peer makes a step that has committed: if that fails, what it holds is no state to go on from.

        Who fails takes part in the vote that the others go on to, if they do, so that they need not wait for it.
        """
        self.is_ready = False
        try:
            yield
        except Exception:
            if admits:
                with contextlib.suppress(PCCLError):
                    self.roll_call.admit()
            raise
        self.is_ready = True

    def admit(self) -> Table | None:
        """Lets in who waits, and heals them. None, on all, if a newcomer did not come to its roll call in time."""
        self.roll_call.admit()
        try:
            return self.settle()
        except OperationTimeoutError as error:  # the step has been made: the next one waits for it once more
            log.warning("a newcomer was let in, and has not called join() yet: %s", error)
            return None
