"""Where a torch program is told to find its master."""

from __future__ import annotations

import pytest

from ray_pccl.control.endpoint import DEFAULT_PORT, Endpoint
from ray_pccl.errors import SettingsError
from ray_pccl.torch.addressing import read_endpoint

KEY, OTHER = "0a" * 32, "0b" * 32


@pytest.mark.parametrize(
    ("text", "key", "environ", "expected"),
    [
        (f"host:1#{KEY}", "", {}, ("host", 1, KEY)),
        ("host:1", KEY, {}, ("host", 1, KEY)),
        ("host:1", "", {"RAY_PCCL_KEY": KEY}, ("host", 1, KEY)),
        ("host:1", KEY, {"RAY_PCCL_KEY": OTHER}, ("host", 1, KEY)),
        ("host", KEY, {}, ("host", DEFAULT_PORT, KEY)),
        ("[::1]:1", KEY, {}, ("::1", 1, KEY)),
        ("[::1]", KEY, {}, ("::1", DEFAULT_PORT, KEY)),
        ("", "", {"RAY_PCCL_MASTER": f"host:1#{KEY}"}, ("host", 1, KEY)),
        ("", "", {"RAY_PCCL_MASTER": "host:1", "RAY_PCCL_KEY": KEY}, ("host", 1, KEY)),
        ("host:1", "", {"RAY_PCCL_MASTER": f"host:1#{KEY}"}, ("host", 1, KEY)),
        (f"host:1#{KEY}", "", {"RAY_PCCL_MASTER": f"other:2#{OTHER}"}, ("host", 1, KEY)),
    ],
)
def test_what_is_left_out_comes_from_the_environment(text, key, environ, expected) -> None:
    host, port, shown = expected
    assert read_endpoint(text, key, environ) == Endpoint(host, port, bytes.fromhex(shown))


def test_no_master_is_named() -> None:
    assert read_endpoint("", KEY, {"RAY_PCCL_KEY": KEY}) is None


def test_a_master_without_its_key_is_an_error_that_says_what_to_set_and_another_masters_key_is_not_its() -> None:
    with pytest.raises(SettingsError, match=r"RAY_PCCL_KEY.*--rdzv-conf=key"):
        read_endpoint("host:1", "", {"RAY_PCCL_MASTER": f"other:1#{KEY}"})
