"""``ray-pccl start-master`` and ``ray-pccl stop``."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from ray_pccl.cli import units
from ray_pccl.cli.cluster import connected
from ray_pccl.cli.errors import NotInTimeError
from ray_pccl.cli.exit_codes import ExitCode
from ray_pccl.cli.options import Shared, console
from ray_pccl.cli.status import PATIENCE_S
from ray_pccl.errors import MasterNotFoundError, MasterUnreachableError, SettingsError
from ray_pccl.settings import Settings

_POLL_S = 0.2
_YES_NO = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def start_master(
    shared: Shared,
    dashboard_host: Annotated[
        str, typer.Option(metavar="HOST", help="What the live page listens on; 0.0.0.0 for all, with a token.")
    ] = "127.0.0.1",
    dashboard_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Its port.", show_default="48149, or any if that is taken")
    ] = None,
    no_dashboard: Annotated[bool, typer.Option("--no-dashboard", help="No live page.")] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A setting, such as heartbeat_timeout_s=0.5. Repeatable."),
    ] = None,
    wait_nodes: Annotated[int, typer.Option(min=0, metavar="N", help="First wait until N nodes are alive.")] = 0,
    timeout: Annotated[float, typer.Option(min=0.0, help="How long to wait for nodes, in seconds.")] = 300.0,
) -> int:
    """Start the master, or find the one that runs.

    It outlives this command; `ray-pccl stop` ends it.
    """
    settings = Settings.from_env(**parse_settings(set_ or []))
    with connected(shared) as ray:
        import ray_pccl
        from ray_pccl.driver.master import find_master

        _wait_for_nodes(ray, wait_nodes, timeout)
        try:
            find_master(shared.namespace)
            found = True
        except MasterNotFoundError:
            found = False
        ray_pccl.start_master(
            namespace=shared.namespace,
            settings=settings,
            dashboard_host="" if no_dashboard else dashboard_host,
            dashboard_port=dashboard_port,
        )
        report = ray_pccl.report(shared.namespace)
    out = console()
    out.print(f"The master {'was running already' if found else 'is running'} at {report.host}:{report.port}.")
    if report.dashboard:
        out.print(f"Its live page: {report.dashboard}", soft_wrap=True)
    if found and set_:
        console(stderr=True).print("Its settings are as they were: --set is for a master that starts.")
    return ExitCode.OK


def stop(
    shared: Shared,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> int:
    """End the master for good, and its groups with it.

    On a terminal it asks first. Without a master nothing is done, and the exit code is 0.
    """
    with connected(shared):
        import ray_pccl

        try:
            report = ray_pccl.report(shared.namespace, timeout_s=PATIENCE_S)
            members = sum(len(group.members) for group in report.groups)
            what = f"{units.several(len(report.groups), 'group')} with {units.several(members, 'member')}"
        except MasterUnreachableError:
            what = "it does not answer now, so what it has is not known"
        except MasterNotFoundError:
            console().print("There is no master: nothing to stop.")
            return ExitCode.OK
        asks = not yes and sys.stdin.isatty() and sys.stdout.isatty()
        if asks and not typer.confirm(f"Stop the master ({what})?"):
            console().print("It goes on.")
            return ExitCode.INTERRUPTED
        ray_pccl.stop_master(namespace=shared.namespace)
    console().print(f"The master was stopped: {what}.")
    return ExitCode.OK


def parse_settings(given: list[str]) -> dict[str, Any]:
    """The settings that were written as ``name=value``.

    Raises:
        SettingsError: One is not, or its value is neither a number nor yes or no.
    """
    values: dict[str, Any] = {}
    for text in given:
        name, separator, value = (part.strip() for part in text.partition("="))
        if not separator or not name or not value:
            raise SettingsError(f"--set {text!r} must be name=value, such as heartbeat_timeout_s=0.5")
        try:
            values[name] = _YES_NO[value.lower()] if value.lower() in _YES_NO else float(value)
        except ValueError:
            raise SettingsError(f"--set {name}: {value!r} must be a number, or true or false") from None
    return values


def _wait_for_nodes(ray: Any, number: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while (alive := sum(node["Alive"] for node in ray.nodes())) < number:
        if time.monotonic() >= deadline:
            raise NotInTimeError(f"{alive} of {number} nodes are alive after {timeout_s:g} s")
        time.sleep(_POLL_S)
