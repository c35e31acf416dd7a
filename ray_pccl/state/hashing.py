"""Names for contents: 128 bits of XXH3, a piece at a time, the same on every machine.

XXH3 is no cryptographic hash: it finds accidents, not forgers. Members have proved the group's key before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from ray_pccl.state.pieces import Piece
from ray_pccl.state.rows import DIGEST_BYTES
from ray_pccl.state.tensors import Bytes


def digest_of(data: Any) -> bytes:
    """The digest of some bytes. The interpreter is free meanwhile."""
    digest: bytes = xxhash.xxh3_128_digest(data)
    return digest


def digests_of(contents: Sequence[Bytes], pieces: Sequence[Piece]) -> Bytes:
    """The digest of every piece, one below the other."""
    digests = b"".join(digest_of(contents[piece.tensor][piece.start : piece.start + piece.length]) for piece in pieces)
    return np.frombuffer(digests, np.uint8).reshape(len(pieces), DIGEST_BYTES)


def summary(digests: Bytes, pieces: Sequence[Piece], *, loose: bool) -> bytes:
    """One digest for all pieces of tensors whose contents may differ, or for all others."""
    wanted = np.fromiter((piece.loose is loose for piece in pieces), bool, len(pieces))
    return digest_of(digests[wanted].tobytes())
