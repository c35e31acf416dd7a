"""The state that a user shares: tensors under names, and a revision."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ray_pccl.errors import UsageError
from ray_pccl.state.tensors import TensorInfo

_LARGEST = (1 << 62) - 1


@dataclass(frozen=True, slots=True)
class SharedStateSyncInfo:
    """What a sync moved."""

    tx_bytes: int
    """Bytes of tensors that this member sent to others."""
    rx_bytes: int
    """Bytes of tensors that it received: 0 where its content was the one that won."""
    revision: int
    """The revision that all members hold now."""
    updated: tuple[str, ...]
    """The names of the tensors that were replaced here."""


class SharedState:
    """What all members of a group hold alike, for `Communicator.sync_shared_state`.

    Args:
        tensors: Tensors by name, or a list of `TensorInfo`. Their order does not matter.
        revision: The number of this content. It grows by exactly one with each sync of the group; the first sync may
            begin anywhere. A sync sets it to the group's.

    Raises:
        UsageError: Something that is no tensor, or can't be written to; two of one name.
    """

    def __init__(self, tensors: Mapping[str, Any] | Iterable[TensorInfo], revision: int = 0) -> None:
        if isinstance(tensors, Mapping):
            infos = [
                value if isinstance(value, TensorInfo) else TensorInfo(name, value) for name, value in tensors.items()
            ]
        else:
            infos = list(tensors)
        for info in infos:
            if not isinstance(info, TensorInfo):
                raise UsageError(f"a SharedState is made of a dict of tensors, or of TensorInfos, not of {info!r}")
        self.infos: tuple[TensorInfo, ...] = tuple(sorted(infos, key=lambda info: info.name))
        """The tensors, by name."""
        names = [info.name for info in self.infos]
        twice = next((name for name, other in itertools.pairwise(names) if name == other), None)
        if twice is not None:
            raise UsageError(f"two tensors of a shared state are called {twice!r}")
        self.revision = revision
        check_revision(revision)

    @classmethod
    def from_state_dict(
        cls, model: Any = None, optimizer: Any = None, *, revision: int = 0, **others: Any
    ) -> SharedState:
        """The state of a torch model and its optimiser, or of any nests of tensors and numbers, under readable names.

        Args:
            model: A module (its parameters and buffers), or a state dict.
            optimizer: An optimiser, or a state dict. One that has not made a step yet has no state to receive into: it
                is given that of a step with gradients of zero, which changes no parameter, and its counts are 0 again.
            revision: As for the constructor.
            others: More of the kind. What has `state_dict` and `load_state_dict`, such as a scheduler, is read through
                the one, and given its new state through the other.

        Nests are dicts, lists and tuples. Tensors are shared in place. Numbers (learning rates, step counts) are shared
        too, as 64 bits, and put back where they were; in a tuple they can't be, so it is replaced. Texts, None and what
        else there may be is everyone's own.
        """
        from ray_pccl.state.nests import tensors_of

        sources = {"model": model, "optimizer": optimizer, **others}
        infos = [info for name, source in sources.items() if source is not None for info in tensors_of(source, name)]
        if not infos:
            raise UsageError("there is no tensor in what was given to from_state_dict()")
        return cls(infos, revision)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.infos)

    def __repr__(self) -> str:
        return f"<SharedState of {len(self.infos)} tensors, {self.nbytes} bytes, revision {self.revision}>"


def check_revision(revision: int) -> int:
    """A revision is a whole number of at most 62 bits."""
    if isinstance(revision, bool) or not isinstance(revision, int) or not 0 <= revision <= _LARGEST:
        raise UsageError(f"a revision is a whole number from 0, not {revision!r}")
    return revision
