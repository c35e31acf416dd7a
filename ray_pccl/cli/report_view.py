"""The master's report as people read it: a pure function from a report, and a width, to what rich prints."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ray_pccl.cli import units
from ray_pccl.reports import GroupReport, Happening, HappeningKind, InFlight, MasterReport, MemberReport

MEMBERS_SHOWN = 32
WIDE = 116
"""Columns from which on each member's troubles have columns of their own."""
SILENT_S = 1.0
"""A member that was not heard of for longer is marked."""
INDENT = 2
HASH = 9
"""What a host's id ends with: a dash and eight hexadecimal digits."""
LABEL, LONGEST = 10, 22
_PEER_ID = re.compile(r"(?:.*-[0-9a-f]{8}-(?P<pid>[0-9]+)|(?P<label>.+))-(?P<random>[0-9a-f]{8})[0-9a-f]{8}")
_GOOD = {HappeningKind.JOINED, HappeningKind.RECOVERED, HappeningKind.RETURNED}
_BAD = {HappeningKind.LOST}


def whole(
    report: MasterReport,
    *,
    width: int,
    events: int = 0,
    members: int | None = MEMBERS_SHOWN,
    away_s: float | None = None,
) -> RenderableType:
    """All of a report. `members` is how many of each group are shown; None: all.

    With `away_s` the master was not heard of for so long: the report is its last word.
    """
    parts: list[RenderableType] = [_master(report, away_s)]
    if not report.groups:
        parts += ["", Text("No groups: nobody has joined one yet.", style="dim")]
    for group in report.groups:
        parts += ["", one_group(group, width=width, members=members)]
    if events:
        parts += ["", timeline(report.happenings[-events:])]
    return Group(*parts)


def _master(report: MasterReport, away_s: float | None) -> RenderableType:
    head = Text.assemble(("master ", "bold"), f"{report.host}:{report.port}", style="")
    if away_s is None:
        again = f", start {report.boot}" if report.boot > 1 else ""
        up = units.duration(report.at - report.booted_at)
        head.append(f", up {up}{again}, pid {report.pid}, version {report.version}", style="dim")
    else:
        head.append(f", away for {away_s:.0f} s: below is its last word", style="bold yellow")
    if not report.dashboard:
        return head
    page = Text.assemble(("page   ", "bold"), report.dashboard, overflow="fold")
    return Group(head, page)


# ----------------------------------------------------------------------------------------------------------- a group


def one_group(group: GroupReport, *, width: int, members: int | None = MEMBERS_SHOWN) -> RenderableType:
    """A group: what it is, who is in it, what is in flight."""
    parts: list[RenderableType] = [_title(group)]
    parts += map(_indented, _facts(group, width))
    if group.members:
        parts.append(_indented(_members(group, width=width - INDENT, shown=members)))
    parts += [_indented(_in_flight(operation, group)) for operation in group.in_flight]
    return Group(*parts)


def _indented(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 0, INDENT), expand=False)


def _title(group: GroupReport) -> Text:
    calm = group.phase == "steady"
    title = Text.assemble((group.name or "(unnamed)", "bold"), f"  epoch {group.epoch}, ")
    title.append(group.phase, style="green" if calm else "yellow")
    if group.closed:
        title.append(", closed", style="yellow")
    hosts = len({member.host for member in group.members})
    where = f"{units.several(len(group.members), 'member')} on {units.several(hosts, 'host')}"
    title.append(f"; {where if group.members else 'no members'}")
    most = f", at most {group.max_world_size}" if group.max_world_size is not None else ""
    title.append(f" (at least {group.min_world_size}{most})", style="dim")
    return title


def _facts(group: GroupReport, width: int) -> list[Text]:
    lines = []
    if group.history and group.members:
        last = group.history[-1]
        line = Text(f"{units.rate(last.bytes_per_s)}, {last.operations_per_s:.3g} operations/s  ")
        line.append(units.sparkline([sample.bytes_per_s for sample in group.history], width // 3), style="cyan")
        lines.append(line)
    told = []
    if group.bottleneck is not None:
        age = f", measured {units.duration(group.age_s)} ago" if group.age_s is not None else ""
        told.append(f"slowest edge {units.rate(group.bottleneck)}{age}")
    named = (("recovery", group.recoveries), ("eviction", group.evictions))
    summed = ("abort", "aborts"), ("retry", "retries"), ("failure", "failures")
    counts = [*named, *((what, sum(getattr(member, name) for member in group.members)) for what, name in summed)]
    told += [", ".join(units.several(number, what) for what, number in counts if number)]
    if any(told):
        lines.append(Text("; ".join(filter(None, told)), style="dim"))
    if group.waiting:
        names = ", ".join(map(short_peer, group.waiting[:4]))
        more = f" and {len(group.waiting) - 4} more" if len(group.waiting) > 4 else ""
        lines.append(Text(f"{len(group.waiting)} waiting: {names}{more}", style="yellow"))
    return lines


def _members(group: GroupReport, *, width: int, shown: int | None) -> RenderableType:
    wide = width >= WIDE
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("peer", no_wrap=True, min_width=8, ratio=None)
    table.add_column("host", no_wrap=True, min_width=6)
    for name in ("to next", "ops", "data", "in flight"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("aborts", "retries", "failures", "kept") if wide else ():
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("silent", justify="right", no_wrap=True)
    members = group.members
    hosts = short_hosts([member.host for member in members])
    rows = range(len(members)) if shown is None or len(members) <= shown + 1 else range(shown)
    for rank in rows:
        member, following = members[rank], members[(rank + 1) % len(members)]
        troubles = [
            units.count(number) if number else "" for number in (member.aborts, member.retries, member.failures)
        ]
        kept = units.memory(member.store_bytes) if member.store_bytes else ""
        table.add_row(
            str(rank),
            short_peer(member.peer_id),
            hosts[member.host],
            _edge(member, following),
            units.count(member.operations),
            units.volume(member.bytes),
            units.count(member.in_flight) if member.in_flight else "",
            *((*troubles, kept) if wide else ()),
            Text(f"{member.silent_s:.1f} s", style="yellow" if member.silent_s > SILENT_S else ""),
        )
    hidden = len(members) - len(rows)
    if not hidden:
        return table
    return Group(table, Text(f"      and {hidden} more; --all shows them", style="dim"))


def _edge(member: MemberReport, following: MemberReport) -> str:
    if member.rate_to_next is not None:
        return units.rate(member.rate_to_next)
    if member is following:
        return ""
    return "memory" if member.host == following.host else "?"


def _in_flight(operation: InFlight, group: GroupReport) -> Text:
    text = Text.assemble(("in flight  ", "dim"), operation.what)
    text.append(f"  tag {operation.tag}, {operation.members} of {units.several(len(group.members), 'member')}")
    return text.append(f", {units.duration(operation.seconds)}", style="yellow" if operation.seconds > 10 else "")


# ---------------------------------------------------------------------------------------------------------- timeline


def timeline(happenings: Sequence[Happening]) -> RenderableType:
    """What happened, the last at the bottom."""
    if not happenings:
        return Text("Nothing has happened yet.", style="dim")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("at", no_wrap=True)
    table.add_column("group", no_wrap=True)
    table.add_column("what", no_wrap=True)
    timed = any(happening.took_ms is not None for happening in happenings)
    if timed:
        table.add_column("took", justify="right", no_wrap=True)
    table.add_column("", ratio=1, overflow="fold")
    for happening in happenings:
        style = "green" if happening.kind in _GOOD else "red" if happening.kind in _BAD else ""
        took = units.duration(happening.took_ms / 1000) if happening.took_ms is not None else ""
        table.add_row(
            time.strftime("%H:%M:%S", time.localtime(happening.at)),
            happening.group,
            Text(happening.kind.value, style=style),
            *([took] if timed else []),
            _details(happening),
        )
    return table


def _details(happening: Happening) -> Text:
    """Who it befell; or, where it is the whole group's, its epoch and size. Then why."""
    about = ""
    if happening.peer_id:
        about = short_peer(happening.peer_id)
    elif happening.epoch:
        about = f"epoch {happening.epoch}, {units.several(happening.members, 'member')}"
    text = Text(about)
    if happening.reason:
        text.append(("; " if about else "") + happening.reason, style="dim")
    return text


# ------------------------------------------------------------------------------------------------------------- names


def short_peer(peer_id: str) -> str:
    """A part of the id that tells it apart and that ``evict`` takes: half of its random end, and what is before it.

    That is the process, if the id was made of that; else a label, of which the last places tell most.
    """
    found = _PEER_ID.fullmatch(peer_id)
    if found is None:
        return peer_id if len(peer_id) <= LONGEST else f"…{peer_id[1 - LONGEST :]}"
    label = found["pid"] or found["label"]
    return f"{label if len(label) <= LABEL else '…' + label[1 - LABEL :]}-{found['random']}"


def short_hosts(hosts: Sequence[str]) -> dict[str, str]:
    """The hosts' names, without the hash at their ends where that leaves them different."""
    short = {host: host[:-HASH] if len(host) > HASH and host[-HASH] == "-" else host for host in hosts}
    taken = list(short.values())
    return {host: name if taken.count(name) == 1 else host for host, name in short.items()}
