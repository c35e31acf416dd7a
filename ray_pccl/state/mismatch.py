"""Where states differ that should have the same tensors: found from everyone's description, by everyone alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ray_pccl.errors import SharedStateMismatchError

Description = Sequence[tuple[str, str, tuple[int, ...], bool]]
"""Of each tensor: name, type, shape, whether contents may differ."""
_decoder: msgspec.msgpack.Decoder[list[tuple[str, str, tuple[int, ...], bool]]] = msgspec.msgpack.Decoder(
    list[tuple[str, str, tuple[int, ...], bool]]
)


def packed(description: Description) -> bytes:
    """Its bytes: equal if and only if the descriptions are."""
    return msgspec.msgpack.encode(description)


def unpacked(data: bytes) -> Description:
    """The description of these bytes."""
    return _decoder.decode(data)


def mismatch(descriptions: Mapping[str, Description]) -> SharedStateMismatchError:
    """The error for members whose descriptions differ: the first tensor in which they do, and who has what."""
    names = list(dict.fromkeys(name for description in descriptions.values() for name, *_ in description))
    by_peer = {
        peer: {name: _text(dtype, shape, loose) for name, dtype, shape, loose in tensors}
        for peer, tensors in descriptions.items()
    }
    for name in names:
        found: dict[str, list[str]] = {}
        for peer, tensors in by_peer.items():
            found.setdefault(tensors.get(name, "no such tensor"), []).append(peer)
        if len(found) > 1:
            who = "; ".join(f"{text} at {', '.join(peers)}" for text, peers in found.items())
            return SharedStateMismatchError(
                f"members hold different shared states: tensor {name!r} is {who}. Nothing was changed",
                tensor=name,
                peers=tuple(descriptions),
            )
    return SharedStateMismatchError(
        f"members hold the same tensors in another order: {', '.join(descriptions)}; give them in one order",
        tensor=names[0] if names else "",
        peers=tuple(descriptions),
    )


def _text(dtype: str, shape: Sequence[int], loose: bool) -> str:
    return f"{dtype}{list(shape)}" + (" with allow_content_inequality" if loose else "")
