"""Errors that are Ray's as well as ours, so that both kinds of ``except`` find them."""

from __future__ import annotations

from typing import Any

from ray.exceptions import ActorDiedError, RayActorError

from ray_pccl.errors import PeerLostError


class ActorLostError(PeerLostError, ActorDiedError):
    """An actor that takes part, or that holds a value, is gone: a `PeerLostError` and an `ActorDiedError` of Ray's."""

    def __init__(self, message: str = "", **details: Any) -> None:
        RayActorError.__init__(self, details.get("actor_id", ""), message)
        Exception.__init__(self, message)
        self.details = details
        for name, value in details.items():
            if name != "actor_id":  # Ray's own, which it keeps in its own way
                setattr(self, name, value)

    def __str__(self) -> str:
        return str(self.args[0])


def actor_lost(actor_id: str, reason: str) -> ActorLostError:
    """The error for what an actor was to do or to hold."""
    text = f"actor {actor_id} is lost: {reason}"
    return ActorLostError(text, actor_id=actor_id, peers=(actor_id,), reason=reason)
