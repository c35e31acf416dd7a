"""The picture of a ring: what is on it, and what happens without matplotlib."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ray_pccl
from ray_pccl import Topology, plot_topology
from ray_pccl.topology.plot import readable_rate

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'ray-pccl[plot]'")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch


def _topology(n: int, hosts: int, *, known: float = 1.0) -> Topology:
    rng = np.random.default_rng(n)
    host = {f"peer-{i:03}": f"host-{i * hosts // n}" for i in range(n)}
    names = list(host)
    matrix = {
        (a, b): float(rng.uniform(1e6, 1e9))
        for a in names
        for b in names
        if a != b and host[a] != host[b] and rng.random() < known
    }
    ring = [matrix[edge] for edge in zip(names, names[1:] + names[:1], strict=True) if edge in matrix]
    return Topology(tuple(names), matrix, host, min(ring, default=None), 12.0)


def _texts(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


def test_the_slowest_edge_is_marked_with_its_rate() -> None:
    order = ("a", "b", "c")
    matrix = {("a", "b"): 5e6, ("b", "c"): 2.5e6, ("c", "a"): 1e9, ("b", "a"): 1.0}
    topology = Topology(order, matrix, {"a": "x", "b": "y", "c": "z"}, 2.5e6, None)
    ax = plot_topology(topology)
    assert "slowest: 2.50 MB/s" in _texts(ax)
    assert "5.00 MB/s" in _texts(ax)
    assert "2.50 MB/s" in ax.get_title()


def test_an_edge_within_a_host_is_not_the_slowest() -> None:
    matrix = {("a", "b"): 1.0, ("b", "c"): 5e6, ("c", "a"): 7e6}
    ax = plot_topology(Topology(("a", "b", "c"), matrix, {"a": "x", "b": "x", "c": "z"}, 5e6, None))
    assert "slowest: 5.00 MB/s" in _texts(ax)


def test_edges_within_a_host_that_are_not_measured_are_drawn_as_such() -> None:
    hosts = {"a": "x", "b": "x", "c": "z"}
    matrix = {("a", "b"): math.inf, ("b", "a"): math.inf, ("b", "c"): 5e6, ("c", "a"): 7e6}
    ax = plot_topology(Topology(("a", "b", "c"), matrix, hosts, 5e6, None))
    assert "slowest: 5.00 MB/s" in _texts(ax) and "7.00 MB/s" in _texts(ax)
    legend = ax.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["x", "z", "on the same host"]
    alone = Topology(("a", "b"), {("a", "b"): math.inf, ("b", "a"): math.inf}, hosts, math.inf, None)
    assert not any("slowest" in text for text in _texts(plot_topology(alone)))


@pytest.mark.parametrize(
    ("n", "hosts", "known"), [(1, 1, 1.0), (2, 2, 1.0), (3, 3, 1.0), (16, 5, 1.0), (40, 40, 0.5), (100, 25, 1.0)]
)
def test_rings_of_all_sizes_are_drawn(n: int, hosts: int, known: float, tmp_path: Path) -> None:
    file = tmp_path / "ring.png"
    ax = plot_topology(_topology(n, hosts, known=known), file)
    assert file.read_bytes().startswith(b"\x89PNG")
    arrows = [patch for patch in ax.patches if isinstance(patch, FancyArrowPatch)]
    assert len(arrows) >= (n if n > 1 else 0)
    assert "peer-000" in _texts(ax)


def test_a_topology_of_which_nothing_is_known_is_drawn(tmp_path: Path) -> None:
    plot_topology(Topology(("a", "b"), {}, {"a": "x", "b": "y"}, None, None), tmp_path / "ring.png")
    plot_topology(Topology(("a", "b"), {("a", "b"): 0.0}, {}, math.inf, None), tmp_path / "ring.svg")


def test_it_draws_into_given_axes() -> None:
    ax = Figure().add_subplot()
    assert plot_topology(_topology(5, 5), ax=ax) is ax
    assert ax.patches


def test_rates_are_readable() -> None:
    shown = [readable_rate(rate) for rate in (0.5, 1, 999.9e3, 1e6, 12.34e6, 123.4e6, 2.5e9, 1.5e12)]
    assert shown == ["0.5 B/s", "1.00 B/s", "1.00 MB/s", "1.00 MB/s", "12.3 MB/s", "123 MB/s", "2.50 GB/s", "1500 GB/s"]


def test_without_matplotlib_the_error_names_the_extra() -> None:
    script = """
import sys
sys.modules["matplotlib"] = None
import ray_pccl
try:
    ray_pccl.plot_topology(ray_pccl.Topology(("a",), {}, {"a": "x"}, None, None))
except ray_pccl.PlottingUnavailableError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "pip install 'ray-pccl[plot]'" in done.stdout
    assert issubclass(ray_pccl.PlottingUnavailableError, ImportError)
