"""No tensor byte goes through the driver or through Ray's object store, as Ray's own figures say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray._private.internal_api import node_stats

import ray_pccl
from ray_pccl.testing import eventually
from tests.driver.workers import get, total

pytestmark = pytest.mark.ray

COUNT = 8 << 20
SIZE = 8 * COUNT
"""64 MiB."""
NOISE = 256 << 10
"""What tickets, results and the like may take."""
DRIVERS_NOISE = 16 << 20


@pytest.fixture(scope="module")
def pair(workers: list[Any]) -> Iterator[list[Any]]:
    group = ray_pccl.create_group(workers[:2], "no copies")
    get(ray_pccl.allreduce_refs([worker.make.remote(np.ones, 8) for worker in workers[:2]]))
    yield workers[:2]
    group.destroy()


def store() -> Any:
    """What the raylet says of its object store."""
    [node] = ray.nodes()
    return node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False).store_stats


def created() -> int:
    """Bytes of all objects that there ever were in the store."""
    return int(store().cumulative_created_bytes)


def used() -> int:
    return int(store().object_store_bytes_used + store().object_store_bytes_fallback)


def spilled() -> int:
    return int(store().spilled_bytes_total)


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """The most memory that this process has had since `forget_peak`."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_reducing_and_passing_on_leaves_the_object_store_and_the_driver_alone(pair: list[Any]) -> None:
    before = created(), used(), spilled()
    forget_peak()
    mine = resident()

    for step in range(4):
        refs = [worker.make.remote(np.full, COUNT, float(step + place)) for place, worker in enumerate(pair)]
        reduced = ray_pccl.allreduce_refs(refs)
        there = get(
            [worker.run.remote(lambda value: value[-1], ref) for worker, ref in zip(pair, reduced, strict=True)]
        )
        assert there == [2 * step + 1] * 2
        assert used() - before[1] < NOISE
    assert get(pair[0].run.remote(total, reduced[1])) == 7 * COUNT
    assert get(pair[1].run.remote(total, refs[0])) == 3 * COUNT

    assert created() - before[0] < NOISE
    assert spilled() == before[2]
    assert peak() - mine < DRIVERS_NOISE


def test_what_the_driver_looks_at_does_not_go_through_the_object_store(pair: list[Any]) -> None:
    before = created()

    value = get(pair[0].make.remote(np.ones, COUNT))

    assert value.nbytes == SIZE
    assert value.sum() == COUNT
    assert created() - before < NOISE


@pytest.mark.parametrize("call", ["allgather_refs", "reducescatter_refs", "reduce_refs", "broadcast_ref"])
def test_the_other_collectives_leave_the_object_store_alone_too(pair: list[Any], call: str) -> None:
    before = created()
    refs = [worker.make.remote(np.ones, COUNT) for worker in pair]

    results = getattr(ray_pccl, call)(refs[0] if call == "broadcast_ref" else refs)

    ray.wait([results] if call == "reduce_refs" else results, num_returns=1 if call == "reduce_refs" else 2, timeout=60)
    assert created() - before < NOISE


def test_these_figures_do_move_where_values_go_through_the_object_store(pair: list[Any]) -> None:
    before, used_before = created(), used()

    ref = ray.put(np.ones(COUNT))

    eventually(lambda: created() - before >= SIZE, 10)
    assert used() - used_before >= SIZE
    del ref
    eventually(lambda: used() - used_before < NOISE, 30)

    ref = pair[0].run.remote(np.ones, COUNT)
    assert get(ref).sum() == COUNT
    eventually(lambda: created() - before >= 2 * SIZE, 10)


def test_the_drivers_peak_does_move_where_it_has_a_tensor() -> None:
    forget_peak()
    mine = resident()

    np.ones(COUNT)

    assert peak() - mine >= SIZE - DRIVERS_NOISE
