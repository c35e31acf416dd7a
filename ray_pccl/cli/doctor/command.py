"""``ray-pccl doctor``: what is wrong with this cluster, and how it is cured."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.text import Text

from ray_pccl.cli import units
from ray_pccl.cli.cluster import connected
from ray_pccl.cli.exit_codes import ExitCode
from ray_pccl.cli.options import Shared, console

if TYPE_CHECKING:
    from ray_pccl.cli.doctor.checks import Finding

_MARKS = {
    "ok": ("ok", "green"),
    "note": ("note", "cyan"),
    "warning": ("warning", "yellow"),
    "problem": ("PROBLEM", "red"),
}
_MARK_WIDTH, _CHECK_WIDTH = 9, 15


def doctor(
    shared: Shared,
    as_json: Annotated[bool, typer.Option("--json", help="The findings and the facts as JSON.")] = False,
    timeout: Annotated[float, typer.Option(min=1.0, help="How long each node may take to answer, in seconds.")] = 30.0,
) -> int:
    """Examine every node, and say what is wrong and how it is cured.

    Looked at are: the network between the nodes, the master, versions, shared memory, limits, clocks. Exits with 1 if
    there is a problem; notes and warnings are none.
    """
    from ray_pccl.cli.doctor.checks import Severity, examine, worst
    from ray_pccl.cli.doctor.collecting import Examination

    told = console(stderr=True)
    with connected(shared) as ray, Examination(ray, shared.namespace, timeout) as examination:
        if told.is_terminal and not as_json:
            with told.status("Examining the nodes"):
                facts = examination.collect()
        else:
            facts = examination.collect()
    findings = examine(facts)
    if as_json:
        sys.stdout.write(msgspec.json.encode({"findings": findings, "facts": facts}).decode() + "\n")
    else:
        console().print(view(findings))
    return ExitCode.FOUND_WRONG if worst(findings) is Severity.PROBLEM else ExitCode.OK


def view(findings: list[Finding]) -> RenderableType:
    """The findings, each with its cure below it, and a line that sums them up."""
    parts: list[RenderableType] = []
    for finding in findings:
        word, style = _MARKS[finding.severity.value]
        line = Text(f"{word:<{_MARK_WIDTH}}", style=style)
        line.append(f"{finding.check:<{_CHECK_WIDTH}}", style="bold")
        indent = _MARK_WIDTH + _CHECK_WIDTH
        named = finding.severity.value != "ok" and finding.where != finding.check
        told = Text(f"{finding.where}: {finding.what}" if named else finding.what)
        if finding.cure:
            told.append(f"\n-> {finding.cure}", style="dim")
        parts.append(_beside(line, told, indent))
    numbers = [(word, sum(finding.severity.value == word for finding in findings)) for word in _MARKS if word != "ok"]
    found = [units.several(number, word) for word, number in reversed(numbers) if number]
    return Group(*parts, "", (", ".join(found) if found else "Nothing is wrong") + ".")


def _beside(left: Text, right: Text, indent: int) -> RenderableType:
    from rich.table import Table

    grid = Table.grid(padding=0)
    grid.add_column(width=indent, no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(left, right)
    return grid
