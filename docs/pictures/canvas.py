"""A small canvas: boxes, arrows and words as an SVG, in light colours or in dark ones."""

from __future__ import annotations

import math
from html import escape

WIDTH = 560
"""Narrow, so that words stay legible where the whole picture is as wide as a phone."""
FONT_SIZE = 15
LIGHT = {
    "paper": "#f4f8f7",
    "ink": "#1c2b29",
    "faint": "#5c6f6c",
    "box": "#ffffff",
    "peer": "#d3ece7",
    "master": "#fde3d6",
    "tensor": "#e4e1f7",
    "line": "#0b7568",
    "alarm": "#c43e12",
}
DARK = {
    "paper": "#20262c",
    "ink": "#e6efed",
    "faint": "#9fb3af",
    "box": "#2b333a",
    "peer": "#17514a",
    "master": "#6b3420",
    "tensor": "#443d75",
    "line": "#4fc3b0",
    "alarm": "#ff8a5c",
}


class Canvas:
    """What is drawn is kept as text; `svg` puts it together."""

    def __init__(self, height: int, colours: dict[str, str], title: str) -> None:
        self._height, self._colours, self._title = height, colours, title
        self._parts: list[str] = []

    def box(
        self, x: float, y: float, w: float, h: float, text: str = "", *, fill: str = "box", dead: bool = False
    ) -> None:
        """A box with words in its middle; the lines of the text are parted by newlines."""
        edge = self._colours["alarm" if dead else "line"]
        dash = ' stroke-dasharray="5 4"' if dead else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="8" fill="{self._colours[fill]}" '
            f'stroke="{edge}" stroke-width="1.5"{dash}/>'
        )
        lines = text.split("\n") if text else []
        for number, line in enumerate(lines):
            middle = y + h / 2 + (number - (len(lines) - 1) / 2) * (FONT_SIZE + 4)
            self.text(x + w / 2, middle, line, "middle")

    def ring(self, cx: float, cy: float, radius: float, names: list[str], dead: str = "") -> None:
        """Peers on a circle, each with an arrow to the next; one may be dead."""
        places = []
        for number, name in enumerate(names):
            angle = -math.pi / 2 + 2 * math.pi * number / len(names)
            places.append((cx + radius * math.cos(angle), cy + radius * math.sin(angle), name))
        for (x1, y1, a), (x2, y2, b) in zip(places, [*places[1:], places[0]], strict=True):
            length = math.dist((x1, y1), (x2, y2))
            cut = 27 / length
            ends = (x1 + (x2 - x1) * cut, y1 + (y2 - y1) * cut, x2 - (x2 - x1) * cut, y2 - (y2 - y1) * cut)
            self.arrow(*ends, alarm=dead in (a, b) and bool(dead))
        for x, y, name in places:
            lost = name == dead
            dash = ' stroke-dasharray="5 4"' if lost else ""
            self._parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="22" fill="{self._colours["peer"]}" '
                f'stroke="{self._colours["alarm" if lost else "line"]}" stroke-width="1.5"{dash}/>'
            )
            self.text(x, y, name, "middle")
            if lost:
                self.cross(x, y, 16)

    def cross(self, x: float, y: float, size: float) -> None:
        """Somebody died here."""
        for sign in (1, -1):
            self._parts.append(
                f'<line x1="{x - size:.1f}" y1="{y - sign * size:.1f}" x2="{x + size:.1f}" y2="{y + sign * size:.1f}" '
                f'stroke="{self._colours["alarm"]}" stroke-width="3"/>'
            )

    def arrow(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        *,
        dashed: bool = False,
        alarm: bool = False,
        both: bool = False,
    ) -> None:
        """A line with a head at its end, or at both."""
        colour = "alarm" if alarm else "line"
        dash = ' stroke-dasharray="5 4"' if dashed or alarm else ""
        start = f' marker-start="url(#{colour})"' if both else ""
        self._parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{self._colours[colour]}" '
            f'stroke-width="1.5"{dash}{start} marker-end="url(#{colour})"/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """A faint line without a head."""
        stroke = f'stroke="{self._colours["faint"]}" stroke-width="1"'
        self._parts.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" {stroke}/>')

    def text(
        self, x: float, y: float, words: str, anchor: str = "start", *, colour: str = "ink", bold: bool = False
    ) -> None:
        """Words, whose middle is at this height."""
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" dominant-baseline="central" '
            f'fill="{self._colours[colour]}"{weight}>{escape(words)}</text>'
        )

    def svg(self) -> str:
        """The whole picture."""
        heads = "".join(
            f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="{self._colours[name]}"/></marker>'
            for name in ("line", "alarm")
        )
        body = "\n".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}" width="{WIDTH}" '
            f'height="{self._height}" role="img" font-family="system-ui, sans-serif" font-size="{FONT_SIZE}">\n'
            f"<title>{escape(self._title)}</title>\n<defs>{heads}</defs>\n"
            f'<rect width="{WIDTH}" height="{self._height}" rx="10" fill="{self._colours["paper"]}"/>\n{body}\n</svg>\n'
        )
