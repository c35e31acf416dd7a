"""The benchmark of all-reduce, run as a user runs it, without rivals: nothing is installed."""

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
