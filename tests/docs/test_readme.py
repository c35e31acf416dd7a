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
@pytest.mark.parametrize(
    ("title", "printed"),
    [
        ("From the driver, in 20 lines", "[1.0, 1.0, 1.0, 1.0]\n[1. 1. 1.]"),
        ("In actors, in 20 lines", "[(0, 6.0, 3), (1, 6.0, 3), (2, 6.0, 3)]"),
    ],
)
def test_the_quickstarts_of_the_readme_run_as_they_stand(tmp_path: Path, title: str, printed: str) -> None:
    [code] = re.findall(rf"## {title}\n\n```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 20
    script = tmp_path / "quickstart.py"
    script.write_text(code)
    environment = {**os.environ, "RAY_ADDRESS": "local"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=100, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout


def test_every_file_that_the_readme_points_to_exists() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text()):
        if "://" not in target:
            assert (README.parent / target).exists(), target
