"""Newcomers get all that the others hold, tensors and Python values alike, bit for bit, before their first step.

A shared state has the same tensors on all members, and a newcomer's optimiser has none yet. So the members first agree
on the *skeleton* of the state: bytes that hold every value that is no tensor, and type and shape of every tensor. Who
lacks it makes tensors that fit. Then all of it, the skeleton included, is synchronised at once: so whoever dies, a
newcomer holds either all of one member's state or nothing of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from ray_pccl.descriptors import ReduceOp
from ray_pccl.errors import NoUpToDatePeerError, RevisionError, SharedStateMismatchError
from ray_pccl.state.rows import SharedStateSyncStrategy
from ray_pccl.state.sharing import SharedState
from ray_pccl.state.tensors import TensorInfo
from ray_pccl.torch.loading import Stateful, load_exactly
from ray_pccl.torch.roll_call import RetryError, RollCall, Table
from ray_pccl.torch.state_trees import assemble, blanks, dismantle

log = logging.getLogger("ray_pccl.torch")


@dataclass(frozen=True, slots=True)
class _Offer:
    length: int
    digest: int


class Healing:
    """What a training shares, and how it reaches who lacks it.

    Args:
        roll_call: The group's.
        live: Tensors by name that all members have: they are written in place.
        loose: Those of which members may hold different contents: only newcomers get them.
        parts: All else.
    """

    def __init__(
        self,
        roll_call: RollCall,
        live: Callable[[], Mapping[str, torch.Tensor]],
        loose: Callable[[], Mapping[str, torch.Tensor]],
        parts: Mapping[str, Stateful],
    ) -> None:
        self._roll_call = roll_call
        self._live = live
        self._loose = loose
        self._parts = parts
        self._revision = 0

    def heal(self, table: Table) -> None:
        """Brings who is not ready to the state of those that are; if nobody is, all to that of the furthest.

        All members call it with the same table. Raises `RetryError` if it has to begin again, with a roll call.
        """
        skeleton, tensors = self._dismantled()
        mine = _Offer(len(skeleton), xxhash.xxh3_64_intdigest(skeleton) >> 1)
        chosen, offers = self._choose(table, mine)
        due = offers[chosen]
        is_holder = mine == due
        if not all(offer == due for offer in offers.values()):
            skeleton = self._spread(skeleton if is_holder else b"", due)
        values = np.frombuffer(skeleton, np.uint8).copy() if is_holder else np.zeros(due.length, np.uint8)
        if not is_holder:
            tensors = blanks(skeleton)
        updated = self._sync(values, tensors, table, chosen, is_holder=is_holder)
        skeleton = values.tobytes()
        if xxhash.xxh3_64_intdigest(skeleton) >> 1 != due.digest:
            log.warning("all who held the state of the training died before newcomers had it: it begins anew")
            raise RetryError
        if not is_holder or any(not name.startswith("live.") for name in updated):
            for name, state in assemble(skeleton, tensors).items():
                load_exactly(name, self._parts[name], state)

    def _dismantled(self) -> tuple[bytes, list[torch.Tensor]]:
        return dismantle({name: part.state_dict() for name, part in self._parts.items()})

    def _choose(self, table: Table, mine: _Offer) -> tuple[str, dict[str, _Offer]]:
        """Whose skeleton counts, and what everyone has."""
        sent = np.array([mine.length, mine.digest])
        theirs = np.empty((len(table), 2), sent.dtype)
        comm = self._roll_call.communicator
        with self._roll_call.retrying():
            info = comm.all_gather(sent, theirs, tag=self._roll_call.tag)
        if tuple(info.contributors) != tuple(table):
            raise RetryError
        ready = [peer for peer, row in table.items() if row.is_ready]
        furthest = max(row.step for row in table.values())
        sources = ready or [peer for peer, row in table.items() if row.step == furthest]
        return sources[0], {peer: _Offer(*row) for peer, row in zip(table, theirs.tolist(), strict=True)}

    def _spread(self, skeleton: bytes, due: _Offer) -> bytes:
        """The skeleton, from all who hold it: the largest of equal bytes and zeros."""
        text = np.zeros(due.length, np.uint8)
        text[: len(skeleton)] = np.frombuffer(skeleton, np.uint8)
        with self._roll_call.retrying():
            self._roll_call.communicator.all_reduce(text, op=ReduceOp.MAX, tag=self._roll_call.tag)
        spread = text.tobytes()
        if xxhash.xxh3_64_intdigest(spread) >> 1 != due.digest:  # whoever held it has died
            raise RetryError
        return spread

    def _sync(
        self, values: Any, tensors: list[torch.Tensor], table: Table, chosen: str, *, is_holder: bool
    ) -> tuple[str, ...]:
        comm = self._roll_call.communicator
        infos = [TensorInfo(f"values of {', '.join(sorted(self._parts))}", values)]  # so others' are a mismatch
        infos += [TensorInfo(f"part.{number}", tensor) for number, tensor in enumerate(tensors)]
        infos += [TensorInfo(f"live.{name}", tensor) for name, tensor in self._live().items()]
        infos += [
            TensorInfo(f"live.loose.{name}", tensor, allow_content_inequality=True)
            for name, tensor in self._loose().items()
        ]
        strategy = SharedStateSyncStrategy.ENFORCE_POPULAR
        is_source = table[comm.peer_id].is_ready and is_holder
        is_new_group = not any(row.is_ready for row in table.values())
        if is_new_group:
            is_source = comm.peer_id == chosen
            strategy = SharedStateSyncStrategy.SEND_ONLY if is_source else SharedStateSyncStrategy.RECEIVE_ONLY
        state = SharedState(infos, revision=self._revision + 1 if is_source else 0)
        try:
            with self._roll_call.retrying():
                # Under our tag: who is let in below the minimum meets it with a roll call, and nobody waits in vain.
                info = comm._operations().shared_states.sync(state, strategy, tag=self._roll_call.tag)
        except NoUpToDatePeerError as error:
            raise RetryError from error
        except SharedStateMismatchError as error:
            if is_new_group or not is_source:
                raise
            # A newcomer that does not fit is told so, and leaves: that is no reason for the others to stop.
            log.warning("group %r: a newcomer does not fit: %s", comm.peer_group, error)
            raise RetryError from error
        except RevisionError as error:  # the communicator was used for other syncs before
            self._revision = error.expected - 1
            raise RetryError from error
        self._revision = info.revision
        return info.updated
