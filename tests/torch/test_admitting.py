"""When a doorman looks whether somebody waits. The members of real groups let each other in in test_store.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ray_pccl.errors import MasterUnreachableError, OperationTimeoutError, PCCLError
from ray_pccl.testing import eventually
from ray_pccl.torch.admitting import Doorman
from ray_pccl.types import MembershipChange, MembershipEvent


class StandIn:
    """A communicator that lets one in with each vote, or raises what the test wants first."""

    peer_group = "g"

    def __init__(self) -> None:
        self.waiting = 0
        self.asked = 0
        self.raises: list[PCCLError] = []
        self.tell: Callable[[MembershipEvent], None]

    def on_membership(self, callback: Callable[[MembershipEvent], None]) -> None:
        self.tell = callback

    def num_waiting(self) -> int:
        self.asked += 1
        return self.waiting

    def update_topology(self, timeout: float) -> None:
        if self.raises:
            raise self.raises.pop()
        self.waiting -= 1

    def hears(self, change: MembershipChange) -> None:
        self.tell(MembershipEvent(change, "g", 1))


@pytest.fixture
def communicator() -> StandIn:
    return StandIn()


@pytest.fixture
def doorman(communicator: StandIn):
    doorman = Doorman(communicator)  # type: ignore[arg-type]
    yield doorman
    doorman.close()


def all_in(communicator: StandIn) -> None:
    eventually(lambda: communicator.waiting == 0, what="all are let in")


def test_who_came_before_this_member_is_let_in(communicator: StandIn, doorman: Doorman) -> None:
    communicator.waiting = 3
    doorman.start()
    all_in(communicator)


@pytest.mark.parametrize(
    "change", [MembershipChange.WAITING, MembershipChange.EPOCH, MembershipChange.MASTER_BACK], ids=lambda c: c.value
)
def test_somebody_may_wait_after(communicator: StandIn, doorman: Doorman, change: MembershipChange) -> None:
    doorman.start()
    eventually(lambda: communicator.asked == 1, what="the first look")
    communicator.waiting = 2
    communicator.hears(change)
    all_in(communicator)


def test_a_vote_that_not_all_came_to_is_held_again(communicator: StandIn, doorman: Doorman) -> None:
    communicator.waiting, communicator.raises = 1, [OperationTimeoutError("who?", calls={})]
    doorman.start()
    all_in(communicator)


def test_a_master_that_is_gone_is_asked_again_when_it_is_back(communicator: StandIn, doorman: Doorman) -> None:
    communicator.waiting, communicator.raises = 1, [MasterUnreachableError("gone")]
    doorman.start()
    eventually(lambda: not communicator.raises, what="the failed vote")
    communicator.hears(MembershipChange.MASTER_BACK)
    all_in(communicator)


def test_a_closed_door_lets_nobody_in(communicator: StandIn, doorman: Doorman) -> None:
    doorman.start()
    doorman.close()
    doorman._thread.join(5)
    communicator.waiting = 1
    communicator.hears(MembershipChange.WAITING)
    assert not doorman._thread.is_alive() and communicator.waiting == 1
