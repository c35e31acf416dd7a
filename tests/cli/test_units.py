from __future__ import annotations

import pytest

from ray_pccl.cli import units
from ray_pccl.errors import SettingsError


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.50 KiB"),
        (64 << 20, "64 MiB"),
        (10.25 * 2**30, "10.2 GiB"),
    ],
)
def test_sizes_are_in_powers_of_1024(number: float, text: str) -> None:
    assert units.memory(number) == text


@pytest.mark.parametrize(
    ("number", "text"), [(999, "999 B/s"), (1_250_000_000, "1.25 GB/s"), (118e6, "118 MB/s"), (999_999, "1.00 MB/s")]
)
def test_rates_are_in_powers_of_1000_and_never_have_four_digits(number: float, text: str) -> None:
    assert units.rate(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0015, "1.5 ms"),
        (0.25, "250 ms"),
        (0.9999, "1.0 s"),
        (12, "12 s"),
        (99.9, "1 min 39 s"),
        (7260, "2 h 1 min"),
        (120, "2 min"),
        (90000, "1 d 1 h"),
        (-1, "0.0 ms"),
    ],
)
def test_durations_have_their_two_largest_units(seconds: float, text: str) -> None:
    assert units.duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4096", 4096),
        ("4KiB", 4096),
        ("4k", 4096),
        ("4 K", 4096),
        ("1kb", 1000),
        ("1.5MiB", 3 << 19),
        ("2GB", 2 * 10**9),
        ("17b", 17),
        ("1TiB", 1 << 40),
    ],
)
def test_a_size_is_read_as_people_write_it(text: str, number: int) -> None:
    assert units.parse_size(text) == number


@pytest.mark.parametrize("text", ["", "x", "4x", "-1", "1.2.3", "4iB", "KiB", "1 000"])
def test_what_is_no_size_is_said_to_be_none(text: str) -> None:
    with pytest.raises(SettingsError, match="is no size"):
        units.parse_size(text)


def test_a_rate_is_a_size_a_second() -> None:
    assert units.parse_rate("500MB/s") == units.parse_rate("500MB") == 5e8


def test_numbers_and_nouns_agree() -> None:
    assert [units.several(n, "retry") for n in (0, 1, 2)] == ["0 retries", "1 retry", "2 retries"]
    assert units.several(2, "address") == "2 addresses"
    assert [units.count(n) for n in (99_999, 123_456, 1_234_567, 5 * 10**9)] == ["99,999", "123k", "1.2M", "5.0G"]


def test_a_sparkline_shows_the_last_values_against_the_largest() -> None:
    assert units.sparkline([9, 0, 5, 10], 3) == "▁▅█"
    assert units.sparkline([0, 0], 3) == units.sparkline([], 3) == ""
