"""The pictures of the notebooks, in colours that most colour-blind people can tell apart (Okabe and Ito's)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter

from ray_pccl import Happening, HappeningKind, MasterReport

if TYPE_CHECKING:
    from lab import Fault, Lab
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, GREY = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#777777",
)  # fmt: skip
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED, YELLOW)
MARKS: Mapping[HappeningKind, tuple[str, str]] = {
    HappeningKind.JOINED: ("^", GREEN),
    HappeningKind.LEFT: ("v", GREY),
    HappeningKind.LOST: ("X", RED),
    HappeningKind.RECOVERED: ("o", BLUE),
    HappeningKind.EPOCH: ("|", GREY),
    HappeningKind.BOOTED: ("s", ORANGE),
    HappeningKind.RETURNED: ("D", PURPLE),
}
"""What a timeline shows, from top to bottom, each by a mark of its own."""
NEAR = 0.03
"""Marks of one kind that are nearer than this share of the axis are named together."""

plt.rcParams.update(
    {
        "figure.dpi": 90,
        "figure.constrained_layout.use": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
        "font.size": 10,
    }
)


def overview() -> None:
    """Who is who: the driver, a ring of actors, the master beside it."""
    _, axes = plt.subplots(figsize=(8, 3.6))
    axes.set(xlim=(-5.2, 5.2), ylim=(-1.7, 1.7))
    axes.set_aspect("equal")
    axes.set_axis_off()
    places = [(1.25 * math.cos(turn), 1.25 * math.sin(turn)) for turn in (2.4, 0.74, -0.74, -2.4)]
    arrow = {"arrowstyle": "-|>", "color": BLUE, "lw": 2.5, "shrinkA": 15, "shrinkB": 15, "mutation_scale": 16}
    for place, following in zip(places, places[1:] + places[:1], strict=True):
        axes.annotate("", following, place, arrowprops={**arrow, "connectionstyle": "arc3,rad=-0.2"})
    for rank, (x, y) in enumerate(places):
        _ball(axes, x, y, f"{rank}", BLUE)
    axes.text(0, 0, "tensors go round,\nhost memory or TCP", ha="center", va="center", color=BLUE, fontsize=9)
    _box(axes, -3.9, 0, "driver\n(ObjectRefs)", GREY)
    _box(axes, 3.9, 0, "master\n(a detached actor)", RED)
    thin = {"arrowstyle": "<|-|>", "lw": 1.2, "shrinkA": 2, "shrinkB": 17}
    for x, y in places:
        side, colour = (2.85, RED) if x > 0 else (-3.1, GREY)
        axes.annotate("", (x, y), (side, 0), arrowprops={**thin, "color": colour})
    axes.text(2.6, -1.45, "who is in? who has died?\nnever a tensor", ha="center", color=RED, fontsize=9)
    axes.text(-2.6, -1.45, "asks for collectives,\nnever waits for them", ha="center", color=GREY, fontsize=9)
    axes.text(0, 1.5, "peers: actors of yours, ranks 0 to 3", ha="center", color=BLUE, fontsize=10)
    plt.show()


def _ball(axes: Axes, x: float, y: float, text: str, colour: str) -> None:
    style = {"boxstyle": "circle,pad=0.45", "facecolor": colour, "edgecolor": "black"}
    axes.text(x, y, text, ha="center", va="center", color="white", fontweight="bold", bbox=style, zorder=3)


def _box(axes: Axes, x: float, y: float, text: str, colour: str) -> None:
    style = {"boxstyle": "round,pad=0.6", "facecolor": "white", "edgecolor": colour, "linewidth": 2}
    axes.text(x, y, text, ha="center", va="center", bbox=style, zorder=3)


def contributions(values: Mapping[str, float], averages: Sequence[tuple[str, Mapping[str, float], float]]) -> None:
    """A panel per average: what each contributed (a bar), who did not (hatched), and what came out (a line)."""
    _, panels = plt.subplots(1, len(averages), figsize=(4.2 * len(averages), 3.2), sharey=True)
    for axes, (title, contributed, average) in zip(panels, averages, strict=True):
        for place, (name, value) in enumerate(values.items()):
            style = {"color": BLUE} if name in contributed else {"facecolor": "none", "edgecolor": GREY, "hatch": "//"}
            axes.bar(place, value, width=0.6, **style)
            if name not in contributed:
                axes.text(place, value + 0.1, "dead", ha="center", va="bottom", color=GREY)
        axes.axhline(average, color=RED, linewidth=2)
        axes.text(-0.4, average + 0.1, f"average {average:g}", color=RED, va="bottom", fontweight="bold")
        axes.set(title=title, xticks=range(len(values)), xticklabels=list(values), xlabel="actor", ylim=(0, 7))
    panels[0].set_ylabel("gradient")
    plt.show()


def healing(history: Mapping[str, Sequence[tuple[int, int, float, float]]]) -> None:
    """Weights over revisions, by peer: revision, bytes received, the weight before the sync and after it."""
    _, axes = plt.subplots(figsize=(7.5, 3.8))
    for place, (name, steps) in enumerate(history.items()):
        colour = PALETTE[place]
        style = {"marker": "osD^"[place % 4], "markersize": 10 - 3 * place, "linewidth": 4 - 1.4 * place}
        axes.plot([s[0] for s in steps], [s[3] for s in steps], color=colour, label=name, **style)
        for revision, received, found, healed in steps:
            if received:
                arrow = {"arrowstyle": "-|>", "color": colour, "lw": 2, "shrinkB": 6}
                axes.annotate("", (revision, healed), (revision, found), arrowprops=arrow)
                axes.plot(revision, found, style["marker"], color=colour, markersize=8, fillstyle="none")
                text = f"  {name} came with {found:g}, received {received >> 10} KiB"
                axes.text(revision, found, text, color=colour, va="center")
    axes.set(xlabel="revision of the shared state", ylabel="first weight")
    axes.margins(y=0.1)
    axes.legend(title="peer", loc="upper right")
    plt.show()


# ----------------------------------------------------------------------------------------------------- timelines


def timeline(
    axes: Axes, happenings: Sequence[Happening], began: float, labels: Mapping[str, str] | None = None
) -> None:
    """Marks on the given axes, a row for each kind of happening; `labels` gives peers shorter names."""
    kinds = {each.kind for each in happenings}
    rows = {kind: -place for place, kind in enumerate(kind for kind in MARKS if kind in kinds)}
    left, right = axes.get_xlim()
    for kind, row in rows.items():
        mark, colour = MARKS[kind]
        crowd: list[Happening] = []
        for each in (each for each in happenings if each.kind is kind and left <= each.at - began <= right):
            axes.plot(each.at - began, row, mark, color=colour, markersize=8, markeredgewidth=1.5)
            if crowd and each.at - crowd[0].at > NEAR * (right - left):
                _name(axes, crowd, began, row, labels)
                crowd = []
            crowd.append(each)
        if crowd:
            _name(axes, crowd, began, row, labels)
    axes.set(yticks=list(rows.values()), yticklabels=[kind.value for kind in rows], ylim=(0.6 - len(rows), 0.6))
    axes.set_xlabel("seconds")


def _name(axes: Axes, crowd: Sequence[Happening], began: float, row: int, labels: Mapping[str, str] | None) -> None:
    names = [_called(each.peer_id, labels) for each in crowd if each.peer_id]
    took = [f"{each.took_ms:.0f} ms" for each in crowd if each.took_ms is not None]
    epochs = [f"{each.epoch}" for each in crowd if each.kind is HappeningKind.EPOCH]
    boots = [each.reason for each in crowd if each.kind is HappeningKind.BOOTED]
    text = " ".join(sorted(set(names))) + ", ".join(took + epochs + boots)
    axes.annotate(text, (crowd[-1].at - began, row), xytext=(7, 0), textcoords="offset points", va="center", fontsize=9)


def _called(peer_id: str, labels: Mapping[str, str] | None) -> str:
    name = peer_id.rpartition("-")[0]
    return (labels or {}).get(name, name)


def groups(report: MasterReport, labels: Mapping[str, str] | None = None) -> None:
    """The members of every group over time, and the timeline of all of them."""
    began = report.happenings[0].at
    names = list(dict.fromkeys(each.group for each in report.happenings if each.group))
    _, (top, bottom) = plt.subplots(2, 1, figsize=(9, 5), sharex=True, height_ratios=[2, 3])
    for place, name in enumerate(names):
        found = [each for each in report.happenings if each.group == name]
        times = [*(each.at - began for each in found), report.at - began]
        members = [*(each.members for each in found), found[-1].members]
        top.step(times, members, where="post", color=PALETTE[place], linewidth=3 - 0.6 * place, label=name)
    top.set(ylabel="members", xlim=(-0.01 * (report.at - began), 1.03 * (report.at - began)))
    top.set_ylim(0, 0.5 + max(each.members for each in report.happenings))
    top.legend(title="group", loc="center left", bbox_to_anchor=(1.0, 0.5))
    timeline(bottom, report.happenings, began, labels)
    bottom.set_xlabel("seconds since the master booted")
    plt.show()


# ------------------------------------------------------------------------------------------------- the fault lab


def lab_record(lab: Lab, since_s: float | None = None, until_s: float | None = None) -> None:
    """How long sums took, how many there were, who was in them, and what the master told; faults are dashed."""
    sums = lab.all_sums()
    left = lab.seconds(sums[0].at) - 0.2 if since_s is None else since_s
    right = lab.seconds(sums[-1].at) + 0.2 if until_s is None else until_s
    _, panels = plt.subplots(4, 1, figsize=(10, 8), sharex=True, height_ratios=[3, 2, 2, 3.4])
    latency, rate, raster, marks = panels
    latency.set_xlim(left, right)
    sums = [each for each in sums if left <= lab.seconds(each.at) <= right]
    names = sorted({name for each in sums for name in each.names})
    for place, name in enumerate(names):
        mine = [each for each in lab.sums[name] if left <= lab.seconds(each.at) <= right]
        times = [lab.seconds(each.at) for each in mine]
        style: dict[str, Any] = {"color": _colour(name), "marker": "os^DvPX"[_number(name) % 7], "markersize": 3}
        latency.plot(times, [each.took_ms for each in mine], linestyle="", label=name, **style)
        for start, end in stretches([lab.seconds(each.at) for each in sums if name in each.names]):
            raster.plot([start, end], [place, place], color=_colour(name), linewidth=7, solid_capstyle="butt")
    latency.set(yscale="log", ylabel="one sum, ms")
    low, high = latency.get_ylim()
    latency.yaxis.set_major_locator(LogLocator(subs=(1,) if high > 300 * low else (1, 2, 5)))
    latency.yaxis.set_major_formatter("{x:g}")
    latency.yaxis.set_minor_formatter(NullFormatter())
    latency.legend(title="peer", loc="center left", bbox_to_anchor=(1.0, 0.5), markerscale=2)
    _rate(rate, [[lab.seconds(each.at) for each in mine] for mine in lab.sums.values()], left, right)
    raster.set(ylabel="in the sum", yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.4, -0.6))
    timeline(marks, lab.happenings, lab.began)
    marks.set_xlabel("seconds since the lab began")
    _faults(panels, [fault for fault in lab.faults if left <= lab.seconds(fault.at) <= right], lab)
    plt.show()


def _number(name: str) -> int:
    return ord(name) - ord("A")


def _colour(name: str) -> str:
    """The same for a peer in all pictures."""
    return PALETTE[_number(name) % len(PALETTE)]


def _faults(panels: Sequence[Axes], faults: Sequence[Fault], lab: Lab) -> None:
    """Dashed lines; their names above the first panel, higher where they would run into the one before."""
    left, right = panels[0].get_xlim()
    ends = [-math.inf] * 4
    for fault in faults:
        at = lab.seconds(fault.at)
        for axes in panels:
            axes.axvline(at, color="black", linestyle="--", linewidth=1, zorder=0)
        level = next((level for level, end in enumerate(ends) if at > end), len(ends) - 1)
        ends[level] = at + 0.012 * len(fault.what) * (right - left)
        over = panels[0].get_xaxis_transform()
        panels[0].text(at, 1.03 + 0.11 * level, fault.what, transform=over, ha="left", fontsize=9)


def _rate(axes: Axes, by_peer: Sequence[Sequence[float]], left: float, right: float, bin_s: float = 0.1) -> None:
    """Sums in a second, as the peer saw it that saw most of them."""
    first = math.floor(left / bin_s)
    bins = math.ceil(right / bin_s) - first
    counts = [0.0] * bins
    for times in by_peer:
        places = [math.floor(at / bin_s) - first for at in times]
        counts = [max(count, places.count(place) / bin_s) for place, count in enumerate(counts)]
    axes.stairs(counts, [(first + number) * bin_s for number in range(bins + 1)], color=GREY, fill=True, alpha=0.6)
    axes.set(ylabel="sums per s", ylim=(0, None))


def stretches(times: Sequence[float], gap_s: float = 0.3) -> list[tuple[float, float]]:
    """Where times follow each other closely: from the first to the last of each stretch."""
    found: list[tuple[float, float]] = []
    for at in times:
        if found and at - found[-1][1] <= gap_s:
            found[-1] = (found[-1][0], at)
        else:
            found.append((at, at))
    return found


# ------------------------------------------------------------------------------------------------ the benchmarks


def recoveries(rows: Sequence[Any], quoted: Mapping[str, Sequence[tuple[str, float]]]) -> None:
    """Every trial as a dot, its median as a line, and what is quoted of others; in milliseconds, a power per step."""
    _, axes = plt.subplots(figsize=(9, 1.1 + 0.75 * len(rows)))
    for place, row in enumerate(rows):
        axes.plot(row.samples, [place] * len(row.samples), "o", color=BLUE, alpha=0.45, markersize=7)
        axes.plot([row.median] * 2, [place - 0.3, place + 0.3], color=BLUE, linewidth=3)
        axes.text(
            row.median,
            place - 0.34,
            f"{row.median:.{1 if row.median < 100 else 0}f} ms",
            ha="center",
            va="bottom",
            color=BLUE,
        )
        for name, value in quoted.get(row.name, ()):
            mark = "s" if name.startswith("PCCL") else "D"
            axes.plot(value, place, mark, color=ORANGE, markeredgecolor="black", markersize=8)
            axes.annotate(name, (value, place), xytext=(0, 9), textcoords="offset points", ha="center", fontsize=9)
    axes.set(xscale="log", xlabel="milliseconds from the fault: a dot is a trial, the line their median")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.1)
    axes.set(yticks=range(len(rows)), yticklabels=[row.name for row in rows], ylim=(len(rows) - 0.5, -0.8))
    plt.show()


def ratios(results: Sequence[Mapping[str, Any]], rival: str) -> None:
    """Our median time divided by the rival's, for every size and number of peers; below 1 ours is faster."""
    _, axes = plt.subplots(figsize=(7.5, 3.2))
    numbers = sorted({found["peers"] for found in results})
    titles = list(dict.fromkeys(found["title"] for found in results))
    for place, peers in enumerate(numbers):
        for found in (found for found in results if found["peers"] == peers):
            medians = {times["key"]: times["median_s"] for times in found["times"]}
            ratio = medians["ours-auto"] / medians[rival]
            x = titles.index(found["title"]) + 0.36 * (place - (len(numbers) - 1) / 2)
            hatch = {"hatch": "//", "edgecolor": "white"} if place else {}
            label = f"{peers} peers" if found["title"] == titles[0] else None
            axes.bar(x, ratio, width=0.34, color=PALETTE[place], label=label, **hatch)
            axes.text(x, ratio, f"{ratio:.2f}", ha="center", va="bottom", fontsize=9)
    axes.axhline(1, color="black", linewidth=1)
    axes.set(xticks=range(len(titles)), xticklabels=titles, xlabel="size", ylabel=f"our time / {rival}'s")
    axes.margins(y=0.12)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    plt.show()
