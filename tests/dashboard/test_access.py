"""Who may look at the page: decided without a socket."""

from __future__ import annotations

import pytest

from master_actor.dashboard.access import Gate, hostname_of, is_loopback, token_of, url_of

KEY = bytes(range(32))
LOCAL = Gate("127.0.0.1", 48149, token_of(KEY))
REMOTE = Gate("10.0.0.5", 48149, token_of(KEY))


def test_the_token_follows_from_the_key_and_does_not_show_it() -> None:
    assert token_of(KEY) == token_of(bytes(range(32)))
    assert token_of(KEY) != token_of(bytes(32))
    assert len(token_of(KEY)) == 32
    assert KEY.hex()[:8] not in token_of(KEY)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "LOCALHOST", "::ffff:127.0.0.1"])
def test_what_only_this_machine_can_mean_is_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.0.0.5", "localhost.evil.example", "127.0.0.1.nip.io"])
def test_everything_else_is_not(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("header", "name"),
    [("localhost:80", "localhost"), ("[::1]:80", "::1"), ("[::1]", "::1"), ("a.b", "a.b"), ("::1", "::1"), ("", "")],
)
def test_the_host_of_a_header_is_told_from_its_port(header: str, name: str) -> None:
    assert hostname_of(header) == name


@pytest.mark.parametrize("host", ["127.0.0.1:48149", "localhost:9000", "localhost", "[::1]:48149"])
def test_on_loopback_everybody_may_look_through_whatever_tunnel(host: str) -> None:
    assert LOCAL.refusal({"Host": host}, None) is None


@pytest.mark.parametrize("host", ["evil.example", "evil.example:48149", "127.0.0.1.nip.io:48149", ""])
def test_on_loopback_a_name_that_points_here_from_elsewhere_is_refused(host: str) -> None:
    refusal = LOCAL.refusal({"Host": host}, LOCAL.token)
    assert refusal is not None
    assert refusal.status == 403


@pytest.mark.parametrize(
    ("headers", "query"),
    [
        ({}, REMOTE.token),
        ({"Authorization": f"Bearer {REMOTE.token}"}, None),
        ({"Cookie": f"other=1; {REMOTE.cookie}={REMOTE.token}"}, None),
    ],
)
def test_elsewhere_the_token_opens_in_the_address_in_a_header_and_in_a_cookie(
    headers: dict[str, str], query: str | None
) -> None:
    assert REMOTE.refusal({"Host": "10.0.0.5"} | headers, query) is None


@pytest.mark.parametrize(
    ("headers", "query"),
    [
        ({}, None),
        ({}, ""),
        ({}, REMOTE.token[:-1]),
        ({}, REMOTE.token + "0"),
        ({}, "\udcff"),
        ({"Authorization": f"Basic {REMOTE.token}"}, None),
        ({"Authorization": "Bearer"}, None),
        ({"Cookie": f"ray_pccl_page_1={REMOTE.token}"}, None),
        ({"Cookie": "]]]=;;="}, None),
        ({"Host": "127.0.0.1"}, None),
    ],
)
def test_elsewhere_nothing_else_opens(headers: dict[str, str], query: str | None) -> None:
    refusal = REMOTE.refusal({"Host": "10.0.0.5"} | headers, query)
    assert refusal is not None
    assert refusal.status == 401


def test_an_address_everywhere_is_not_loopback() -> None:
    assert not Gate("0.0.0.0", 1, "t").open_to_all
    assert not Gate("::", 1, "t").open_to_all


def test_the_address_has_the_token_only_where_it_is_needed() -> None:
    assert url_of("127.0.0.1", 48149, None) == "http://127.0.0.1:48149/"
    assert url_of("::1", 48149, "abc") == "http://[::1]:48149/?token=abc"
