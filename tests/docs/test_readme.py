"""The README's example runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.ray
def test_the_quickstart_of_the_readme_runs_as_it_stands(tmp_path: Path) -> None:
    [code] = re.findall(r"## In 20 lines\n\n```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 20
    script = tmp_path / "quickstart.py"
    script.write_text(code)
    environment = {**os.environ, "RAY_ADDRESS": "local"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=100, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "[(0, 6.0, 3), (1, 6.0, 3), (2, 6.0, 3)]" in done.stdout


def test_every_file_that_the_readme_points_to_exists() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text()):
        if "://" not in target:
            assert (README.parent / target).exists(), target
