"""``ray-pccl status``: what the master tells, once or again and again."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
import typer

from ray_pccl.cli.cluster import connected
from ray_pccl.cli.errors import NotFoundError
from ray_pccl.cli.exit_codes import ExitCode
from ray_pccl.cli.options import Shared, console
from ray_pccl.errors import SettingsError
from ray_pccl.reports import MasterReport, to_json

SHORTEST_S = 0.1
PATIENCE_S = 15.0
"""How long a master may take that is just being restarted."""


def status(
    shared: Shared,
    group: Annotated[str | None, typer.Option("--group", "-g", metavar="NAME", help="Only this group.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The report as JSON; with --watch, one in each line.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show it again and again; Ctrl-C ends it, with exit code 0.")
    ] = False,
    interval: Annotated[float, typer.Option(metavar="SECONDS", help="How often, with --watch.")] = 1.0,
    events: Annotated[int, typer.Option("--events", "-e", min=0, metavar="N", help="The last N happenings, too.")] = 0,
    every_member: Annotated[bool, typer.Option("--all", "-a", help="All members, also of large groups.")] = False,
) -> int:
    """Show groups, members, bandwidths, operations in flight.

    Members stand in the order of the ring; `to next` is the bandwidth to the one below. --json is for programs.
    """
    if interval < SHORTEST_S:
        raise SettingsError(f"--interval must be {SHORTEST_S:g} seconds or more, not {interval:g}")
    with connected(shared):
        import ray_pccl
        from ray_pccl.cli import report_view, watching

        def ask() -> MasterReport:
            return only(ray_pccl.report(shared.namespace, timeout_s=PATIENCE_S), group)

        if watch:
            watching.Watching(ask, interval, events=events, every_member=every_member, as_json=as_json).run()
        elif as_json:
            write_json(ask())
        else:
            out = console()
            shown = None if every_member else report_view.MEMBERS_SHOWN
            out.print(report_view.whole(ask(), width=out.width, events=events, members=shown))
    return ExitCode.OK


def only(report: MasterReport, group: str | None) -> MasterReport:
    """The report, of one group alone if one is named.

    Raises:
        NotFoundError: There is no such group.
    """
    if group is None:
        return report
    groups = tuple(found for found in report.groups if found.name == group)
    if not groups:
        names = tuple(found.name for found in report.groups)
        listed = f"there are {', '.join(names)}" if names else "there is none at all"
        raise NotFoundError(f"no group {group!r}; {listed}", candidates=names)
    happenings = tuple(happening for happening in report.happenings if happening.group in (group, ""))
    return msgspec.structs.replace(report, groups=groups, happenings=happenings)


def write_json(report: MasterReport) -> None:
    """The report on the standard output, as one line."""
    sys.stdout.write(to_json(report).decode() + "\n")
    sys.stdout.flush()
