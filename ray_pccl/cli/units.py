"""Numbers as people read and write them."""

from __future__ import annotations

import re

from ray_pccl.errors import SettingsError

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_BARS = "▁▂▃▄▅▆▇█"


def memory(number: float) -> str:
    """Bytes in powers of 1024: how large something is."""
    return _scaled(number, 1024, _BINARY)


def volume(number: float) -> str:
    """Bytes in powers of 1000: how much has moved."""
    return _scaled(number, 1000, _DECIMAL)


def rate(bytes_per_s: float) -> str:
    """Bytes per second, in powers of 1000."""
    return f"{volume(bytes_per_s)}/s"


def _scaled(number: float, step: int, units: tuple[str, ...]) -> str:
    power = 0
    # What would be rounded to four digits is one of the next unit.
    while number >= step * 0.9995 and power < len(units) - 1:
        number /= step
        power += 1
    digits = 0 if power == 0 or number >= 99.95 or number == int(number) else 1 if number >= 9.995 else 2
    return f"{number:.{digits}f} {units[power]}"


def count(number: int) -> str:
    """A number in at most six places."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e5, "k")):
        if number >= size:
            scaled = number / (1e3 if unit == "k" else size)
            return f"{scaled:.0f}{unit}" if scaled >= 99.95 else f"{scaled:.1f}{unit}"
    return f"{number:,}"


def duration(seconds: float) -> str:
    """A stretch of time in its two largest units."""
    seconds = max(0.0, seconds)
    if seconds < 0.9995:
        return f"{1000 * seconds:.{1 if seconds < 0.00995 else 0}f} ms"
    if seconds < 99.5:
        return f"{seconds:.{1 if seconds < 9.95 else 0}f} s"
    for size, unit, part_size, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            rest = int(seconds % size // part_size)
            return f"{int(seconds // size)} {unit} {rest} {part}" if rest else f"{int(seconds // size)} {unit}"
    raise AssertionError(seconds)


def milliseconds(seconds: float) -> str:
    """A short time to three digits, always in milliseconds, so that a column of them can be compared."""
    scaled = 1000 * seconds
    digits = 3 if scaled < 1 else 2 if scaled < 10 else 1 if scaled < 100 else 0
    return f"{scaled:.{digits}f}"


def several(number: int, what: str) -> str:
    """``1 member``, ``2 members``."""
    if number != 1:
        what = f"{what[:-1]}ies" if what.endswith("y") else f"{what}{'es' if what.endswith('s') else 's'}"
    return f"{count(number)} {what}"


def sparkline(values: list[float], width: int) -> str:
    """The last values as bars against the largest of them."""
    values = values[-width:]
    top = max(values, default=0.0)
    if top <= 0:
        return ""
    return "".join(_BARS[round(max(0.0, value) / top * (len(_BARS) - 1))] for value in values)


def parse_size(text: str) -> int:
    """Bytes from ``4096``, ``4KiB``, ``4k``, ``1.5MB``. ``K`` alone means 1024, as everywhere.

    Raises:
        SettingsError: It is no size.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or (found[3] and not found[2]):
        raise SettingsError(f"{text!r} is no size: write a number of bytes, or such as 4KiB, 64MiB, 1GB")
    number, prefix, binary = found.groups()
    decimal = not binary and text.strip().lower().endswith("b") and prefix
    power = " kmgt".index(prefix.lower()) if prefix else 0
    step: int = 1000 if decimal else 1024
    return round(float(number) * float(step**power))


def parse_rate(text: str) -> float:
    """Bytes per second from ``500MB/s``; the ``/s`` may be left out."""
    return float(parse_size(text.strip().removesuffix("/s")))
