"""What peers call, step by step, and the values they contribute.

Every step follows from the seed and its number alone, so that all peers, the newcomers too, do the same. A peer has a
slot, and contributes a power of BASE that follows from it: a sum tells who is in it and how often, in every element.
The powers are rotated by the element and by the operation, so that a value from another place or time is seen as well.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

BASE, SLOTS = 4, 12
"""4 ** 12 is 2 ** 24: every sum is exact in float32, with each contribution counted up to three times."""
BLOCK = 4096
"""Elements that share a value where values are quantised: blocks of equal values come through exactly."""
SYNC_TAG = 1_000_000
DTYPES = ("float32", "float64", "int32", "int64")
KIB, MIB = 1 << 10, 1 << 20
_SMALL = (4 * KIB, 16 * KIB, 64 * KIB, 65 * KIB, 200 * KIB, 256 * KIB)
_LARGE = (257 * KIB, 600 * KIB, 1 * MIB, 2 * MIB + 4, 4 * MIB, 8 * MIB)
Array = NDArray[Any]


@dataclass(frozen=True)
class Call:
    """One operation."""

    step: int
    index: int
    """Its place among those that are in flight together."""
    kind: str
    nbytes: int = 0
    dtype: str = "float32"
    in_place: bool = False
    quantised: bool = False
    retry: bool = True
    root: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """What peers know it by."""
        return self.step, self.index

    @property
    def count(self) -> int:
        """Elements."""
        return self.nbytes // np.dtype(self.dtype).itemsize

    @property
    def salt(self) -> int:
        """By how much its values are rotated."""
        return (self.step * 7 + self.index * 5) % SLOTS


@dataclass(frozen=True)
class Step:
    """Operations that are called together, and how."""

    way: str
    """blocking, async or many"""
    calls: tuple[Call, ...]


def plan(seed: int, step: int, *, quantises: bool = True) -> Step:
    """What all peers do in a step; without quantisation where the backend has none."""
    step_with_all = _plan(seed, step)
    if quantises:
        return step_with_all
    return Step(step_with_all.way, tuple(replace(call, quantised=False) for call in step_with_all.calls))


def _plan(seed: int, step: int) -> Step:
    chance = random.Random(f"{seed}/{step}")
    way = chance.choices(("blocking", "async", "many"), (80, 14, 6))[0]
    if way == "blocking":
        return Step(way, (_single(chance, step),))
    flying = chance.choice((4, 16, 64)) if way == "async" else 16
    nbytes = chance.choice(_SMALL[:3]) if flying > 4 else chance.choice((200 * KIB, 1 * MIB))
    retry = way == "many" or chance.random() < 0.6
    in_place, quantised = chance.random() < 0.5, chance.random() < 0.2
    dtype = "float32" if quantised else chance.choice(DTYPES)
    calls = [
        Call(step, index, "all_reduce", nbytes, dtype, in_place=in_place, quantised=quantised, retry=retry)
        for index in range(flying)
    ]
    return Step(way, tuple(calls))


def _single(chance: random.Random, step: int) -> Call:
    kind = chance.choices(("all_reduce", "reduce", "broadcast", "barrier"), (70, 10, 12, 8))[0]
    if kind == "barrier":
        return Call(step, 0, kind, retry=chance.random() < 0.7)
    nbytes = chance.choice(_SMALL) if chance.random() < 0.55 else chance.choices(_LARGE, (5, 4, 4, 3, 2, 1))[0]
    quantised = kind == "all_reduce" and chance.random() < 0.2
    return Call(
        step,
        0,
        kind,
        nbytes,
        "float32" if quantised else chance.choice(DTYPES),
        in_place=chance.random() < 0.5,
        quantised=quantised,
        retry=chance.random() < 0.7,
        root=chance.choice((0, 0, 1)) if kind in ("reduce", "broadcast") else 0,
    )


# ---------------------------------------------------------------------------------------------------------- values


@functools.cache
def _powers(dtype: str, run: int) -> Array:
    """BASE to the power of the place, again and again: everyone's values are a piece of it."""
    count = max(_LARGE) // np.dtype(dtype).itemsize + 2 * SLOTS * run
    return np.resize(np.repeat(np.array([BASE**i for i in range(SLOTS)], dtype), run), count)


def contribution(call: Call, slot: int) -> Array:
    """What the peer in a slot puts in; not to be written to."""
    run = BLOCK if call.quantised else 1
    start = (slot + call.salt) % SLOTS * run
    return _powers(call.dtype, run)[start : start + call.count]


def expected(call: Call, slots: Iterable[int]) -> Array:
    """The sum of these slots' contributions."""
    total = np.zeros(call.count, call.dtype)
    for slot in slots:
        total += contribution(call, slot)
    return total


@dataclass(frozen=True)
class Decoded:
    """Whose contributions a result holds."""

    slots: tuple[int, ...]
    """By its first element; one that was counted twice is named twice."""
    garbled: str = ""
    """What does not fit that elsewhere in the result."""


def decode(call: Call, result: Array) -> Decoded:
    """Reads the contributions off a result, and looks whether all elements tell the same."""
    slots = _read(call, result, 0)
    if slots is None:
        return Decoded((), f"element 0 is {result[0]!r}")
    wrong = np.flatnonzero(result != expected(call, slots))
    if not len(wrong):
        return Decoded(slots)
    there = _read(call, result, int(wrong[0]))
    return Decoded(
        slots, f"{len(wrong)} of {call.count} elements, from {wrong[0]} to {wrong[-1]}: there it decodes to {there}"
    )


def _read(call: Call, result: Array, element: int) -> tuple[int, ...] | None:
    value = float(result[element])
    if not value.is_integer() or not 0 <= value < BASE**SLOTS:
        return None
    rotation = call.salt + element // (BLOCK if call.quantised else 1)
    found: Counter[int] = Counter()
    for power in range(SLOTS):
        found[(power - rotation) % SLOTS] = int(value) // BASE**power % BASE
    return tuple(sorted(found.elements()))


def preload(dtypes: Sequence[str] = DTYPES) -> None:
    """Makes the tables, before processes are forked that share them."""
    for dtype in dtypes:
        _powers(dtype, 1)
    _powers("float32", BLOCK)
