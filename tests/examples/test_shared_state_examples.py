"""The examples of the shared state, run as a user runs them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.scripts import run_example

pytestmark = pytest.mark.slow


@pytest.mark.timeout(120)
def test_the_recommended_loop_admits_heals_and_goes_on() -> None:
    output = run_example("shared_state_loop.py", timeout=100)
    (joined, received) = re.search(r"joined at revision (\d+), and received (\d+) bytes, once", output).groups()
    (last, alike) = re.search(r"two go on, at revision (\d+); (\d+) iterations alike", output).groups()
    assert int(received) == 16384 and int(joined) > 10
    assert int(alike) == int(last), "the first revision was 1, and each sync added one"


@pytest.mark.ray
@pytest.mark.timeout(240)
def test_training_stays_bit_identical_while_actors_come_and_go(tmp_path: Path) -> None:
    picture = tmp_path / "loss.png"
    output = run_example("elastic_ddp.py", "--steps", "8", "--plot", str(picture), timeout=200)
    (steps,) = re.search(r"(\d+) steps of 4 actors: bit-identical after each, rx_bytes == 0", output).groups()
    assert int(steps) >= 32
    (received,) = re.search(r"one joined at step \d+, and received (\d+) bytes", output).groups()
    assert int(received) > 3 * 4 * 257, "the weights, and both moments of the optimiser"
    pytest.importorskip("matplotlib", reason="without matplotlib there is no picture to look at")
    assert picture.read_bytes().startswith(b"\x89PNG")
    before, after = re.search(r"the loss fell from ([\d.]+) to ([\d.]+)", output).groups()
    assert float(after) < float(before)
