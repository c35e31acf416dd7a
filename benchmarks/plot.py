"""Draws what `--json` wrote: ``python plot.py RESULTS.json PICTURE.png``. Needs matplotlib alone."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from work import size_text

STYLES = {
    "ours-auto": {"color": "tab:red", "marker": "o", "linewidth": 2.2},
    "ours-tcp": {"color": "tab:red", "marker": "o", "linestyle": "--"},
    "pccl": {"color": "tab:purple", "marker": "D"},
    "gloo": {"color": "tab:blue", "marker": "s"},
    "openmpi": {"color": "tab:green", "marker": "^"},
    "mpich": {"color": "tab:olive", "marker": "v"},
}


def main() -> None:
    """Median time against size, both in powers, a panel for each number of peers; the bars are quartiles."""
    source, target = sys.argv[1:]
    results = [found for found in json.loads(Path(source).read_text()).get("results", []) if found["count"] == 1]
    numbers = sorted({found["peers"] for found in results})
    figure, panels = plt.subplots(1, max(1, len(numbers)), figsize=(5.5 * max(1, len(numbers)), 4.5), squeeze=False)
    for panel, peers in zip(panels[0], numbers, strict=False):
        curves: dict[str, list[tuple[int, dict[str, Any]]]] = defaultdict(list)
        for found in results:
            if found["peers"] == peers:
                for times in found["times"]:
                    curves[times["key"]].append((found["nbytes"], times))
        for key, points in curves.items():
            points.sort(key=lambda point: point[0])
            medians = [1000 * times["median_s"] for _, times in points]
            quartiles = [
                [1000 * abs(times["median_s"] - times[name]) for _, times in points] for name in ("q1_s", "q3_s")
            ]
            sizes = [nbytes for nbytes, _ in points]
            panel.errorbar(sizes, medians, yerr=quartiles, label=points[0][1]["name"], capsize=2, **STYLES[key])
        panel.set(xscale="log", yscale="log", xlabel="size", ylabel="ms (median)", title=f"{peers} peers, one host")
        sizes = sorted({found["nbytes"] for found in results})
        panel.set_xticks(sizes, [size_text(nbytes) for nbytes in sizes], minor=False)
        panel.set_xticks([], minor=True)
        panel.yaxis.set_major_formatter("{x:g}")
        panel.grid(True, which="major", alpha=0.3)
        panel.legend()
    figure.tight_layout()
    figure.savefig(target, dpi=130)


if __name__ == "__main__":
    main()
