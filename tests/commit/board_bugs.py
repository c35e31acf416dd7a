"""The rules of operations over shared memory (R8), each broken once in the model that `boards.py` is."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

from tests.commit import boards, links
from tests.commit.bugs import Patch, bug, bug_seen_when
from tests.commit.peer import Peer
from tests.commit.plan import a_reader_is_evicted, one_gives_up, the_last_is_late


def nothing(*_: Any) -> Iterator[bool]:
    """A look that is not taken."""
    yield from ()


@bug_seen_when(the_last_is_late)
def closing_comes_after_looking(patch: Patch) -> None:
    def close(peer: Peer) -> list[tuple[int, int]]:
        whole = boards.look(peer)
        peer.world.meanwhile()
        peer.memory.closed = peer.epoch
        return whole

    patch.setattr(boards, "close", close)


@bug
def nobody_looks_again_whether_someone_has_closed(patch: Patch) -> None:
    patch.setattr(boards, "nobody_closed", nothing)


@bug_seen_when(one_gives_up)
def nobody_looks_again_whether_someone_has_withdrawn(patch: Patch) -> None:
    def nobody_withdrew(*_: Any) -> Generator[bool, None, bool]:
        yield True
        return True

    patch.setattr(boards, "nobody_withdrew", nobody_withdrew)


@bug
def the_epoch_of_a_flag_is_ignored(patch: Patch) -> None:
    def is_published(memory: boards.Memory, key: Any, flag: boards.Flag) -> bool:
        found = memory.slot(key).flag
        return found is not None and found.number == key[1] and not found.withdrawn

    patch.setattr(boards, "is_published", is_published)


@bug
def a_slot_is_overwritten_one_operation_early(patch: Patch) -> None:
    patch.setattr(boards, "slot_is_free", lambda memory, key: memory.begun[key[0]] >= key[1] - boards.SLOTS)


@bug
def a_slot_is_free_only_when_the_next_input_was_published(patch: Patch) -> None:
    """Not wrong, but it hangs: what was refused early was never published."""

    def slot_is_free(memory: boards.Memory, key: Any) -> bool:
        found = memory.slot((key[0], key[1] - 1)).flag
        return key[1] < boards.SLOTS or (found is not None and found.number >= key[1] - 1)

    patch.setattr(boards, "slot_is_free", slot_is_free)


@bug_seen_when(a_reader_is_evicted)
def a_flag_stays_while_the_data_change(patch: Patch) -> None:
    def publish(peer: Peer, key: Any, flag: boards.Flag) -> Iterator[bool]:
        slot = peer.memory.slot(key)
        slot.data = key
        peer.world.moment("writing", peer)
        yield True
        slot.flag = flag
        yield True

    patch.setattr(boards, "publish", publish)


@bug
def a_flag_comes_before_its_data(patch: Patch) -> None:
    def publish(peer: Peer, key: Any, flag: boards.Flag) -> Iterator[bool]:
        slot = peer.memory.slot(key)
        slot.flag = flag
        yield True
        slot.data = key
        yield True

    patch.setattr(boards, "publish", publish)


@bug_seen_when(a_reader_is_evicted)
def who_recomputes_does_not_look_whether_the_others_went_on(patch: Patch) -> None:
    patch.setattr(boards, "nobody_went_on", nothing)


@bug
def one_refuses_without_withdrawing(patch: Patch) -> None:
    def withdraw(peer: Any, call: Any, memories: Any, flag: Any) -> Generator[bool, None, bool]:
        if any(boards.published_nothing(memory, call.key, flag.epoch) for memory in memories):
            return not peer.ledger.frozen and links.refuse(peer, call)
        yield True
        return False

    patch.setattr(boards, "withdraw", withdraw)


@bug_seen_when(one_gives_up)
def two_that_withdraw_take_each_other_for_a_reason(patch: Patch) -> None:
    def published_nothing(memory: boards.Memory, key: Any, epoch: int) -> bool:
        return not boards.was_published(memory, key, epoch) or bool(memory.slot(key).flag.withdrawn)  # type: ignore[union-attr]

    right = boards.withdraw

    def withdraw(peer: Any, call: Any, memories: Any, flag: Any) -> Generator[bool, None, bool]:
        others = [memory for memory in memories if memory is not peer.memory]
        return right(peer, call, others, flag)

    patch.setattr(boards, "published_nothing", published_nothing)
    patch.setattr(boards, "withdraw", withdraw)


@bug_seen_when(one_gives_up)
def what_is_withdrawn_counts_as_missing_for_who_freezes(patch: Patch) -> None:
    def look(peer: Peer) -> list[tuple[int, int]]:
        withdrawn = [key for key in right(peer) if any(m.slot(key).flag.withdrawn for m in peer.memories())]  # type: ignore[union-attr]
        return [key for key in right(peer) if key not in withdrawn]

    right = boards.look
    patch.setattr(boards, "look", look)
