from __future__ import annotations

import hmac

import pytest

from ray_pccl.control.handshake import (
    ANSWER_BYTES,
    CHALLENGE_BYTES,
    DIGEST_BYTES,
    MAGIC,
    NONCE_BYTES,
    ClientSide,
    MasterSide,
)
from ray_pccl.errors import AuthenticationError, ProtocolError

KEY, OTHER_KEY = b"k" * 32, b"o" * 32


def test_both_sides_accept_each_other_when_they_hold_the_same_key() -> None:
    master, client = MasterSide(KEY), ClientSide(KEY)
    answer = client.answer(master.challenge)
    proof = master.accept(answer)
    client.verify(proof)
    assert (len(master.challenge), len(answer), len(proof)) == (CHALLENGE_BYTES, ANSWER_BYTES, DIGEST_BYTES)


def test_a_client_with_another_key_is_refused() -> None:
    master = MasterSide(KEY)
    with pytest.raises(AuthenticationError):
        master.accept(ClientSide(OTHER_KEY).answer(master.challenge))


def test_a_master_with_another_key_is_refused() -> None:
    client, impostor = ClientSide(KEY), MasterSide(OTHER_KEY)
    answer = client.answer(impostor.challenge)
    forged = hmac.digest(OTHER_KEY, b"master" + impostor.challenge[len(MAGIC) :] + answer[:NONCE_BYTES], "sha256")
    for proof in (forged, b"", bytes(DIGEST_BYTES)):
        with pytest.raises(AuthenticationError):
            client.verify(proof)


def test_a_proof_that_is_reflected_to_its_maker_is_refused() -> None:
    client = ClientSide(KEY)
    answer = client.answer(MasterSide(KEY).challenge)
    with pytest.raises(AuthenticationError):
        client.verify(answer[-DIGEST_BYTES:])


def test_a_challenge_that_is_reflected_to_another_connection_of_its_maker_proves_nothing() -> None:
    # Without the key, an attacker lets the master answer its own challenge: the sides' names differ.
    first, second = MasterSide(KEY), MasterSide(KEY)
    nonce = first.challenge[len(MAGIC) :]
    with pytest.raises(AuthenticationError):
        second.accept(nonce + bytes(DIGEST_BYTES))
    client = ClientSide(KEY)
    proof_for_other_nonces = client.answer(second.challenge)[-DIGEST_BYTES:]
    with pytest.raises(AuthenticationError):
        first.accept(nonce + proof_for_other_nonces)


def test_an_answer_that_is_replayed_to_another_connection_is_refused() -> None:
    first, second = MasterSide(KEY), MasterSide(KEY)
    answer = ClientSide(KEY).answer(first.challenge)
    first.accept(answer)
    with pytest.raises(AuthenticationError):
        second.accept(answer)


def test_a_masters_proof_that_is_replayed_to_another_client_is_refused() -> None:
    master, first, second = MasterSide(KEY), ClientSide(KEY), ClientSide(KEY)
    proof = master.accept(first.answer(master.challenge))
    second.answer(master.challenge)
    with pytest.raises(AuthenticationError):
        second.verify(proof)


@pytest.mark.parametrize("answer", [b"", b"x", bytes(ANSWER_BYTES - 1), bytes(ANSWER_BYTES), bytes(ANSWER_BYTES + 1)])
def test_an_answer_of_zeroes_or_of_the_wrong_size_is_refused(answer: bytes) -> None:
    with pytest.raises(AuthenticationError):
        MasterSide(KEY).accept(answer)


@pytest.mark.parametrize(
    "greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n".ljust(CHALLENGE_BYTES), b"", b"PCCL\x02" + bytes(32)]
)
def test_a_server_that_is_no_master_of_this_version_is_told_apart_from_a_wrong_key(greeting: bytes) -> None:
    with pytest.raises(ProtocolError, match="host and port"):
        ClientSide(KEY).answer(greeting)


def test_nonces_do_not_repeat() -> None:
    assert len({MasterSide(KEY).challenge for _ in range(100)}) == 100
    challenge = MasterSide(KEY).challenge
    assert len({ClientSide(KEY).answer(challenge) for _ in range(100)}) == 100
