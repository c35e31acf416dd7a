"""The examples of elastic training in torch, in their short forms, with their final numbers checked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.scripts import run_example

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


@pytest.mark.parametrize(("example", "fewest"), [("elastic_trainer.py", 320), ("diloco.py", 90)])
def test_a_kill_and_a_join_leave_the_loss_of_a_training_what_it_would_have_been(
    example: str, fewest: int, tmp_path: Path
) -> None:
    picture = tmp_path / "curves.png"
    output = run_example(example, "--quick", "--plot", str(picture), timeout=140)
    calm, samples = re.search(r"nobody died: +final loss ([\d.]+) after (\d+) samples", output).groups()
    faulty, as_many = re.search(r"one was killed, one joined: +final loss ([\d.]+) after (\d+)", output).groups()
    assert float(faulty) == pytest.approx(float(calm), rel=0.05) and float(calm) < 0.15
    assert int(as_many) == pytest.approx(int(samples), rel=0.01)
    (steps,) = re.search(r"(\d+) steps under faults: the same bits on all peers after each", output).groups()
    assert int(steps) >= fewest
    (joined,) = re.search(r"the newcomer came after (\d+)", output).groups()
    assert fewest // 3 < int(joined) < int(steps)
    if example == "diloco.py":
        (baseline,) = re.search(r"synchronous training: +final loss ([\d.]+)", output).groups()
        assert float(faulty) < 1.1 * float(baseline)
        sent, plain = re.search(r"a peer sent (\d+) bytes .* in float32 a ring sends (\d+)", output).groups()
        assert int(sent) < 0.5 * int(plain)
    pytest.importorskip("matplotlib", reason="without matplotlib there is no picture to look at")
    assert picture.read_bytes().startswith(b"\x89PNG")
