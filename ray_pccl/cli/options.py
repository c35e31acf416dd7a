"""The options that all commands share. They may stand before the command's name or after it."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console

PANEL = "Which cluster"


@dataclass(slots=True)
class Shared:
    """What was said before and after the command's name, taken together."""

    address: str | None = None
    namespace: str | None = None
    debug: bool = False

    def say(self, address: str | None, namespace: str | None, debug: bool) -> None:
        """What is given counts; the later word is the last."""
        self.address = address or self.address
        self.namespace = namespace or self.namespace
        self.debug = debug or self.debug


_ADDRESS_HELP = "Ray's address, such as 10.0.0.1:6379; else RAY_ADDRESS, else the cluster of this node."
_NAMESPACE_HELP = "The Ray namespace of the master; else RAY_PCCL_NAMESPACE, else ray_pccl."
Address = Annotated[str | None, typer.Option(help=_ADDRESS_HELP, metavar="ADDRESS", rich_help_panel=PANEL)]
Namespace = Annotated[str | None, typer.Option(help=_NAMESPACE_HELP, metavar="NAME", rich_help_panel=PANEL)]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=PANEL)]
_SHARED: dict[str, tuple[Any, Any]] = {
    "address": (Address, None),
    "namespace": (Namespace, None),
    "debug": (Debug, False),
}


def command(function: Callable[..., int]) -> Callable[..., int]:
    """Gives a command the shared options; it gets them as its first argument, in one piece."""

    @functools.wraps(function)
    def call(context: typer.Context, **given: Any) -> int:
        shared: Shared = context.obj
        shared.say(*(given.pop(name) for name in _SHARED))
        try:
            return function(shared, **given)
        except BrokenPipeError:
            stop_writing()
            return 0

    own = inspect.signature(function, eval_str=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    first = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    mine = [parameter.replace(kind=keyword) for parameter in list(own.parameters.values())[1:]]
    shared = [
        inspect.Parameter(name, keyword, default=default, annotation=annotation)
        for name, (annotation, default) in _SHARED.items()
    ]
    parameters = [first, *mine, *shared]
    # typer reads the one or the other, depending on its version.
    call.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Rich would end the program with 1, which has another meaning here."""
        raise BrokenPipeError


def console(*, stderr: bool = False) -> Console:
    """Where a command writes: no colours that nobody asked for, and no numbers coloured by guesswork."""
    return _Console(stderr=stderr, highlight=False, emoji=False, markup=False)


def stop_writing() -> None:
    """Who read our output has seen enough, which is no error: what is still to be written goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
