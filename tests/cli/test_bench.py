"""The benchmark's numbers: what goes in, what must come out, what is made of the times."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from rich.console import Console

from ray_pccl.cli.bench import command, figures
from ray_pccl.cli.bench.command import parse_sizes
from ray_pccl.cli.bench.figures import Result
from ray_pccl.cli.bench.running import Benchmark, Plan, rounds_of, spread
from ray_pccl.cli.bench.values import PERIOD, ElementType, expected, is_right, pattern, tensor
from ray_pccl.cli.errors import WrongResultError
from ray_pccl.cli.exit_codes import code_of
from ray_pccl.descriptors import ReduceOp
from ray_pccl.errors import PlottingUnavailableError, SettingsError

COMBINE = {
    ReduceOp.SUM: np.sum,
    ReduceOp.AVG: np.mean,
    ReduceOp.PROD: np.prod,
    ReduceOp.MAX: np.max,
    ReduceOp.MIN: np.min,
}


@pytest.mark.parametrize("op", ReduceOp)
@pytest.mark.parametrize("world_size", [2, 3, 64])
def test_what_must_come_out_is_what_the_inputs_make(op: ReduceOp, world_size: int) -> None:
    inputs = [tensor(ElementType.FLOAT64, 8 * 11, pattern(rank, op)) for rank in range(world_size)]
    result = COMBINE[op](np.stack(inputs), axis=0)
    assert is_right(result, expected(world_size, op), ElementType.FLOAT64)


@pytest.mark.parametrize("element_type", ElementType)
def test_one_wrong_element_is_seen_wherever_it_is(element_type: ElementType) -> None:
    wanted = expected(3, ReduceOp.SUM)
    for at in (0, 5, 9, 10):
        result = tensor(element_type, 11 * element_type.itemsize, wanted)
        assert is_right(result, wanted, element_type)
        result[at] += 1
        assert not is_right(result, wanted, element_type)


def test_the_command_line_offers_what_there_is() -> None:
    assert [kind.value for kind in command.Type] == [kind.value for kind in ElementType]
    assert {op.name for op in command.Op} == {op.name for op in ReduceOp}


def test_peers_put_in_different_values() -> None:
    assert len({tuple(pattern(rank, ReduceOp.SUM)) for rank in range(PERIOD)}) == PERIOD


def test_figures_are_made_of_the_median() -> None:
    result = Result.of(1 << 20, 4, [0.004, 0.001, 0.002, 0.003])
    assert (result.median_s, result.p99_s, result.fastest_s, result.iterations) == (0.0025, 0.004, 0.001, 4)
    assert result.algorithm_bytes_per_s == pytest.approx((1 << 20) / 0.0025)
    assert result.bus_bytes_per_s == pytest.approx(1.5 * result.algorithm_bytes_per_s)
    assert Result.of(8, 2, [float(second) for second in range(1, 201)]).p99_s == 198.0


def test_the_table_fits_80_columns() -> None:
    out = io.StringIO()
    results = [Result.of(4096, 2, [0.00021]), Result.of(1 << 30, 2, [1.5])]
    Console(file=out, width=80).print(figures.table(results))
    header, small, large = (line.split() for line in out.getvalue().splitlines())
    assert header[:3] == ["size", "median", "ms"]
    assert small[:5] == ["4", "KiB", "0.210", "0.210", "19.5"]
    assert large[:4] == ["1", "GiB", "1500", "1500"]


def test_the_file_has_every_figure() -> None:
    told = json.loads(figures.as_json([Result.of(4096, 2, [0.5])], {"op": "SUM"}))
    assert told["op"] == "SUM" and told["results"][0]["bytes"] == 4096 and told["results"][0]["median_s"] == 0.5


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    results = [Result.of(size, 4, [size * 1e-9 + 1e-4] * 3) for size in (4096, 1 << 20, 1 << 26)]
    figures.plot(results, "all-reduce", tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    monkeypatch.setattr(command, "connected", None)  # would be called
    with pytest.raises(PlottingUnavailableError, match=r"ray-pccl\[plot\]"):
        command.bench(None, plot=Path("bench.png"))  # type: ignore[arg-type]


class Answers:
    """A Ray whose actors have said all that they will say."""

    def __init__(self, *answers: Any) -> None:
        self._answers = iter(answers)

    def get(self, calls: list[Any], timeout: float) -> Any:
        return next(self._answers)


def test_a_wrong_number_ends_the_benchmark_with_1() -> None:
    plan = Plan(2, (4096,), 2, "SUM", ElementType.FLOAT32, 1.0)
    benchmark = Benchmark(Answers([None, None], [([0.1, 0.2], True), ([0.3, 0.1], False)]), plan)
    benchmark._actors = [MagicMock(), MagicMock()]
    with pytest.raises(WrongResultError, match=r"4096 bytes came back wrong on ranks \[1\]") as raised:
        list(benchmark.run(lambda nbytes, done: None))
    assert code_of(raised.value) == 1


def test_an_operation_takes_as_long_as_its_slowest_peer() -> None:
    plan = Plan(2, (4096,), 2, "SUM", ElementType.FLOAT32, 1.0)
    benchmark = Benchmark(Answers([None, None], [([0.1, 0.2], True), ([0.3, 0.1], True)]), plan)
    benchmark._actors = [MagicMock(), MagicMock()]
    [result] = benchmark.run(lambda nbytes, done: None)
    assert (result.fastest_s, result.p99_s) == (0.2, 0.3)


def test_sizes_are_whole_elements() -> None:
    assert parse_sizes("4KiB, 10,", 4) == (4096, 8)
    with pytest.raises(SettingsError):
        parse_sizes("3", 4)


def test_nodes_are_filled_evenly_and_neighbours_share_one() -> None:
    assert spread(["a", "b", "c"], 7) == ["a", "a", "a", "b", "b", "c", "c"]
    assert spread(["a"], 2) == ["a", "a"]


@pytest.mark.parametrize("iterations", [1, 50, 51, 120])
@pytest.mark.parametrize("nbytes", [4, 1 << 20, 1 << 30])
def test_portions_add_up(iterations: int, nbytes: int) -> None:
    rounds = rounds_of(nbytes, iterations)
    assert sum(rounds) == iterations and all(rounds)
    assert max(rounds) * nbytes <= max(nbytes, 64 << 20)
