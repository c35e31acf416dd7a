from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_pccl.control.endpoint import KEY_BYTES, Endpoint, new_key
from ray_pccl.errors import SettingsError

HOSTS = st.sampled_from(["127.0.0.1", "localhost", "node-1.example.org", "::1", "fe80::1%eth0", "2001:db8::1"])


@given(HOSTS, st.integers(1, 65535), st.binary(min_size=1, max_size=64))
def test_an_endpoint_survives_its_text_and_its_pickle(host: str, port: int, key: bytes) -> None:
    endpoint = Endpoint(host, port, key)
    assert Endpoint.parse(str(endpoint)) == endpoint
    assert pickle.loads(pickle.dumps(endpoint)) == endpoint


def test_an_endpoint_reads_host_port_key() -> None:
    assert str(Endpoint("127.0.0.1", 48148, b"\x0a\xff")) == "127.0.0.1:48148#0aff"
    assert str(Endpoint("::1", 48148, b"\x0a")) == "[::1]:48148#0a"


def test_repr_does_not_show_the_key() -> None:
    endpoint = Endpoint("127.0.0.1", 48148, b"secret")
    assert "secret" not in repr(endpoint) and b"secret".hex() not in repr(endpoint)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "localhost",
        "localhost:48148",
        "localhost:48148#",
        "localhost#aa",
        ":48148#aa",
        "localhost:0#aa",
        "localhost:65536#aa",
        "localhost:-1#aa",
        "localhost:port#aa",
        "localhost:48148#no hex",
        "localhost:48148#aaa",
        "[]:48148#aa",
        "#",
    ],
)
def test_a_text_that_is_no_endpoint_is_refused_with_the_form_it_should_have(text: str) -> None:
    with pytest.raises(SettingsError, match="host:port#key"):
        Endpoint.parse(text)


@pytest.mark.parametrize("text", ["localhost:99999#5ec2e7", "localhost:port#5ec2e7", "localhost:48148#5ec2e7x"])
def test_the_error_does_not_show_the_key(text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Endpoint.parse(text)
    assert "5ec2e7" not in str(caught.value)


@pytest.mark.parametrize(("host", "port", "key"), [("", 1, b"k"), ("h", 0, b"k"), ("h", 65536, b"k"), ("h", 1, b"")])
def test_an_endpoint_without_host_port_or_key_can_not_be_made(host: str, port: int, key: bytes) -> None:
    with pytest.raises(SettingsError):
        Endpoint(host, port, key)


def test_keys_are_random_and_long() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100 and all(len(key) == KEY_BYTES >= 32 for key in keys)
