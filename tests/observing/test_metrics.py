"""What Prometheus gets to see, scraped from a real Ray; and how histograms are thinned out."""

from __future__ import annotations

import collections
import json
import re
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import ray_pccl
from master_actor import serve
from ray_pccl import metrics
from ray_pccl.peer import connection
from ray_pccl.peer.statistics import BOUNDS_S
from ray_pccl.testing import eventually
from tests.cli import made_up

ROOT = Path(__file__).parents[2]


def test_many_latencies_are_thinned_out_and_rare_ones_stay() -> None:
    assert metrics.thinned([1, 2, 3]) == [1, 2, 3]
    thinned = metrics.thinned([0, 1_000_000, 1, 500_000])
    assert thinned[0] == 0 and thinned[2] == 1
    assert thinned[1] == pytest.approx(2 * thinned[3], rel=0.01)
    assert sum(thinned) <= metrics.MOST_OBSERVATIONS + 1


def test_the_middle_of_a_bucket_lies_in_it() -> None:
    for bucket in range(1, len(BOUNDS_S)):
        assert BOUNDS_S[bucket - 1] < metrics.middle(bucket) < BOUNDS_S[bucket]
    assert metrics.middle(0) <= BOUNDS_S[0]
    assert metrics.middle(len(BOUNDS_S)) > BOUNDS_S[-1]


def test_every_metric_is_in_the_guide_and_the_dashboard_asks_for_no_other() -> None:
    guide = (ROOT / "docs/guides/observing.md").read_text()
    assert [name for name in metrics.NAMES if not re.search(f"`ray_{name}(_total)?`", guide)] == []
    asked = set(re.findall(r"ray_(pccl_\w+)", (ROOT / "docs/grafana.json").read_text()))
    known = {
        *metrics.NAMES,
        *(f"{name}_total" for name in metrics.NAMES),
        *(f"{name}_bucket" for name in metrics.NAMES),
    }
    assert asked <= known and len(asked) >= 12


def test_the_dashboard_is_a_json_that_grafana_takes() -> None:
    dashboard = json.loads((ROOT / "docs/grafana.json").read_text())
    assert dashboard["title"] and dashboard["schemaVersion"] >= 36
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(places) == len(set(places)) >= 8
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


class _Gauge:
    """Keeps its last value, as Ray's do."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.last[tags.get("group", "")] = value

    def inc(self, amount: float, tags: dict[str, str]) -> None:
        """A counter's."""

    def observe(self, value: float, tags: dict[str, str]) -> None:
        """A histogram's."""


@pytest.fixture
def gauges(monkeypatch: pytest.MonkeyPatch) -> dict[str, _Gauge]:
    made: dict[str, _Gauge] = collections.defaultdict(_Gauge)
    monkeypatch.setattr(metrics, "_metric", lambda name: made[name])
    return made


def test_the_gauges_of_a_group_that_the_master_forgets_go_to_zero(gauges: dict[str, _Gauge]) -> None:
    exporter, now = metrics.MasterMetrics(), made_up.report(made_up.group())
    exporter.export(now)
    name = now.groups[0].name
    assert gauges["pccl_master_members"].last[name] > 0
    exporter.export(msgspec.structs.replace(now, groups=()))
    assert gauges["pccl_master_members"].last[name] == 0
    assert gauges["pccl_master_waiting"].last[name] == 0
    assert not exporter._evictions


def test_the_gauges_of_a_communicator_that_is_closed_go_to_zero(
    gauges: dict[str, _Gauge], monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(self: metrics.PeerMetrics, epoch: int, world_size: int) -> None:
        self._export(epoch, world_size)

    monkeypatch.setattr(metrics.PeerMetrics, "export", export)  # without Ray
    monkeypatch.setattr(connection, "EXPORT_EVERY_S", 0.05)
    with serve() as endpoint:
        comm = ray_pccl.Communicator("metered", master=endpoint)
        comm.connect()
        eventually(lambda: gauges["pccl_world_size"].last.get("metered") == 1, 10)
        comm.close()
    assert gauges["pccl_world_size"].last["metered"] == 0
    assert gauges["pccl_epoch"].last["metered"] == 0
    assert gauges["pccl_in_flight"].last["metered"] == 0


@pytest.fixture
def scraped() -> Iterator[Any]:
    """A local Ray, and what its metrics agent shows: the name of each metric, with the sum over all of its labels."""
    import ray

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray.init(address="local", num_cpus=4, include_dashboard=False, _metrics_export_port=port, log_to_driver=False)

    def scrape() -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            text = answer.read().decode()
        found: dict[str, float] = {}
        for name, value in re.findall(r"^ray_(pccl_\w+)(?:\{[^\n]*\})? ([\d.e+-]+)$", text, flags=re.MULTILINE):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    try:
        yield scrape
    finally:
        ray_pccl.stop_master()
        ray.shutdown()


@pytest.mark.ray
@pytest.mark.slow
def test_operations_deaths_and_recoveries_reach_prometheus(scraped: Any) -> None:
    import numpy as np
    import ray

    @ray.remote(num_cpus=0)
    class Worker:
        @ray_pccl.collective
        def grads(self) -> Any:
            return np.ones(1024, np.float32)

    ray_pccl.start_master()
    workers = [Worker.remote() for _ in range(3)]
    group = ray_pccl.create_group(workers, name="metered")
    group.wait_ready()
    kept = []
    for _ in range(4):
        kept = ray_pccl.allreduce_refs([worker.grads.remote() for worker in workers])
        ray.get(kept)
    ray.kill(workers[2])
    eventually(lambda: len(group.members()) == 2, 20, "the others know of it")

    def complete() -> bool:
        try:
            found = scraped()
        except OSError:
            return False
        complete.last = found  # type: ignore[attr-defined]
        return found.get("pccl_master_recoveries_total") == 1 and found.get("pccl_recoveries_total") == 2

    eventually(complete, 60, lambda: f"the metrics are there: {getattr(complete, 'last', None)}")
    found = complete.last  # type: ignore[attr-defined]
    assert found["pccl_operations_total"] >= 8
    assert found["pccl_bytes_total"] >= 8 * 4096
    assert found["pccl_operation_seconds_count"] >= 8
    assert found["pccl_master_losses_total"] == 1
    assert found["pccl_master_recovery_seconds_count"] == 1
    assert found["pccl_master_members"] == 2
    assert found["pccl_store_bytes"] >= 2 * 4096
    assert {"pccl_in_flight", "pccl_epoch", "pccl_world_size", "pccl_master_boot"} <= found.keys()
