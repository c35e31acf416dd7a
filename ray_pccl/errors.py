"""Every error that ray_pccl raises: one base, one class per cause.

A message names the peer, the group and the epoch concerned, what was expected and what came, and what to do. What a
program may want to read is an attribute too. All of them pickle, so they cross Ray and processes unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self


class PCCLError(Exception):
    """Base of all errors of this package.

    Keyword arguments become attributes (``error.reason``) and survive pickling.
    """

    def __init__(self, message: str = "", **details: Any) -> None:
        super().__init__(message)
        self.details = details
        for name, value in details.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Callable[..., PCCLError], tuple[Any, ...]]:
        return _rebuild, (type(self), str(self), self.details)

    def again(self) -> Self:
        """The same error, for another who is to raise it: one that was raised holds the frames that it passed."""
        return type(self)(str(self), **self.details)


def _rebuild(cls: type[PCCLError], message: str, details: dict[str, Any]) -> PCCLError:
    return cls(message, **details)


class SettingsError(PCCLError, ValueError):
    """A setting or an argument is outside its allowed range."""


class PlottingUnavailableError(PCCLError, ImportError):
    """What is to be drawn needs matplotlib, which is not installed: ``pip install 'ray-pccl[plot]'``."""


class UsageError(PCCLError):
    """A call that makes no sense in the communicator's present state, such as ``connect()`` twice."""


class WorldChangedError(UsageError):
    """The tensors fit a world of another size: members have come or gone since they were made. The group goes on."""


class NotConnectedError(UsageError):
    """The communicator is not a member of its group: call ``connect()`` first."""


class RendezvousError(PCCLError):
    """Joining the group failed."""


class RendezvousTimeoutError(RendezvousError, TimeoutError):
    """The group did not form, or did not admit this peer, in time. Not meant to be retried blindly."""


class RendezvousClosedError(RendezvousError):
    """The group was closed with ``set_closed()``: nobody joins it any more."""


class GroupMismatchError(RendezvousError):
    """The peer asked for another minimum or maximum world size than the group has."""


class RankTakenError(RendezvousError):
    """Another peer of the forming group asked for the same rank."""


class MasterError(PCCLError):
    """The master can't be used."""


class MasterNotFoundError(MasterError):
    """There is no master: ``ray_pccl.start_master()`` was not called, or in another namespace."""


class MasterUnreachableError(MasterError, ConnectionError):
    """The master did not answer for longer than ``master_timeout_s``. It may come back."""


class MasterStoppedError(MasterError):
    """The master was stopped for good; it will not come back."""


class AuthenticationError(MasterError):
    """The other side does not hold the same key."""


class ProtocolError(PCCLError):
    """Bytes that are no message of ours: garbage, a wrong version, an oversized frame."""


class PeerLostError(PCCLError):
    """A peer that takes part died. ``peers`` names who, ``reason`` says how it was noticed."""

    peers: tuple[str, ...]
    """The `peer_id` of each who died."""
    reason: str
    """How it was noticed."""


class PeerEvictedError(PCCLError):
    """This peer was taken for dead and put out of its group; ``reason`` says why.

    Nothing it still holds of the old epoch counts. ``connect()`` joins again, as a new peer.
    """

    reason: str
    """Why it was put out."""


class NotAMemberError(PCCLError):
    """Only members of the group may do this; who waits for admission, or was evicted, may not."""


class TooFewPeersError(PCCLError, TimeoutError):
    """The group fell below ``min_world_size`` and no newcomer came in time."""


class OperationTimeoutError(PCCLError, TimeoutError):
    """Members did not all enter the same call in time. ``calls`` tells who is in which."""

    calls: dict[str, str]
    """Each member's call, by `peer_id`."""


class NoRingError(PCCLError, ValueError):
    """Every ring would need an edge that can't connect. ``edges`` names those in the way: a ring needs one of them."""

    edges: tuple[tuple[Any, Any], ...]
    """Pairs of peers, from and to: all that lead into or out of a peer, or all across a cut. A master tells 1,000."""


class CollectiveMismatchError(PCCLError):
    """Members called different operations under one tag. ``calls`` tells who called what. The group goes on."""

    calls: dict[str, str]
    """What each of those that differ called, by `peer_id`."""


class DelegatedBackendError(PCCLError):
    """The library that a group delegates its reductions to failed, though all members live. Raised on all of them.

    Every input is what it was. The group goes on: its next operation gets a new group of that library.
    """

    backend: str
    """Which library."""
    peer: str
    """The `peer_id` of the member on which it failed."""


class BackendUnavailableError(PCCLError, ImportError):
    """The library that a group is to delegate its reductions to can't be used here: it, or a device, is missing."""


class InputFailedError(PCCLError):
    """A member had nothing to contribute, since making its value failed; ``actor`` names it. The group goes on."""

    actor: str
    """The actor whose method raised."""


class SharedStateError(PCCLError):
    """A sync of the shared state failed. Every member's state is what it was; the group goes on."""


class RevisionError(SharedStateError):
    """A revision other than the one that is due. ``expected`` is that one, ``offered`` what each peer came with."""

    expected: int
    """The revision that is due."""
    offered: dict[str, int]
    """What peers came with, by `peer_id`."""


class SharedStateMismatchError(SharedStateError):
    """Members hold different tensors, or their strategies contradict one another. Raised on all of them.

    ``tensor`` names the first tensor in which they differ (empty for strategies), ``peers`` who is concerned.
    """

    tensor: str
    """The first tensor in which they differ; empty for strategies."""
    peers: tuple[str, ...]
    """Who is concerned."""


class NoUpToDatePeerError(SharedStateError):
    """Nobody holds, or is left who held, what the others are to receive. Raised on all of them.

    After the loss of all who held it the next sync is a first one again.
    """


class StepMismatchError(PCCLError):
    """Members of a training have made different numbers of steps; ``steps`` tells who how many. Raised on all."""

    steps: dict[str, int]
    """How many steps each has made, by `peer_id`."""


class StoreError(PCCLError):
    """The group's key-value store refused a request, such as ``add`` on a value that is no number."""


class StoreTimeoutError(StoreError, TimeoutError):
    """A key did not appear in the store in time."""


def _subclasses(cls: type[PCCLError]) -> list[type[PCCLError]]:
    return [cls, *(leaf for sub in cls.__subclasses__() for leaf in _subclasses(sub))]


def error_named(name: str, message: str, details: dict[str, Any]) -> PCCLError:
    """The error that the other side of a connection described; one it alone knows becomes a `PCCLError`."""
    known = {cls.__name__: cls for cls in _subclasses(PCCLError)}
    return known.get(name, PCCLError)(message, **details)
