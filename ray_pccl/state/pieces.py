"""States in pieces, and who pulls which piece from whom. No I/O, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

PIECE_BYTES = 8 << 20
"""What is hashed, compared, sent and verified as one."""
MAX_BUNDLE_PIECES = 4096
SLOW_FACTOR = 4.0
LEAST_SLOW_S = 0.5
"""A bundle that is due for longer than this, and than a multiple of what bundles took so far, is asked for again."""
Bundle = tuple[int, ...]
"""Pieces that travel together, by their index: small ones share a message."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor's bytes."""

    tensor: int
    start: int
    length: int
    loose: bool
    """Whether its tensor may differ from member to member."""


def cut(sizes: Sequence[int], loose: Sequence[bool], piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """The pieces of tensors of so many bytes: the same for everyone who has the same tensors."""
    return [
        Piece(tensor, start, min(piece_bytes, size - start), is_loose)
        for tensor, (size, is_loose) in enumerate(zip(sizes, loose, strict=True))
        for start in range(0, size, piece_bytes)
    ]


def bundled(indices: Iterable[int], pieces: Sequence[Piece], limit: int = PIECE_BYTES) -> list[Bundle]:
    """These pieces in bundles of at most `limit` bytes, or of one piece; none mixes loose ones with others."""
    bundles: list[Bundle] = []
    open_: list[int] = []
    total = 0
    for index in indices:
        piece = pieces[index]
        full = total + piece.length > limit or len(open_) >= MAX_BUNDLE_PIECES
        if open_ and (full or pieces[open_[0]].loose != piece.loose):
            bundles.append(tuple(open_))
            open_, total = [], 0
        open_.append(index)
        total += piece.length
    return [*bundles, tuple(open_)] if open_ else bundles


def size_of(bundle: Bundle, pieces: Sequence[Piece]) -> int:
    """Bytes of a bundle."""
    return sum(pieces[index].length for index in bundle)


class Pool:
    """The bundles that a receiver still needs, and which source is asked for which.

    Every source has a share, a run of bundles of about the same size for each, so that several receivers ask one source
    for the same ones. Who has none left helps the one that has most. At the end, a bundle that is overdue is asked for
    a second time, from another source, so that a slow one holds up nothing. `holds` tells whether a source has what is
    wanted of a bundle: what may differ, some have and others do not. Not safe for threads.
    """

    def __init__(
        self,
        bundles: Iterable[Bundle],
        sources: Sequence[str],
        pieces: Sequence[Piece],
        holds: Callable[[str, Bundle], bool] = lambda _source, _bundle: True,
    ) -> None:
        self._pieces = pieces
        self._holds = holds
        self._shares: dict[str, deque[Bundle]] = {source: deque() for source in sources}
        self._asked: dict[Bundle, dict[str, float]] = {}
        """Bundles on their way: since when each source was asked."""
        self._longest_s = 0.0
        self.missing: set[Bundle] = set()
        self.add(bundles)

    @property
    def sources(self) -> tuple[str, ...]:
        """Those that may be asked."""
        return tuple(self._shares)

    def add(self, bundles: Iterable[Bundle]) -> None:
        """More bundles are needed."""
        new = [bundle for bundle in bundles if bundle not in self.missing]
        self.missing.update(new)
        self._deal(new)

    def _deal(self, bundles: Sequence[Bundle]) -> None:
        total = sum(size_of(bundle, self._pieces) for bundle in bundles)
        before = 0
        for bundle in bundles:
            holders = self._holders(bundle)
            if holders:
                place = min(before * len(holders) // max(total, 1), len(holders) - 1)
                self._shares[holders[place]].append(bundle)
            before += size_of(bundle, self._pieces)

    def _holders(self, bundle: Bundle) -> list[str]:
        return [source for source in self._shares if self._holds(source, bundle)]

    def take(self, source: str, now: float) -> Bundle | None:
        """What to ask this source for next; None if there is nothing for it at the moment."""
        share = self._shares.get(source)
        if share is None:
            return None
        bundle = share.popleft() if share else self._from_others(source) or self._overdue(source, now)
        if bundle is not None:
            self._asked.setdefault(bundle, {})[source] = now
        return bundle

    def _from_others(self, source: str) -> Bundle | None:
        for share in sorted(self._shares.values(), key=len, reverse=True):
            for bundle in reversed(share):
                if self._holds(source, bundle):
                    share.remove(bundle)
                    return bundle
        return None

    def _overdue(self, source: str, now: float) -> Bundle | None:
        patience = max(LEAST_SLOW_S, SLOW_FACTOR * self._longest_s)
        late = [
            (max(asked.values()), bundle)
            for bundle, asked in self._asked.items()
            if source not in asked and now - max(asked.values()) > patience and self._holds(source, bundle)
        ]
        return min(late)[1] if late else None

    def arrived(self, bundle: Bundle, source: str, now: float) -> bool:
        """A bundle is here, whole. False if it was here before."""
        asked = self._asked.pop(bundle, {})
        if source in asked:
            self._longest_s = max(self._longest_s, now - asked[source])
        if bundle not in self.missing:
            return False
        self.missing.discard(bundle)
        return True

    def failed(self, bundle: Bundle, source: str) -> None:
        """A source that was asked for a bundle has not sent it: it goes back, unless another is asked for it too."""
        asked = self._asked.get(bundle, {})
        asked.pop(source, None)
        if not asked:
            self._asked.pop(bundle, None)
            holders = self._holders(bundle) if bundle in self.missing else []
            if holders:
                min((self._shares[holder] for holder in holders), key=len).append(bundle)

    def drop(self, source: str) -> None:
        """A source is gone: what was its share is the others'."""
        share = self._shares.pop(source, None)
        if share is None:
            return
        for bundle in [bundle for bundle, asked in self._asked.items() if source in asked]:
            self.failed(bundle, source)
        self._deal(list(share))
