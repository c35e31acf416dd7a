"""Both sides prove that they hold the key, before a message is read.

The master opens with a challenge; the client answers it and challenges back; the master answers that. Every step has a
fixed size, so an unauthenticated connection can make nobody allocate anything. The answers are HMAC-SHA256 over both
nonces and the name of the side, so that neither an answer nor a challenge can be played back to the other side.
"""

from __future__ import annotations

import hmac
import secrets

from ray_pccl.errors import AuthenticationError, ProtocolError

MAGIC = b"PCCL\x01"
NONCE_BYTES = 32
DIGEST_BYTES = 32
CHALLENGE_BYTES = len(MAGIC) + NONCE_BYTES
ANSWER_BYTES = NONCE_BYTES + DIGEST_BYTES


def _proof(key: bytes, side: bytes, own: bytes, other: bytes) -> bytes:
    return hmac.digest(key, side + own + other, "sha256")


class MasterSide:
    """The master's half: send `challenge`, hand what comes to `accept`, send back what it returns."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self.challenge = MAGIC + self._nonce

    def accept(self, answer: bytes) -> bytes:
        """The master's proof for a client that gave the right answer, else `AuthenticationError`."""
        nonce, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(self._key, b"client", nonce, self._nonce)):
            raise AuthenticationError("the client does not hold this master's key")
        return _proof(self._key, b"master", self._nonce, nonce)


class ClientSide:
    """The client's half: hand the challenge to `answer`, send what it returns, hand the proof to `verify`."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._challenge = b""

    def answer(self, challenge: bytes) -> bytes:
        """The client's nonce and proof."""
        if not challenge.startswith(MAGIC):
            raise ProtocolError(
                "the other side is no ray_pccl master of this version: check the endpoint's host and port"
            )
        self._challenge = challenge[len(MAGIC) :]
        return self._nonce + _proof(self._key, b"client", self._nonce, self._challenge)

    def verify(self, proof: bytes) -> None:
        """Accepts the master's proof, or raises `AuthenticationError`."""
        if not hmac.compare_digest(proof, _proof(self._key, b"master", self._challenge, self._nonce)):
            raise AuthenticationError("the master does not hold the key of this endpoint")
