"""Times made into figures: a table, a file, a picture. Pure, but for the picture's file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from ray_pccl.cli import units
from ray_pccl.errors import PlottingUnavailableError


@dataclass(frozen=True, slots=True)
class Result:
    """What one size took."""

    bytes: int
    iterations: int
    median_s: float
    p99_s: float
    fastest_s: float
    algorithm_bytes_per_s: float
    """Bytes of the tensor, through the median time."""
    bus_bytes_per_s: float
    """What each link of a ring would have to carry for that: 2 (n - 1) / n times as much. To be compared with links."""

    @classmethod
    def of(cls, nbytes: int, world_size: int, seconds: Sequence[float]) -> Result:
        """From the times of the iterations."""
        ordered = sorted(seconds)
        median = _quantile(ordered, 0.5)
        algorithm = nbytes / median
        bus = algorithm * 2 * (world_size - 1) / world_size
        return cls(nbytes, len(ordered), median, _quantile(ordered, 0.99), ordered[0], algorithm, bus)


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that has this share of all at or below it; of an even number's middle two, their mean."""
    if share == 0.5 and len(ordered) % 2 == 0:
        return (ordered[len(ordered) // 2 - 1] + ordered[len(ordered) // 2]) / 2
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def table(results: Sequence[Result]) -> Table:
    """The figures, one size a line."""
    made = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for name in ("size", "median ms", "p99 ms", "algorithm", "bus", "iterations"):
        made.add_column(name, justify="right", no_wrap=True)
    for result in results:
        made.add_row(
            units.memory(result.bytes),
            units.milliseconds(result.median_s),
            units.milliseconds(result.p99_s),
            units.rate(result.algorithm_bytes_per_s),
            units.rate(result.bus_bytes_per_s),
            str(result.iterations),
        )
    return made


def as_json(results: Sequence[Result], about: dict[str, Any]) -> str:
    """The figures, with what was measured, as JSON."""
    return json.dumps({**about, "results": [asdict(result) for result in results]}, indent=2) + "\n"


def require_matplotlib() -> None:
    """`PlottingUnavailableError` where it is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        hint = "--plot needs matplotlib, which is not installed here: pip install 'ray-pccl[plot]'"
        raise PlottingUnavailableError(hint) from error


def plot(results: Sequence[Result], title: str, path: Path) -> None:
    """Draws median times and bus bandwidths against sizes, in the format that the file's name ends with."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    sizes = [result.bytes for result in results]
    figure = Figure(figsize=(10.5, 4.4), layout="constrained")
    times, rates = figure.subplots(1, 2)
    times.fill_between(
        sizes,
        [1000 * r.fastest_s for r in results],
        [1000 * r.p99_s for r in results],
        alpha=0.2,
        label="fastest to p99",
    )
    times.plot(sizes, [1000 * result.median_s for result in results], marker="o", label="median")
    times.set(title="time", ylabel="ms", yscale="log")
    times.legend()
    rates.plot(sizes, [r.bus_bytes_per_s for r in results], marker="o", color="tab:green", label="bus")
    rates.plot(sizes, [r.algorithm_bytes_per_s for r in results], marker="s", color="tab:olive", label="algorithm")
    rates.set(title="bandwidth", ylim=(0, None))
    rates.yaxis.set_major_formatter(FuncFormatter(lambda value, _: units.rate(value)))
    rates.legend()
    for axes in (times, rates):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("size of the tensor")
        axes.xaxis.set_major_locator(FixedLocator(sizes))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: units.memory(value)))
        axes.tick_params(axis="x", labelrotation=30 if len(sizes) > 4 else 0)
        axes.grid(True, alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
