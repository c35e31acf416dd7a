"""The pictures of the documentation: ``python docs/pictures/draw.py`` writes them, each in light colours and in dark.

They are committed, so that the pages show them wherever they are read, and a test sees that they are up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from canvas import DARK, LIGHT, Canvas  # noqa: E402

Draw = Callable[[Canvas], None]
PICTURES: dict[str, tuple[int, str, Draw]] = {}


def picture(name: str, height: int, title: str) -> Callable[[Draw], Draw]:
    """Registers a picture."""

    def register(draw: Draw) -> Draw:
        PICTURES[name] = (height, title, draw)
        return draw

    return register


@picture("who-is-who", 350, "Peers and a sentinel on each host, the master, its journal, and the driver")
def who_is_who(c: Canvas) -> None:
    """Processes, and who talks to whom."""
    c.box(190, 16, 180, 54, "master\none for all groups", fill="master")
    c.box(440, 22, 104, 42, "journal")
    c.arrow(370, 43, 440, 43)
    c.text(372, 84, "append, then push", colour="faint")
    c.box(16, 22, 104, 42, "driver")
    c.arrow(120, 43, 190, 43, dashed=True)
    c.text(16, 84, "finds it over Ray", colour="faint")
    for x, host in ((16, "host A"), (296, "host B")):
        c.box(x, 170, 248, 164, fill="paper")
        c.text(x + 124, 186, host, "middle", bold=True)
        c.box(x + 12, 204, 104, 46, "peer", fill="peer")
        c.box(x + 132, 204, 104, 46, "peer", fill="peer")
        c.box(x + 72, 282, 104, 40, "sentinel")
        c.arrow(x + 104, 282, x + 70, 250, dashed=True)
        c.arrow(x + 144, 282, x + 178, 250, dashed=True)
        c.arrow(x + 116, 227, x + 132, 227, both=True)
    c.arrow(264, 227, 308, 227, both=True)
    c.text(280, 126, "one connection a peer:", "middle", colour="faint")
    c.text(280, 148, "joins, votes, beats, news", "middle", colour="faint")
    c.arrow(140, 170, 240, 70, both=True)
    c.arrow(420, 170, 320, 70, both=True)


@picture("epochs", 250, "A ring of four peers loses one and goes on as a ring of three, in the next epoch")
def epochs(c: Canvas) -> None:
    """A group before a death, and after it."""
    c.text(130, 22, "epoch 7, world size 4", "middle", bold=True)
    c.ring(130, 140, 76, ["0", "1", "2", "3"], dead="2")
    c.arrow(244, 140, 316, 140)
    c.text(280, 118, "2 dies", "middle", colour="alarm")
    c.text(280, 162, "ms later", "middle", colour="faint")
    c.text(430, 22, "epoch 8, world size 3", "middle", bold=True)
    c.ring(430, 148, 76, ["0", "1", "2"])
    c.text(364, 226, "was rank 3", "middle", colour="faint")


@picture("commit", 300, "Entered, prepared, committed: what a peer goes through in an operation, and what a death does")
def commit(c: Canvas) -> None:
    """How an operation commits, and what is decided after a death."""
    for x, text in ((16, "entered"), (216, "prepared"), (416, "committed")):
        c.box(x, 40, 128, 44, text, fill="peer")
    c.arrow(144, 62, 216, 62)
    c.arrow(344, 62, 416, 62)
    c.text(180, 22, "holds its result", "middle", colour="faint")
    c.text(380, 22, "heard it from all", "middle", colour="faint")
    c.line(16, 108, 544, 108)
    c.text(16, 130, "Someone dies first: all freeze, and tell the master.", bold=True)
    c.box(16, 156, 226, 50, "every survivor is prepared")
    c.box(16, 228, 226, 50, "some survivor is not")
    c.arrow(242, 181, 310, 181)
    c.arrow(242, 253, 310, 253, alarm=True)
    c.box(310, 156, 234, 50, "all commit: the dead's\ninput is in the result", fill="peer")
    c.box(310, 228, 234, 50, "all abort: inputs untouched,\nretried without the dead", fill="master")


@picture(
    "recovery", 330, "A death, the notice, Ask, Answer, Decide, and the retry, between two survivors and the master"
)
def recovery(c: Canvas) -> None:
    """What is said after a death, in order."""
    lanes = {"peer 0": 66, "peer 1": 186, "master": 324, "peer 2": 490}
    for name, x in lanes.items():
        c.box(x - 50, 12, 100, 36, name, fill="master" if name == "master" else "peer", dead=name == "peer 2")
        c.line(x, 48, x, 84 if name == "peer 2" else 320)
    c.cross(490, 84, 9)
    c.arrow(490, 106, 326, 106, alarm=True)
    c.text(400, 124, "its sentinel: exiting", colour="alarm")
    for y, text, towards in ((150, "Ask", True), (200, "Answer", False), (250, "Decide", True)):
        for x in (66, 186):
            start, end = (324, x) if towards else (x, 324)
            c.arrow(start, y + (x == 66) * 12, end, y + (x == 66) * 12)
        c.text(340, y + 6, text, bold=True)
    c.text(340, 226, "what each operation is", colour="faint")
    c.text(340, 276, "epoch, members, outcomes", colour="faint")
    c.arrow(66, 302, 186, 302, both=True)
    c.text(126, 288, "run again", "middle")


@picture("shared-state", 240, "Two members that hold the elected content send a newcomer the pieces it lacks")
def shared_state(c: Canvas) -> None:
    """Who sends what to whom in a sync."""
    rows = ((16, 20, "member", "a b c d", "peer"), (16, 140, "member", "a b c d", "peer"))
    for x, y, name, pieces, fill in rows:
        c.box(x, y, 150, 80, f"{name}\n{pieces}", fill=fill)
    c.box(390, 80, 154, 80, "newcomer\na x y d", fill="tensor")
    c.arrow(166, 60, 390, 108)
    c.arrow(166, 180, 390, 132)
    c.text(270, 62, "piece b", "middle")
    c.text(270, 178, "piece c", "middle")
    c.text(280, 120, "hashes of all are known", "middle", colour="faint")
    c.text(467, 184, "written when everyone", "middle", colour="faint")
    c.text(467, 204, "has everything", "middle", colour="faint")


@picture("driver", 300, "The driver holds refs; values stay in the actors, which reduce among themselves")
def driver(c: Canvas) -> None:
    """Refs in the driver, tensors in the actors."""
    c.box(130, 14, 300, 56, "driver\nref  ref  ref: tickets, no tensors")
    for number, x in enumerate((16, 203, 390)):
        c.box(x, 150, 154, 124, fill="peer")
        c.text(x + 77, 168, f"actor {number}", "middle", bold=True)
        c.box(x + 14, 184, 126, 34, "grads()", fill="tensor")
        c.box(x + 14, 228, 126, 34, "the sum", fill="tensor")
        c.arrow(280 + (number - 1) * 90, 70, x + 77, 150, dashed=True)
    c.arrow(170, 212, 203, 212, both=True)
    c.arrow(357, 212, 390, 212, both=True)
    c.text(440, 88, "one hidden", colour="faint")
    c.text(440, 108, "call an actor", colour="faint")


def drawn() -> dict[str, str]:
    """Every file and what is in it."""
    files = {}
    for name, (height, title, draw) in PICTURES.items():
        for suffix, colours in (("", LIGHT), ("-dark", DARK)):
            canvas = Canvas(height, colours, title)
            draw(canvas)
            files[f"{name}{suffix}.svg"] = canvas.svg()
    return files


if __name__ == "__main__":
    for file, text in drawn().items():
        (HERE / file).write_text(text)
