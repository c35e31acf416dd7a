"""The commands of ``ray-pccl``, and how it ends: with an exit code, and at most one line about what went wrong."""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from ray_pccl import __version__
from ray_pccl.cli.bench.command import bench
from ray_pccl.cli.doctor.command import doctor
from ray_pccl.cli.evict import evict
from ray_pccl.cli.exit_codes import MEANINGS, ExitCode, code_of
from ray_pccl.cli.launch import launch
from ray_pccl.cli.master import start_master, stop
from ray_pccl.cli.options import Shared, command, stop_writing
from ray_pccl.cli.status import status
from ray_pccl.errors import MasterNotFoundError, PCCLError

NAME = "ray-pccl"
UsageProblem: type[Exception] = typer.BadParameter.__mro__[2]
"""The base of all that typer raises for a command line that makes no sense, in every version of it."""

app = typer.Typer(
    name=NAME,
    help="Masters and groups of ray_pccl, on a running Ray cluster.",
    epilog="Exit codes: " + ", ".join(f"{code.value} = {meaning}" for code, meaning in MEANINGS.items()) + ".",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
_COMMANDS: dict[str, Callable[..., int]] = {
    "status": status,
    "start-master": start_master,
    "stop": stop,
    "evict": evict,
    "doctor": doctor,
    "bench": bench,
    "launch": launch,
}
for _name, _function in _COMMANDS.items():
    app.command(_name)(command(_function))


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"{NAME} {__version__}")
        raise typer.Exit


@app.callback()
def _before_the_command(
    context: typer.Context,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Ray's address, such as 10.0.0.1:6379; without it RAY_ADDRESS, else the cluster of this node.",
        ),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The Ray namespace of the master; without it RAY_PCCL_NAMESPACE, else ray_pccl.",
        ),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Say the version.")
    ] = False,
) -> None:
    context.ensure_object(Shared).say(address, namespace, debug)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line, and returns its exit code. Errors are a line on the standard error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a sign gets another, not a traceback
    shared = Shared()
    try:
        code = typer.main.get_command(app).main(list(arguments), NAME, standalone_mode=False, obj=shared)
        sys.stdout.flush()
    except UsageProblem as problem:
        if not str(problem):  # no command at all: the help was shown
            return ExitCode.USAGE
        return _tell(_message_of(problem), ExitCode.USAGE, f"see `{_path_of(problem)} --help`")
    except typer.Abort:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        stop_writing()
        return ExitCode.OK
    except SystemExit as ended:  # such as at SIGTERM
        return ended.code if isinstance(ended.code, int) else ExitCode.FAILED
    except (Exception, KeyboardInterrupt) as error:
        if shared.debug:
            traceback.print_exc()
        return _tell_of(error)
    return int(code or 0)


def _tell_of(error: BaseException) -> int:
    code = code_of(error)
    if code is ExitCode.INTERRUPTED:
        return code
    if isinstance(error, MasterNotFoundError):
        cause = str(error).partition(":")[0]
        return _tell(f"{cause}: `{NAME} start-master` starts one, --namespace looks for it in another", code)
    if isinstance(error, PCCLError):
        return _tell(str(error), code)
    return _tell(f"{type(error).__name__}: {error}", code, "--debug shows where")


def _tell(message: str, code: ExitCode, hint: str = "") -> int:
    text = " ".join(message.split()).rstrip(".")
    typer.echo(f"{NAME}: error: {text}" + (f" ({hint})" if hint else ""), err=True)
    return code


def _message_of(problem: Exception) -> str:
    """With the name of the option that it is about."""
    made: str = getattr(problem, "format_message", problem.__str__)()
    return made


def _path_of(problem: Exception) -> str:
    context = getattr(problem, "ctx", None)
    return context.command_path if context is not None else NAME
