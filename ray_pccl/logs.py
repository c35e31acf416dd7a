"""Logs that name the group, the epoch, the operation and the peer they are about.

Every line of ours about a group carries these as fields of its record, so that Ray's own JSON logging
(``ray.LoggingConfig(encoding="JSON")``) and any other handler finds them. `configure_logging` shows them without
either: as text, or as JSON, a line each. In the master's actor, and in peers, the environment does the same:
``RAY_PCCL_LOG_LEVEL=INFO`` and ``RAY_PCCL_LOG_FORMAT=json``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import IO

from ray_pccl.errors import SettingsError

FIELDS = ("group", "epoch", "operation", "peer")
LEVEL_VARIABLE = "RAY_PCCL_LOG_LEVEL"
FORMAT_VARIABLE = "RAY_PCCL_LOG_FORMAT"
_FORMATS = ("text", "json")


def _fields(record: logging.LogRecord) -> dict[str, object]:
    found = {name: getattr(record, name, None) for name in FIELDS}
    return {name: value for name, value in found.items() if value not in (None, "")}


class TextFormatter(logging.Formatter):
    """A line for people: time, level, where from, the fields, the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s%(about)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        record.about = "".join(f" {name}={value}" for name, value in _fields(record).items())
        return super().format(record)


class JsonFormatter(logging.Formatter):
    """A JSON object a line, for programs."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line = {
            "time": round(record.created, 6),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
            **_fields(record),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _OurHandler(logging.StreamHandler[IO[str]]):
    """Told apart from handlers of others, so that configuring twice does not show lines twice."""


def configure_logging(
    level: int | str = logging.INFO, *, json_lines: bool = False, stream: IO[str] | None = None
) -> None:
    """Shows the library's log of this process, from `level` on, on `stream` (stderr if not given).

    Args:
        level: As in `logging`: ``"INFO"`` shows every epoch, loss and retry.
        json_lines: A JSON object a line, instead of text.
        stream: Where to.

    Raises:
        SettingsError: No such level.
    """
    logger = logging.getLogger("ray_pccl")
    try:
        logger.setLevel(level)
    except (ValueError, TypeError):
        raise SettingsError(f"a log level is one of DEBUG, INFO, WARNING, ERROR, not {level!r}") from None
    for handler in [handler for handler in logger.handlers if isinstance(handler, _OurHandler)]:
        logger.removeHandler(handler)
    ours = _OurHandler(stream if stream is not None else sys.stderr)
    ours.setFormatter(JsonFormatter() if json_lines else TextFormatter())
    logger.addHandler(ours)
    logger.propagate = False


def configure_from_env() -> None:
    """Does what the environment says, if it says something and the program has not called `configure_logging`."""
    level, form = os.environ.get(LEVEL_VARIABLE), os.environ.get(FORMAT_VARIABLE)
    if level is None and form is None:
        return
    if form not in (None, *_FORMATS):
        raise SettingsError(f"{FORMAT_VARIABLE}={form!r} must be one of {', '.join(_FORMATS)}")
    if any(isinstance(handler, _OurHandler) for handler in logging.getLogger("ray_pccl").handlers):
        return
    configure_logging((level or "INFO").upper(), json_lines=form == "json")
