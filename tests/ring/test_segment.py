"""What an entry of the board tells at each moment, and what it must not tell."""

from __future__ import annotations

import pytest

from ray_pccl.ring.header import HEADER_BYTES
from ray_pccl.ring.segment import FLAGS, LAST, STAGE_BITS, OwnSegment, ident_of

TAG = 4
HEADER = bytes(range(HEADER_BYTES))


def _entry(segment: OwnSegment, epoch: int, number: int) -> int:
    at = segment.take(TAG)
    assert at is not None
    segment.dedicate(at, ident_of(epoch, TAG), number)
    return at


@pytest.mark.parametrize("number", [0, 1, 2, 7])
def test_an_entry_of_a_new_epoch_shows_nothing_before_it_is_posted(number: int) -> None:
    segment = OwnSegment()
    old = _entry(segment, 35, number)
    segment.post(old, number, HEADER, (number << STAGE_BITS) + 1)
    assert segment.has_shown(TAG, ident_of(35, TAG), number) == old
    at = _entry(segment, 36, number)  # who dies here has published nothing, though an equal header is still there
    assert segment.header(at, number) == HEADER
    assert segment.has_shown(TAG, ident_of(36, TAG), number) is None
    assert segment.is_at_least(TAG, ident_of(36, TAG), number, 1) is None


@pytest.mark.parametrize("number", [0, 1, 2, 7])
def test_what_was_withdrawn_was_shown_but_does_not_count(number: int) -> None:
    segment = OwnSegment()
    at = _entry(segment, 35, number)
    segment.post(at, number, HEADER, (number << STAGE_BITS) + 1)
    place = at + FLAGS + (number & 1)
    segment.words[place] = ~segment.words[place]
    assert segment.has_shown(TAG, ident_of(35, TAG), number) == at
    assert segment.is_at_least(TAG, ident_of(35, TAG), number, 1) is None


def test_a_committed_operation_was_shown_for_good() -> None:
    segment = OwnSegment()
    at = _entry(segment, 35, 0)
    segment.words[at + LAST] = 3
    for number in range(4):
        assert segment.has_shown(TAG, ident_of(35, TAG), number) == at
    assert segment.has_shown(TAG, ident_of(35, TAG), 4) is None
