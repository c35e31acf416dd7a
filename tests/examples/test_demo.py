"""The demo: run as a user runs it, and its own checks, which must be able to fail."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.examples.scripts import EXAMPLES, run_example


def _row(output: str, what: str, until: str) -> tuple[float, str]:
    """The milliseconds, and the remark, of a row of the demo's table."""
    found = re.search(rf"│ {what} *│ {until} *│ *([\d,.]+) │ (.*?) *│", output)
    assert found, f"no row {what!r}, {until!r} in: {output}"
    return float(found[1].replace(",", "")), found[2]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(120)
def test_the_demo_trains_on_while_an_actor_and_the_master_are_killed_and_one_joins(tmp_path: Path) -> None:
    picture = tmp_path / "demo.png"
    output = run_example("demo.py", "--quick", "--png", str(picture))
    formed_ms, epoch = _row(output, "4 actors form a group", "their first common step")
    assert epoch == "epoch 1" and formed_ms < 20_000
    killed_ms, remark = _row(output, "actor 3 is killed", "all 3 others hold the next average")
    assert remark.startswith("epoch 2; ") and killed_ms < 1000
    joined_ms, remark = _row(output, "actor 4 joins", "its first common step with the others")
    assert remark.startswith("36,384 bytes of state received") and joined_ms < 20_000
    noticed_ms, _ = _row(output, "the master is killed", "all members have noticed")
    back_ms, remark = _row(output, "", "Ray has restarted it, all are registered")
    assert noticed_ms < back_ms < 20_000
    meanwhile = re.fullmatch(r"(\d+) steps meanwhile, each under (\d+) ms; still epoch 3", remark)
    assert meanwhile and int(meanwhile[1]) >= 5 and int(meanwhile[2]) < back_ms
    (steps,) = re.findall(r"checked: (\d+) steps, the same bits on all after each", output)
    assert int(steps) >= 200
    assert "checked: a replay in one process has the same losses" in output
    before, after = re.search(r"checked: the loss fell from ([\d.]+) to ([\d.]+)", output).groups()
    assert float(after) < 0.8 * float(before)
    pytest.importorskip("matplotlib", reason="without matplotlib there is no picture to look at")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    import demo  # type: ignore[import-not-found]

    return demo


def _run_of(demo: Any) -> tuple[dict[int, list[Any]], list[Any]]:
    """What three actors would tell of a training of 150 steps that one of them joins late."""
    who = [(0, 1)] * 60 + [(0, 1, 2)] * 90
    model, losses = demo.replay(0, who)
    steps = [demo.Step(n, float(n), loss, who[n], 1, f"bits {n}") for n, loss in enumerate(losses)]
    steps[-1] = steps[-1]._replace(bits=demo.digest(model.weights))
    return {0: list(steps), 1: list(steps), 2: steps[60:]}, [model.weights.copy() for _ in range(3)]


def _in_step_3(seen: dict[int, list[Any]], **changes: Any) -> None:
    for actor in (0, 1):
        seen[actor][3] = seen[actor][3]._replace(**changes)


def test_the_demo_accepts_a_run_in_which_all_held_the_same(demo: Any) -> None:
    held = demo.check(*_run_of(demo))
    assert held[0].startswith("150 steps, the same bits")


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda seen, weights: seen[2].__setitem__(7, seen[2][7]._replace(bits="other")), "same bits after each step"),
        (lambda seen, weights: seen[0].pop(30), "no step is left out"),
        (lambda seen, weights: weights[1].__setitem__(5, 1.25), "same weights in the end"),
        (lambda seen, weights: _in_step_3(seen, loss=0.5), "a replay in one process"),
        (lambda seen, weights: _in_step_3(seen, contributors=(0,)), "a replay in one process"),
    ],
    ids=["bits", "missing step", "weights", "loss", "contributors"],
)
def test_the_demo_fails_when_something_did_not_hold(demo: Any, spoil: Any, complaint: str) -> None:
    seen, weights = _run_of(demo)
    spoil(seen, weights)
    with pytest.raises(demo.ClaimError, match=complaint):
        demo.check(seen, weights)
