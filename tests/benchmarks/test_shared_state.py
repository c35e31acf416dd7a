"""The benchmark of the shared state, run as a user runs it, in its short form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_syncs_are_timed_against_their_yardsticks(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "shared_state.py"), "--short", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert done.returncode in (0, 1), done.stdout + done.stderr  # a missed time may be the machine's fault
    assert "Traceback" not in done.stderr, done.stderr
    results = json.loads(file.read_text())["results"]
    targets = {result["name"]: result for result in results if result["target"] is not None}
    assert {"times the copy through a new file", "times the hashing"} <= targets.keys()
    assert ("times as fast with two sources" in targets) != ("can't be had here" in done.stdout)
    assert all(result["value"] > 0 and result["name"] in done.stdout for result in results)
