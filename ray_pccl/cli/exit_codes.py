"""Exit codes: part of the command line's promise, so they never change their meaning."""

from __future__ import annotations

from enum import IntEnum

from ray_pccl.cli.errors import NoClusterError, NotFoundError, WrongResultError
from ray_pccl.errors import MasterError, NotAMemberError, PCCLError, PlottingUnavailableError, SettingsError


class ExitCode(IntEnum):
    """What a script reads in ``$?``."""

    OK = 0
    FOUND_WRONG = 1
    USAGE = 2
    NO_CLUSTER = 3
    NO_MASTER = 4
    NOT_FOUND = 5
    TIMEOUT = 6
    FAILED = 7
    INTERRUPTED = 130


MEANINGS = {
    ExitCode.OK: "done",
    ExitCode.FOUND_WRONG: "found wrong (doctor, bench, launch)",
    ExitCode.USAGE: "usage",
    ExitCode.NO_CLUSTER: "no Ray cluster reachable",
    ExitCode.NO_MASTER: "no master, or it does not answer",
    ExitCode.NOT_FOUND: "no such peer or group",
    ExitCode.TIMEOUT: "not in time",
    ExitCode.FAILED: "failed otherwise",
    ExitCode.INTERRUPTED: "Ctrl-C, or answered with no",
}


def code_of(error: BaseException) -> ExitCode:
    """The exit code that an error ends the program with."""
    for kinds, code in _CODES:
        if isinstance(error, kinds):
            return code
    return ExitCode.FAILED


_CODES: tuple[tuple[tuple[type[BaseException], ...], ExitCode], ...] = (
    ((KeyboardInterrupt,), ExitCode.INTERRUPTED),
    ((WrongResultError,), ExitCode.FOUND_WRONG),
    ((SettingsError, PlottingUnavailableError), ExitCode.USAGE),
    ((NoClusterError,), ExitCode.NO_CLUSTER),
    ((MasterError,), ExitCode.NO_MASTER),
    ((NotFoundError, NotAMemberError), ExitCode.NOT_FOUND),
    ((TimeoutError,), ExitCode.TIMEOUT),
    ((PCCLError,), ExitCode.FAILED),
)
"""The first that fits counts: an unreachable master is no master, though its error is a connection's, too."""
