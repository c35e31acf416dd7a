"""Which samples a peer trains on: a pure function of what was committed, the same on all members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ray_pccl.errors import UsageError


class ElasticSampler:
    """Hands out every sample exactly once an epoch, whoever comes or dies meanwhile.

    The samples of all epochs are one endless row: epoch after epoch, each in an order of its own, drawn from the seed.
    A sample's place in the row is its *position*. Before each step every member is assigned the next `batch_size`
    positions of the row, so all batches are equally large, and one may reach over the end of an epoch. What was
    assigned to a member whose gradients are in a committed step has been used. What was assigned to one that died goes
    back, and is assigned again before anything new is.

    Args:
        size: How many samples there are; they are numbered from 0.
        batch_size: How many a member gets for a step.
        seed: What the orders are drawn from.
        shuffle: Without it every epoch is in order.

    All four are the same on all members.
    """

    def __init__(self, size: int, batch_size: int, *, seed: int = 0, shuffle: bool = True) -> None:
        for name, value in (("size", size), ("batch_size", batch_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"{name} of an ElasticSampler is a whole number from 1, not {value!r}")
        self.size = size
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self._next = 0
        """The first position that was never assigned."""
        self._returned: list[int] = []
        """Positions that came back, lowest first."""
        self._assigned: dict[str, list[int]] = {}
        self._orders: dict[int, torch.Tensor] = {}
        self._peer_id = ""
        self._drawn = False

    @property
    def epoch(self) -> int:
        """The epoch of the first sample that is not used yet: all samples of those before it were used once each."""
        outstanding = [self._next, *self._returned[:1], *(positions[0] for positions in self._assigned.values())]
        return min(outstanding) // self.size

    @property
    def used(self) -> int:
        """How many samples were used in committed steps, over all epochs."""
        return self._next - len(self._returned) - sum(map(len, self._assigned.values()))

    @property
    def drawn(self) -> bool:
        """Whether `next_batch` was called since the last commit."""
        return self._drawn

    def next_batch(self) -> torch.Tensor:
        """This peer's samples for the next step: the same until a step commits, however often it is called.

        For gradients that are accumulated over several backward passes, ``split`` it.
        """
        if self._peer_id not in self._assigned:
            raise UsageError("this sampler has nothing to hand out before it is given to an ElasticTrainer")
        self._drawn = True
        return self.indices(self._assigned[self._peer_id])

    def indices(self, positions: Sequence[int]) -> torch.Tensor:
        """The samples at these positions."""
        places = torch.tensor(positions)
        epochs = places // self.size
        found = torch.empty_like(places)
        for epoch in sorted(set(epochs.tolist())):
            chosen = epochs == epoch
            found[chosen] = self._order(epoch)[places[chosen] % self.size]
        return found

    # ------------------------------------------------------------------------------- what a trainer tells it

    def bind(self, peer_id: str) -> None:
        """Whose batches `next_batch` returns. None was drawn yet."""
        self._peer_id = peer_id
        self._drawn = False

    def assigned(self, peer_id: str) -> tuple[int, ...]:
        """The positions that a member has for the next step."""
        return tuple(self._assigned.get(peer_id, ()))

    def assign(self, members: Sequence[str]) -> None:
        """Sees to it that exactly these have a batch. Who has one keeps it; those of others go back."""
        gone = [peer for peer in self._assigned if peer not in members]
        self._returned = sorted(self._returned + [place for peer in gone for place in self._assigned.pop(peer)])
        for peer in members:
            if peer not in self._assigned:
                again, self._returned = self._returned[: self.batch_size], self._returned[self.batch_size :]
                more = self.batch_size - len(again)
                self._assigned[peer] = [*again, *range(self._next, self._next + more)]
                self._next += more

    def commit(self, contributors: Sequence[str]) -> None:
        """A step has committed with the gradients of these: their samples are used. All get new ones."""
        for peer in contributors:
            self._assigned.pop(peer, None)
        self._drawn = False
        self.assign(contributors)
        for epoch in [epoch for epoch in self._orders if epoch < self.epoch]:
            del self._orders[epoch]

    def state_dict(self) -> dict[str, Any]:
        """What a newcomer, or a checkpoint, needs."""
        return {
            "size": self.size,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "next": self._next,
            "returned": list(self._returned),
            "assigned": {peer: list(positions) for peer, positions in self._assigned.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there; `UsageError` if it is of a sampler with other arguments."""
        for name in ("size", "batch_size", "seed", "shuffle"):
            if state[name] != getattr(self, name):
                raise UsageError(
                    f"this ElasticSampler has {name}={getattr(self, name)!r}, the state that it is to go on from "
                    f"{name}={state[name]!r}: make it with the same arguments on all members"
                )
        self._next = state["next"]
        self._returned = list(state["returned"])
        self._assigned = {peer: list(positions) for peer, positions in state["assigned"].items()}

    def _order(self, epoch: int) -> torch.Tensor:
        order = self._orders.get(epoch)
        if order is None:
            order = torch.arange(self.size)
            if self.shuffle:
                generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % (1 << 63))
                order = torch.randperm(self.size, generator=generator)
            self._orders[epoch] = order
        return order
