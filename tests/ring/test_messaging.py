"""Messages between members in one process: receives from whoever sends first, and the end of all."""

from __future__ import annotations

from typing import Any

import numpy as np

from ray_pccl.errors import OperationTimeoutError, PCCLError, PeerLostError
from ray_pccl.ring.messaging import Messages, Transfer
from ray_pccl.ring.task import Epoch
from ray_pccl.ring.wire import Frame, Type

TAG = 5


class Wire:
    """What one member's frames to another go through: they arrive when `deliver()` is called."""

    def __init__(self, sender: str, receiver: Messages) -> None:
        self.peer_id = sender  # as the receiver sees it
        self.receiver = receiver
        self.queue: list[tuple[Frame, bytes | memoryview]] = []

    def send(self, frame: Frame, body: bytes = b"") -> None:
        self.queue.append((frame, body))

    def send_data(self, frame: Frame, view: memoryview, owner: object) -> None:
        self.queue.append((frame, view))

    def release(self, owner: object) -> None:
        pass

    def drop(self, matches: Any) -> None:
        self.queue = [each for each in self.queue if not matches(each[0])]

    def deliver(self) -> bool:
        queue, self.queue = self.queue, []
        for frame, body in queue:
            if frame.type is Type.MESSAGE:
                place = self.receiver.destination(self, frame)  # type: ignore[arg-type]
                if place is not None:
                    place[:] = body
                    self.receiver.data(self, frame, place)  # type: ignore[arg-type]
            else:
                self.receiver.control(self, frame, bytes(body))  # type: ignore[arg-type]
        return bool(queue)


class Member:
    """One member's messages, with wires to the others."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.wires: dict[str, Wire] = {}
        self.ending: PCCLError | None = None
        self.messages = Messages(self)  # type: ignore[arg-type]

    def link_to(self, peer_id: str) -> Any:
        return self.wires.get(peer_id)

    def flush(self, link: Any) -> None:
        pass

    def send(self, to: str, value: int, count: int = 4) -> Transfer:
        transfer = Transfer((to, TAG), np.full(count, value, np.uint8), f"{count} bytes", 100.0)
        self.messages.post_send(transfer)
        return transfer

    def receive(self, deadline: float = 100.0) -> Transfer:
        transfer = Transfer(("", TAG), np.zeros(4, np.uint8), "4 bytes", deadline)
        self.messages.post_open_receive(transfer)
        return transfer


class World:
    def __init__(self, *names: str) -> None:
        self.members = {name: Member(name) for name in names}
        for member in self.members.values():
            member.wires = {
                other.name: Wire(member.name, other.messages) for other in self.members.values() if other is not member
            }
        self.move(1, names)

    def __getitem__(self, name: str) -> Member:
        return self.members[name]

    def move(self, number: int, names: tuple[str, ...]) -> None:
        for name in names:
            messages = self.members[name].messages
            messages.move(Epoch(number, names.index(name), names, len(names)))
        for name in names:
            self.members[name].messages.resume()

    def settle(self) -> None:
        while any(wire.deliver() for member in self.members.values() for wire in member.wires.values()):
            pass


def test_a_receive_from_anyone_takes_what_comes_first_and_says_whose_it_is() -> None:
    world = World("a", "b", "c")
    first, second = world["a"].receive(), world["a"].receive()
    sent = world["c"].send("a", 3)
    world.settle()
    assert first.ended.is_set() and first.error is None and first.way == ("c", TAG) and first.memory[0] == 3
    assert sent.ended.is_set() and sent.error is None
    assert not second.ended.is_set()
    world["b"].send("a", 2)
    world.settle()
    assert second.way == ("b", TAG) and second.memory[0] == 2


def test_an_offer_that_was_there_before_is_taken_and_each_only_once() -> None:
    world = World("a", "b")
    sent = world["b"].send("a", 7)
    world.settle()
    assert not sent.ended.is_set()
    first, second = world["a"].receive(), world["a"].receive()
    world.settle()
    assert first.ended.is_set() and first.memory[0] == 7 and not second.ended.is_set()


def test_a_receive_whose_sender_takes_its_offer_back_goes_to_another() -> None:
    world = World("a", "b", "c")
    receive = world["a"].receive()
    sent = world["b"].send("a", 2)
    world["b"].wires["a"].deliver()  # the offer: the receive is b's now
    world["b"].messages.cancel(sent)
    world["a"].wires["b"].queue.clear()
    world.settle()
    assert not receive.ended.is_set()
    world["c"].send("a", 3)
    world.settle()
    assert receive.error is None and receive.way == ("c", TAG) and receive.memory[0] == 3


def test_a_receive_whose_sender_dies_goes_to_another_and_fails_only_when_nobody_is_left() -> None:
    world = World("a", "b", "c")
    receive = world["a"].receive()
    world["b"].send("a", 2)
    world["b"].wires["a"].deliver()
    world.move(2, ("a", "c"))
    assert not receive.ended.is_set()
    world["c"].send("a", 3)
    world.settle()
    assert receive.error is None and receive.memory[0] == 3
    last = world["a"].receive()
    world.move(3, ("a",))
    assert isinstance(last.error, PeerLostError)


def test_a_receive_from_anyone_ends_at_its_deadline() -> None:
    world = World("a", "b")
    receive = world["a"].receive(deadline=10.0)
    world["a"].messages.tick(9.0)
    assert not receive.ended.is_set()
    world["a"].messages.tick(10.0)
    assert isinstance(receive.error, OperationTimeoutError)
    world["b"].send("a", 1)
    world.settle()  # which nobody takes


def test_the_end_of_all_messages_reaches_every_wait_and_takes_offers_back() -> None:
    world = World("a", "b", "c")
    waits = [world["a"].receive(), world["a"].send("b", 1)]
    specific = Transfer(("c", TAG), np.zeros(4, np.uint8), "4 bytes", 100.0)
    world["a"].messages.post_receive(specific)
    world.settle()
    world["a"].messages.end_all(PeerLostError("it is over", peers=("d",), reason=""))
    assert all(isinstance(wait.error, PeerLostError) for wait in [*waits, specific])
    world.settle()
    late = world["b"].receive()
    world.settle()
    assert not late.ended.is_set(), "an offer that was taken back was taken"


def test_a_message_taken_from_a_sender_that_gave_up_is_not_taken_for_its_next_one() -> None:
    world = World("a", "b")
    first = world["a"].receive()
    given_up = world["b"].send("a", 1)
    for wire in (world["b"].wires["a"], world["a"].wires["b"], world["b"].wires["a"]):  # an offer, yes, the data
        wire.deliver()
    assert first.ended.is_set() and first.memory[0] == 1
    world["b"].messages.cancel(given_up)  # it does not know yet that it was taken
    sent, second = world["b"].send("a", 2), world["a"].receive()
    world.settle()
    assert sent.ended.is_set() and sent.error is None
    assert second.ended.is_set() and second.memory[0] == 2
