"""The benchmark of torch, run as a user runs it, in its short form and without rivals: nothing is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_steps_and_sums_and_recovery_are_timed_in_torch(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    options = ["--quick", "--against", "none", "--peers", "2", "--sizes", "256KiB"]
    command = [sys.executable, str(ROOT / "benchmarks" / "torch_step.py"), *options, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert done.returncode in (0, 1), done.stdout + done.stderr  # a missed time may be the machine's fault
    assert not done.stderr, done.stderr  # who is left out, and why
    content = json.loads(file.read_text())
    keys = {result["title"]: [times["key"] for times in result["times"]] for result in content["results"]}
    steps = ("DDP step", "DDP step, views", "DDP step, hook")
    assert keys == {**{title: ["pccl"] for title in steps}, "256KiB": ["pccl", "ours-auto"]}
    assert all(times["median_s"] > 0 for result in content["results"] for times in result["times"])
    (row,) = content["recovery"]
    assert row["name"] == "ours"
    assert len(row["samples"]) == 2
    assert all(0 < milliseconds < 15_000 for milliseconds in row["samples"])  # nobody gave up
