"""How the ranks of a collective group find each other, each time that a group of that name is initialised.

A communicator's group honours the ranks that were asked for only when it forms, has one world size, and lives until
its last member is gone. A collective group may be destroyed and initialised again, by one rank while others still hold
the old one, with another world size, or by new processes while an old one hangs. So each initialisation gets a group
of its own, a *generation*, and the ranks agree on which one in two steps:

1. They gather in the **lobby**, a group for this Ray namespace, this name and this world size. It forms when all ranks
   are there. The first to write the generation into the lobby's store has chosen it: a name that was never used before.
   All others read the same, whoever dies or leaves meanwhile, because the store lasts as long as the lobby has members.
2. They join the group of that generation. It is new, so it forms with the ranks that they ask for, and without anyone
   of an older generation. Then they leave the lobby.

Who comes for the next generation while the lobby is still held waits in it until it is empty, and it forms anew: nobody
in it ever votes to admit anyone, so no two generations mix. Members of an old generation are in another group: they
can't disturb, and see only that others left theirs. A rank that never comes makes the others fail with
`RendezvousTimeoutError` after ``join_timeout_s``, and leaves nothing behind. One that dies between the two steps is
noticed in the lobby, and the others are told at once.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from dataclasses import replace
from urllib.parse import quote

import ray

from ray_pccl.driver.master import start_master
from ray_pccl.errors import NotConnectedError, PeerLostError
from ray_pccl.peer.communicator import Communicator
from ray_pccl.settings import Settings
from ray_pccl.types import MembershipChange, MembershipEvent

_GENERATION = "generation"
_FIRST_EPOCH = 1
_CLOSE_AGAIN_S = 0.05
_NO_NEWCOMERS_S = 0.01
"""How long an operation of a group that lost a rank waits for another in its place: none ever comes."""


def meet(group_name: str, world_size: int, rank: int) -> tuple[Communicator, tuple[str, ...]]:
    """Waits for all ranks, and returns the communicator of their new group with the `peer_id` of each rank.

    The master is started if there is none.

    Raises:
        RendezvousTimeoutError: Not all ranks came within ``join_timeout_s``.
        RankTakenError: Another process asks for the same rank.
        PeerLostError: A rank died after all had come.
        MasterError: There is no master, and none could be started.
    """
    start_master()
    settings = Settings.from_env()
    base = _base_name(group_name)
    lobby = Communicator(
        f"{base}/lobby of {world_size}",
        min_world_size=world_size,
        max_world_size=world_size,
        rank=rank,
        settings=settings,
    )
    watch = _DeathWatch()
    lobby.on_membership(watch.told)
    with contextlib.closing(lobby), contextlib.closing(watch):
        lobby.connect()
        generation = lobby.store.compare_set(_GENERATION, "", secrets.token_hex(8)).decode()
        watch.group = group = Communicator(
            f"{base}/{generation}",
            min_world_size=world_size,
            max_world_size=world_size,
            rank=rank,
            settings=replace(settings, join_timeout_s=_NO_NEWCOMERS_S),
        )
        try:
            group.connect(settings.join_timeout_s)
            members = _first_members(group, group_name)
            watch.close()
            watch.require_no_death(group_name)
        except NotConnectedError:
            watch.require_no_death(group_name)
            raise
        except BaseException:
            group.close()
            raise
    return group, members


def _base_name(group_name: str) -> str:
    """The same for all processes of one Ray namespace, and different in another."""
    namespace: str = ray.get_runtime_context().namespace
    return f"ray.util.collective/{quote(namespace, safe='')}/{quote(group_name, safe='')}"


def _first_members(group: Communicator, group_name: str) -> tuple[str, ...]:
    """Who has which rank: the order of the first epoch, in which everyone got what it asked for."""
    members = group.members
    if group.epoch != _FIRST_EPOCH:  # it only grows: if it is the first one now, it was when we looked
        text = f"a rank was lost while collective group {group_name!r} formed: initialise it again on all ranks"
        raise PeerLostError(text, peers=(), reason="it was gone in the second epoch")
    return members


class _DeathWatch:
    """Ends the wait for a group, if one who was in the lobby died on the way."""

    def __init__(self) -> None:
        self.group: Communicator | None = None
        self._death: MembershipEvent | None = None
        self._over = threading.Event()

    def told(self, event: MembershipEvent) -> None:
        """The lobby's callback, in a thread of its own."""
        if event.change is not MembershipChange.LOST:
            return
        self._death = event
        while not self._over.wait(_CLOSE_AGAIN_S):  # again: it may be about to connect
            if self.group is not None:
                self.group.close()

    def close(self) -> None:
        """The wait is over."""
        self._over.set()

    def require_no_death(self, group_name: str) -> None:
        """Raises, if someone died."""
        death = self._death
        if death is not None:
            text = (
                f"peer {death.peer_id} died while collective group {group_name!r} was being initialised: "
                f"{death.reason}. Initialise it again on all ranks"
            )
            raise PeerLostError(text, peers=(death.peer_id,), reason=death.reason)
