"""What the order of a ring is worth on the internet: simulated peers, and the ring that each way of ordering gives.

    python benchmarks/topology_sim.py --plot topology.png

Peers live in regions. What one can send to another is what the way between their regions gives, with some luck, but no
more than the sender's way out and the receiver's way in. Some links are bad, and some pairs can't connect at all. There
are two kinds of peers: in "homes" the ways out differ, and the narrowest limits every ring; in "centres" all are wide,
and what limits a ring is the ways between the regions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from peers import print_table, progress, shown

from ray_pccl.topology.heuristic import greedy_order
from ray_pccl.topology.improving import or_opt
from ray_pccl.topology.ordering import order_ring

Matrix = NDArray[np.float64]
MBIT = 125_000.0
WAYS_OUT = {
    "homes": ((100, 0.10), (300, 0.25), (1000, 0.45), (10_000, 0.20)),
    "centres": ((10_000, 1.0),),
}
"""Mbit/s that peers have, and how many of them; the way in is as wide, or up to ten times wider."""
BAD, UNCONNECTED = 0.02, 0.01
"""Shares of directed links that give a twentieth, and nothing."""
PATIENCE_S = 60.0
FOOTNOTES = """\
Mbit/s, medians over the trials; "slowest" and "mean" are those of the ring's edges. An all-reduce runs at the pace of
the slowest. "proven" says in how many trials no ring can have a faster slowest edge. Random: the median order of 101.
Greedy: from each peer to the one that it reaches fastest among those left. Minimum sum: an order whose sum of
1/bandwidth is small, which is PCCL's objective (ATSP); found by moving stretches of the greedy order (Or-opt), so near
the least sum, not at it."""


@dataclass(frozen=True)
class Outcome:
    """One way of ordering in one trial."""

    kind: str
    peers: int
    trial: int
    way: str
    slowest: float
    mean: float
    seconds: float
    proven: bool = False


def internet(kind: str, n: int, rng: np.random.Generator) -> Matrix:
    """Bytes per second between n peers."""
    widths, shares = zip(*WAYS_OUT[kind], strict=True)
    regions = max(2, min(12, n // 5))
    region = rng.integers(regions, size=n)
    places = rng.random((regions, 2))
    distance = np.linalg.norm(places[:, None] - places[None, :], axis=2)
    between = 2000.0 / (0.2 + 4 * distance) * rng.lognormal(0.0, 0.4, (regions, regions))
    between[np.diag_indices(regions)] = 8000.0
    way_out = rng.choice(widths, n, p=shares).astype(float)
    way_in = way_out * rng.choice([1.0, 1.0, 3.0, 10.0], n)
    rates = between[np.ix_(region, region)] * rng.lognormal(0.0, 0.5, (n, n))
    rates = np.minimum(rates, np.minimum(way_out[:, None], way_in[None, :]) * rng.uniform(0.85, 1.0, (n, n)))
    luck = rng.random((n, n))
    rates[luck < BAD + UNCONNECTED] /= 20.0
    rates[luck < UNCONNECTED] = 0.0
    np.fill_diagonal(rates, 0.0)
    return rates * MBIT


def random_order(bandwidth: Matrix, rng: np.random.Generator) -> list[int]:
    """The median of 101 random ones, by its slowest edge."""
    orders = [rng.permutation(len(bandwidth)) for _ in range(101)]
    orders.sort(key=lambda order: edges(bandwidth, order).min())
    return orders[50].tolist()


def minimum_sum(bandwidth: Matrix) -> list[int]:
    """A small sum of 1/bandwidth; what can't connect costs more than all else together."""
    usable = bandwidth[bandwidth > 0]
    cost = np.full_like(bandwidth, len(bandwidth) / usable.min())
    np.divide(1.0, bandwidth, out=cost, where=bandwidth > 0)
    deadline = time.monotonic() + PATIENCE_S
    return or_opt(-cost, greedy_order(bandwidth), lambda: time.monotonic() > deadline)


def edges(bandwidth: Matrix, order: list[int] | NDArray[np.intp]) -> Matrix:
    """Of the ring in that order."""
    return bandwidth[np.asarray(order), np.roll(order, -1)]


def outcomes(kind: str, peers: int, trial: int) -> list[Outcome]:
    """All ways of ordering, on the same matrix."""
    rng = np.random.default_rng([len(kind), peers, trial])
    bandwidth = internet(kind, peers, rng)
    proven = False

    def ours() -> list[int]:
        nonlocal proven
        ring = order_ring(bandwidth, budget_s=1.0 if peers <= 100 else 10.0)
        proven = ring.optimal
        return list(ring.order)

    ways: dict[str, Callable[[], list[int]]] = {
        "ours": ours,
        "minimum sum": lambda: minimum_sum(bandwidth),
        "greedy": lambda: greedy_order(bandwidth),
        "random": lambda: random_order(bandwidth, rng),
    }
    found = []
    for way, order in ways.items():
        progress(f"{kind}, {peers} peers, trial {trial + 1}: {way}")
        begin = time.monotonic()
        rates = edges(bandwidth, order()) / MBIT
        seconds = time.monotonic() - begin
        worth = float(rates.min()), float(rates.mean())
        found.append(Outcome(kind, peers, trial, way, *worth, seconds, proven and way == "ours"))
    return found


def report(found: list[Outcome]) -> None:
    """A line for each number of peers and way of ordering."""
    lines = []
    groups: dict[tuple[str, int, str], list[Outcome]] = {}
    for outcome in found:
        groups.setdefault((outcome.kind, outcome.peers, outcome.way), []).append(outcome)
    for (kind, peers, way), of_these in groups.items():
        ours = groups[kind, peers, "ours"]
        share = statistics.median(a.slowest / b.slowest for a, b in zip(of_these, ours, strict=True))
        slowest, mean, seconds = (
            statistics.median(getattr(outcome, name) for outcome in of_these) for name in ("slowest", "mean", "seconds")
        )
        proven = f"{sum(outcome.proven for outcome in of_these)} of {len(of_these)}" if way == "ours" else ""
        lines.append([kind, str(peers), way, shown(slowest), f"{share:.3f}", shown(mean), f"{seconds:.3f}", proven])
    print_table(["kind", "peers", "order", "slowest", "to ours", "mean", "seconds", "proven"], lines)
    print(f"\n{FOOTNOTES}")


def draw(path: str, found: list[Outcome]) -> None:
    """Slowest and mean edge against the number of peers."""
    try:
        import matplotlib as mpl
    except ImportError:
        sys.exit("--plot needs matplotlib: pip install 'ray-pccl[plot]'")
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    styles = {
        "ours": {"color": "tab:red", "marker": "o", "linewidth": 2.2, "zorder": 3},
        "minimum sum": {"color": "tab:blue", "marker": "s"},
        "greedy": {"color": "tab:green", "marker": "^"},
        "random": {"color": "tab:gray", "marker": "v"},
    }
    kinds, sizes = list(dict.fromkeys(o.kind for o in found)), sorted({o.peers for o in found})
    figure, panels = plt.subplots(len(kinds), 2, figsize=(11, 4.2 * len(kinds)), squeeze=False)
    for row, kind in zip(panels, kinds, strict=True):
        for panel, name in zip(row, ("slowest", "mean"), strict=True):
            for way, style in styles.items():
                of_way = [o for o in found if (o.kind, o.way) == (kind, way)]
                samples = [[getattr(o, name) for o in of_way if o.peers == peers] for peers in sizes]
                medians = np.array([statistics.median(values) for values in samples])
                extremes = np.array([[min(values), max(values)] for values in samples]).T
                spread = np.abs(extremes - medians)
                panel.errorbar(sizes, medians, yerr=spread, label=way, capsize=2, elinewidth=0.8, **style)
            panel.set(xlabel="peers", ylabel="Mbit/s", title=f"{kind}: {name} edge of the ring (median, least, most)")
            panel.set_xscale("log")
            panel.set_xticks(sizes, [str(size) for size in sizes])
            panel.minorticks_off()
            panel.grid(True, alpha=0.3)
            panel.set_ylim(bottom=0)
    panels[0][1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description="What the order of a ring is worth on the internet, simulated.")
    parser.add_argument("--peers", default="10,30,100,300,1000", help="how many, by commas (default: %(default)s)")
    parser.add_argument("--trials", type=int, default=5, help="matrices of each size (default: %(default)s)")
    parser.add_argument("--short", action="store_true", help="a smoke test: 10 and 40 peers, two matrices each")
    parser.add_argument("--json", metavar="FILE", help="also write every outcome to a file")
    parser.add_argument("--plot", metavar="FILE", help="also draw them into a PNG file")
    arguments = parser.parse_args()
    sizes = [10, 40] if arguments.short else [int(size) for size in arguments.peers.split(",")]
    trials = 2 if arguments.short else arguments.trials
    runs = [(kind, peers, trial) for kind in WAYS_OUT for peers in sizes for trial in range(trials)]
    found = [outcome for run in runs for outcome in outcomes(*run)]
    progress("")
    report(found)
    if arguments.json:
        Path(arguments.json).write_text(
            json.dumps({"results": [asdict(outcome) for outcome in found]}, indent=2) + "\n"
        )
    if arguments.plot:
        draw(arguments.plot, found)


if __name__ == "__main__":
    main()
