"""Draws a ring and what is known of the links between its peers."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_pccl.errors import PlottingUnavailableError
from ray_pccl.topology.types import Topology

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RING_CURVE = 0.12
"""How far ring edges bend outwards, so that they do not hide the links that are straight."""
RATED = 12
"""Peers up to which each edge of the ring has its rate written beside it, and names are level."""
NUMBERED = 30
"""Peers up to which the marks are large enough for a number."""
NAMED = 120
"""Peers up to which there is room for names."""
HOSTS_NAMED = 20
NAME_AWAY = 20
"""Points from the middle of a peer's mark to its name."""
_UNITS = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s"))


def plot_topology(topology: Topology, path: str | os.PathLike[str] | None = None, ax: Axes | None = None) -> Axes:
    """Draws the peers on a circle in ring order, coloured by host, and the ring's edges coloured by bandwidth.

    The slowest edge between hosts is marked and has its rate beside it; other known links are thin lines. No window is
    opened.

    Args:
        topology: What `Communicator.topology` returns.
        path: A file to write the picture to, in the format that its name ends with.
        ax: Axes to draw into; None: those of a new figure, ``ax.figure``.

    Raises:
        PlottingUnavailableError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        hint = "plot_topology needs matplotlib, which is not installed: pip install 'ray-pccl[plot]'"
        raise PlottingUnavailableError(hint) from error
    if ax is None:
        ax = Figure(figsize=(11.5, 9.0)).add_axes((0.05, 0.01, 0.86, 0.93))
    drawing = _Drawing(topology, ax, mpl)
    drawing.draw()
    if path is not None:
        drawing.figure.savefig(Path(path), dpi=130)
    return ax


def readable_rate(rate: float) -> str:
    """Bytes per second in the unit that leaves one to three digits before the point."""
    for size, unit in _UNITS:
        if rate >= 0.9995 * size:
            scaled = rate / size
            return f"{scaled:.{max(0, 2 - int(math.log10(max(scaled, 1))))}f} {unit}"
    return f"{rate:.2g} B/s"


class _Drawing:
    def __init__(self, topology: Topology, ax: Axes, mpl: Any) -> None:
        self._topology, self._ax, self._mpl = topology, ax, mpl
        self._order, self._n = topology.order, len(topology.order)
        self._ring = list(zip(self._order, (*self._order[1:], *self._order[:1]), strict=True)) if self._n > 1 else []
        turn = 2 * math.pi / max(1, self._n)
        self._angle = {peer: math.pi / 2 - place * turn for place, peer in enumerate(self._order)}  # clockwise, from 12
        self._place = {peer: (math.cos(angle), math.sin(angle)) for peer, angle in self._angle.items()}
        # Within a host no rate is measured: it stands there as infinite.
        self._rates = {edge: rate for edge, rate in topology.matrix.items() if math.isfinite(rate)}
        known = [rate for rate in self._rates.values() if rate > 0]
        low, high = (min(known), max(known)) if known else (1.0, 1.0)
        scale = mpl.colors.LogNorm if high > 10 * low else mpl.colors.Normalize
        self._norm = scale(low, high) if high > low else mpl.colors.Normalize(0.0, high)
        self._colours = mpl.colormaps["viridis"]
        hosts = list(dict.fromkeys(topology.hosts.get(peer, peer) for peer in self._order))
        palette = mpl.colormaps["tab10" if len(hosts) <= 10 else "tab20" if len(hosts) <= 20 else "hsv"]
        self._host_colour = {
            host: palette(number) if len(hosts) <= 20 else palette(number / len(hosts))
            for number, host in enumerate(hosts)
        }

    @property
    def figure(self) -> Figure:
        figure = self._ax.get_figure(root=True)
        assert figure is not None
        return figure

    def draw(self) -> None:
        self._draw_links()
        self._draw_ring()
        self._draw_peers()
        self._draw_legend()
        self._ax.set_aspect("equal")
        self._ax.set_axis_off()
        self._ax.set_xlim(-1.5, 1.5)
        self._ax.set_ylim(-1.5, 1.5)

    def _draw_links(self) -> None:
        """Those that the ring does not use, the fastest on top; fainter where there are many."""
        ring = set(self._ring)
        links = [
            (rate, self._place[i], self._place[j])
            for (i, j), rate in self._rates.items()
            if rate > 0 and i != j and (i, j) not in ring and i in self._place and j in self._place
        ]
        if not links:
            return
        links.sort(key=lambda link: link[0])
        lines = self._mpl.collections.LineCollection(
            [(start, end) for _, start, end in links],
            colors=[self._colours(self._norm(rate)) for rate, _, _ in links],
            linewidths=0.8 if len(links) < 1000 else 0.4,
            alpha=min(0.6, max(0.04, 40 / len(links))),
            zorder=1,
        )
        self._ax.add_collection(lines)

    def _draw_ring(self) -> None:
        slowest = self._slowest()
        width = 4.0
        for edge in self._ring:
            rate = self._rates.get(edge)
            unknown = rate is None or rate <= 0
            if edge == slowest:
                self._arrow(edge, "red", width + 5.0, zorder=2, head=False)
            colour = _LOCAL if self._is_local(edge) else "0.6" if unknown else self._colours(self._norm(rate))
            head = self._n <= 2 * NUMBERED  # beyond, heads would be all that there is to see of an edge
            style = ":" if unknown and not self._is_local(edge) else "-"
            self._arrow(edge, colour, width, zorder=3, head=head, style=style)
            if rate is not None and (edge == slowest or self._n <= RATED):
                self._write_rate(edge, rate, slowest=edge == slowest)
        if any(rate > 0 for rate in self._rates.values()):
            mappable = self._mpl.cm.ScalarMappable(norm=self._norm, cmap=self._colours)
            bar = self.figure.colorbar(mappable, ax=self._ax, shrink=0.5, pad=0.02, fraction=0.04)
            bar.formatter = self._mpl.ticker.FuncFormatter(lambda rate, _: readable_rate(rate))
            bar.ax.yaxis.set_minor_formatter(self._mpl.ticker.NullFormatter())
            bar.set_label("bandwidth")
            bar.update_ticks()

    def _slowest(self) -> tuple[str, str] | None:
        hosts, matrix = self._topology.hosts, self._rates
        known = [edge for edge in self._ring if edge in matrix]
        between = [edge for edge in known if hosts.get(edge[0], edge[0]) != hosts.get(edge[1], edge[1])]
        return min(between or known, key=matrix.__getitem__, default=None)

    def _is_local(self, edge: tuple[str, str]) -> bool:
        """Between two peers of one host, with nothing measured."""
        hosts = self._topology.hosts
        return edge not in self._rates and edge[0] in hosts and hosts[edge[0]] == hosts.get(edge[1])

    def _arrow(
        self, edge: tuple[str, str], colour: Any, width: float, *, zorder: int, head: bool = True, style: str = "-"
    ) -> None:
        arrow = self._mpl.patches.FancyArrowPatch(
            self._place[edge[0]],
            self._place[edge[1]],
            arrowstyle=f"-|>,head_length={2 + width},head_width={1 + width / 2}" if head else "-",
            connectionstyle=f"arc3,rad={-RING_CURVE}",
            shrinkA=self._radius() if head else 0.0,
            shrinkB=self._radius() if head else 0.0,
            linewidth=width,
            linestyle=style,
            color=colour,
            zorder=zorder,
            mutation_scale=1.0,
        )
        self._ax.add_patch(arrow)

    def _radius(self) -> float:
        """Of the mark of a peer, in points."""
        return 11.0 if self._n <= NUMBERED else 5.0 if self._n <= 2 * NUMBERED else 3.8

    def _write_rate(self, edge: tuple[str, str], rate: float, *, slowest: bool) -> None:
        """Beside the edge, outside; that of the slowest inside, where no names are."""
        (x1, y1), (x2, y2) = self._place[edge[0]], self._place[edge[1]]
        angle = math.atan2(y1 + y2, x1 + x2) if self._n > 2 else self._angle[edge[0]] - math.pi / 2
        middle = math.hypot(x1 + x2, y1 + y2) / 2 + RING_CURVE * math.hypot(x2 - x1, y2 - y1) / 2
        if not slowest:
            away = 14 + 20 * abs(math.cos(angle))  # words are wider than high
            self._write(readable_rate(rate), middle, angle, away, "center")
            return
        inside = middle - 0.42 if self._n > 2 else middle + 0.42
        self._ax.annotate(
            f"slowest: {readable_rate(rate)}",
            (middle * math.cos(angle), middle * math.sin(angle)),
            xytext=(inside * math.cos(angle), inside * math.sin(angle)),
            ha="center",
            va="center",
            color="red",
            fontweight="bold",
            arrowprops={"arrowstyle": "-", "color": "red"},
            bbox={"boxstyle": "round", "facecolor": "white", "edgecolor": "red"},
            zorder=6,
        )

    def _draw_peers(self) -> None:
        xs, ys = zip(*(self._place[peer] for peer in self._order), strict=True) if self._n else ((), ())
        colours = [self._host_colour[self._topology.hosts.get(peer, peer)] for peer in self._order]
        self._ax.scatter(
            xs, ys, s=(2 * self._radius() - 2) ** 2, c=colours, edgecolors="black", linewidths=0.8, zorder=4
        )
        for place, peer in enumerate(self._order):
            x, y = self._place[peer]
            if self._n <= NUMBERED:
                self._ax.text(x, y, str(place), ha="center", va="center", fontsize=9, color="white", zorder=5)
            if self._n <= NAMED:
                self._name(peer)

    def _name(self, peer: str) -> None:
        """Outside the circle; level for few peers, else along the radius, so that names do not run into others."""
        x, y = self._place[peer]
        left = x < -1e-6
        if self._n <= RATED:
            side = "left" if x > 0.1 else "right" if x < -0.1 else "center"
            self._write(_short(peer), 1.0, self._angle[peer], NAME_AWAY, side)
            return
        degrees = math.degrees(self._angle[peer])
        style = {**_SMALL, "ha": "right" if left else "left", "fontsize": 8 if self._n <= 60 else 6}
        radius = 1.04 + self._radius() / 250
        rotation = degrees + 180 if left else degrees
        self._ax.text(radius * x, radius * y, _short(peer), rotation=rotation, rotation_mode="anchor", **style)

    def _write(self, text: str, radius: float, angle: float, away: float, side: str) -> None:
        """So many points outside a place, however small the picture is."""
        self._ax.annotate(
            text,
            (radius * math.cos(angle), radius * math.sin(angle)),
            xytext=(away * math.cos(angle), away * math.sin(angle)),
            textcoords="offset points",
            **{**_SMALL, "ha": side},
        )

    def _draw_legend(self) -> None:
        topology, line = self._topology, self._mpl.lines.Line2D
        hosts = list(self._host_colour.items()) if len(self._host_colour) <= HOSTS_NAMED else []
        marks = [line([], [], marker="o", linestyle="", color=colour, label=_short(host)) for host, colour in hosts]
        if any(self._is_local(edge) for edge in self._ring):
            marks.append(line([], [], linewidth=3, color=_LOCAL, label="on the same host"))
        if any(self._rates.get(edge, 0.0) <= 0 and not self._is_local(edge) for edge in self._ring):
            marks.append(line([], [], linestyle=":", linewidth=3, color="0.6", label="not measured"))
        if marks:
            place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (-0.13, 1.0)}
            self._ax.legend(
                handles=marks, title="host" if hosts else None, fontsize=8, ncols=1 + len(marks) // 12, **place
            )
        parts = [f"{_count(self._n, 'peer')} on {_count(len(self._host_colour), 'host')}, clockwise"]
        if topology.bottleneck is not None and math.isfinite(topology.bottleneck):
            parts.append(f"slowest edge {readable_rate(topology.bottleneck)}")
        if topology.age_s is not None:
            parts.append(f"measured {_readable_age(topology.age_s)} ago")
        self._ax.set_title("; ".join(parts))


_LOCAL = "0.35"
_SMALL: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8, "color": "0.25", "zorder": 5}


def _short(name: str) -> str:
    """Ids are long; their beginnings and ends tell them apart."""
    return name if len(name) <= 18 else f"{name[:8]}…{name[-8:]}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _readable_age(seconds: float) -> str:
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
