"""What one iteration of a benchmark does: how many tensors are summed, of what size and kind, or what is trained."""

from __future__ import annotations

import re
from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20
UNITS = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": 1 << 30}
IN_FLIGHT = 16


@dataclass(frozen=True)
class Work:
    """One iteration: `count` sums of tensors of `nbytes` each, all in flight at the same time."""

    nbytes: int
    count: int = 1
    bfloat16: bool = False
    """torch tensors of bfloat16 instead of float32: as many bytes, twice as many elements."""
    quantized: bool = False
    """float32 that travels in 8 bits."""
    in_place: bool = False
    in_torch: bool = False
    """torch tensors of float32, too, where a library takes others as well."""

    @property
    def elements(self) -> int:
        """Of one tensor."""
        return self.nbytes // (2 if self.bfloat16 else 4)

    @property
    def held_bytes(self) -> int:
        """What the user's tensors take in each process."""
        return self.nbytes * self.count * (1 if self.in_place else 2)

    @property
    def size_text(self) -> str:
        """Its size, as one types it."""
        return (f"{self.count}x" if self.count > 1 else "") + size_text(self.nbytes)

    def iterations(self, quick: bool) -> tuple[int, int]:
        """How many iterations a round has: to warm up, and to be timed. The same for all libraries."""
        timed = max(3, min(200, 64 * MIB // (self.nbytes * self.count)))
        return max(1, timed // 5), (max(2, timed // 5) if quick else timed)


@dataclass(frozen=True)
class Training:
    """One iteration: a step of data-parallel training in torch, of a perceptron with square layers."""

    width: int
    layers: int
    batch: int
    bucket_view: bool = False
    """DDP with ``gradient_as_bucket_view=True``: gradients live in the buckets that are reduced."""
    averaging: bool = False
    """Where the backend is ours, with `ray_pccl.torch.average_hook`."""

    count = 1

    @property
    def parameters(self) -> int:
        """How many."""
        return self.layers * self.width * (self.width + 1)

    @property
    def nbytes(self) -> int:
        """What is reduced in a step."""
        return 4 * self.parameters

    @property
    def held_bytes(self) -> int:
        """Parameters, gradients and buckets, in each process; who asks doubles it."""
        return 2 * self.nbytes

    def iterations(self, quick: bool) -> tuple[int, int]:
        """How many steps a round has: to warm up, and to be timed. The same for all backends."""
        return (1, 2) if quick else (1, 6)


def size_text(nbytes: int) -> str:
    """4096 as 4KiB."""
    unit = next(unit for unit in ("GiB", "MiB", "KiB", "B") if nbytes % UNITS[unit] == 0)
    return f"{nbytes // UNITS[unit]}{unit}"


def parse_size(text: str) -> int:
    """4KiB as 4096; `ValueError` if it is no size of whole float32."""
    match = re.fullmatch(r"(\d+)(B|KiB|MiB|GiB)", text.strip())
    nbytes = int(match[1]) * UNITS[match[2]] if match else 0
    if nbytes == 0 or nbytes % 4:
        raise ValueError(f"a size reads 4KiB, 256KiB or 64MiB, not {text!r}")
    return nbytes
