"""Benchmarks, run as a user runs them, without rivals: nothing is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_all_reduce_is_timed_over_both_transports(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    options = ["--quick", "--peers", "2", "--sizes", "4KiB", "--against", "none", "--transport", "auto,tcp"]
    command = [sys.executable, str(ROOT / "benchmarks" / "allreduce.py"), *options, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(file.read_text())
    (result,) = content["results"]
    assert (result["peers"], result["nbytes"]) == (2, 4096)
    assert [times["key"] for times in result["times"]] == ["ours-auto", "ours-tcp"]
    assert all(0 < times["q1_s"] <= times["median_s"] <= times["q3_s"] for times in result["times"])
    assert content["machine"]["cores"] > 0


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(180)
def test_collectives_over_refs_are_timed_against_gloo_and_the_naive_way(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "driver.py"), "--quick", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(file.read_text())["results"]
    assert [(each["size"], each["actors"]) for each in results] == [
        ("4 KiB", 2),
        ("4 MiB", 2),
        ("4 KiB", 4),
        ("4 MiB", 4),
        ("4 MiB", 1),
    ]
    assert all(set(each["medians_ms"]) == {"ours", "gloo", "naive", "bare"} for each in results[:-1])
    assert all(median > 0 for each in results for median in each["medians_ms"].values())


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_orders_of_a_ring_are_compared_on_simulated_networks(tmp_path: Path) -> None:
    file, picture = tmp_path / "results.json", tmp_path / "orders.png"
    options = ["--short", "--json", str(file), "--plot", str(picture)]
    command = [sys.executable, str(ROOT / "benchmarks" / "topology_sim.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "slowest" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    results = json.loads(file.read_text())["results"]
    assert {each["way"] for each in results} == {"ours", "minimum sum", "greedy", "random"}
    assert {(each["kind"], each["peers"]) for each in results} == {
        (kind, peers) for kind in ("homes", "centres") for peers in (10, 40)
    }
    for ours in (each for each in results if each["way"] == "ours"):
        rivals = [each for each in results if all(each[key] == ours[key] for key in ("kind", "peers", "trial"))]
        assert ours["slowest"] == max(each["slowest"] for each in rivals)
