"""``ray-pccl bench``: all-reduce on the cluster as it is."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ray_pccl import __version__
from ray_pccl.cli import units
from ray_pccl.cli.cluster import connected
from ray_pccl.cli.exit_codes import ExitCode
from ray_pccl.cli.options import Shared, console
from ray_pccl.errors import SettingsError

if TYPE_CHECKING:
    from ray_pccl.cli.bench.figures import Result
    from ray_pccl.cli.bench.running import Benchmark, Plan


class Op(Enum):
    """The reductions, in small letters."""

    SUM = "sum"
    AVG = "avg"
    PROD = "prod"
    MAX = "max"
    MIN = "min"


class Type(Enum):
    """The element types; here, and not only where numpy is, so that the help needs no numpy."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT32 = "int32"
    INT64 = "int64"


def bench(
    shared: Shared,
    actors: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="How many peers.", show_default="one a node, at least 2")
    ] = None,
    sizes: Annotated[str, typer.Option(metavar="LIST", help="Sizes of the tensor.")] = "4KiB,256KiB,4MiB,64MiB",
    iterations: Annotated[int, typer.Option(min=1, metavar="N", help="How often, for each size.")] = 20,
    op: Annotated[Op, typer.Option(help="The reduction.", case_sensitive=False)] = Op.SUM,
    dtype: Annotated[Type, typer.Option(help="The elements' type.", case_sensitive=False)] = Type.FLOAT32,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there; - for the standard output.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw them, such as into bench.png. Needs matplotlib.")
    ] = None,
    at_least: Annotated[
        str | None, typer.Option(metavar="RATE", help="Exit with 1 if no size reaches this bus bandwidth: 500MB/s.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="How long a size may take, in seconds.")] = 300.0,
) -> int:
    """Measure all-reduce on this cluster.

    It runs in actors of its own, one a node, and checks the numbers that come back.

    `algorithm` is the tensor's size through the median time, `bus` is what a link of a ring has to carry for that.
    It has a master of its own, so it needs none, and leaves nothing behind.
    """
    from ray_pccl.cli.bench.figures import as_json, require_matplotlib, table
    from ray_pccl.cli.bench.figures import plot as draw
    from ray_pccl.cli.bench.running import Benchmark, Plan
    from ray_pccl.cli.bench.values import ElementType

    element_type = ElementType(dtype.value)
    wanted = units.parse_rate(at_least) if at_least is not None else 0.0
    measured = parse_sizes(sizes, element_type.itemsize)
    check_target(json_file)
    check_target(plot)
    if plot is not None:
        require_matplotlib()
    plan = Plan(actors or 0, measured, iterations, op.name, element_type, timeout)
    told = console(stderr=True)
    with connected(shared) as ray, Benchmark(ray, plan) as benchmark:
        title = title_of(benchmark, plan)
        told.print(title, style="bold")
        results = run(benchmark, plan, told)
        about = {
            "version": __version__,
            "actors": len(benchmark.nodes),
            "nodes": benchmark.nodes,
            "op": op.name,
            "dtype": dtype.value,
        }
    if json_file is not None and str(json_file) == "-":
        sys.stdout.write(as_json(results, about))
    else:
        console().print(table(results))
        if json_file is not None:
            json_file.write_text(as_json(results, about))
    if plot is not None:
        draw(results, title, plot)
    best = max(result.bus_bytes_per_s for result in results)
    if best < wanted:
        told.print(f"Too slow: the best bus bandwidth is {units.rate(best)}, below {units.rate(wanted)}.", style="red")
        return ExitCode.FOUND_WRONG
    return ExitCode.OK


def run(benchmark: Benchmark, plan: Plan, told: Console) -> list[Result]:
    """The results, with a bar while they are made."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=told, transient=True, disable=not told.is_terminal) as bar:
        task = bar.add_task("", total=len(plan.sizes) * plan.iterations)

        def progress(nbytes: int, done: int) -> None:
            bar.update(task, advance=done, description=f"{units.memory(nbytes):>9}")

        progress(plan.sizes[0], 0)
        return list(benchmark.run(progress))


def title_of(benchmark: Benchmark, plan: Plan) -> str:
    """What is measured, in a line."""
    where = f"{units.several(len(benchmark.nodes), 'actor')} on {units.several(benchmark.node_count, 'node')}"
    return f"all-reduce {plan.op} of {plan.element_type.value}, {where}"


def parse_sizes(text: str, itemsize: int) -> tuple[int, ...]:
    """The sizes of a list such as ``4KiB,64MiB``, each at least an element, and whole elements.

    Raises:
        SettingsError: One is no size, or there is none.
    """
    sizes = tuple(units.parse_size(part) for part in text.split(",") if part.strip())
    if not sizes:
        raise SettingsError("--sizes needs at least one size, such as 4MiB")
    small = [size for size in sizes if size < itemsize]
    if small:
        raise SettingsError(f"--sizes {small[0]} is less than one element of {itemsize} bytes")
    return tuple(size // itemsize * itemsize for size in sizes)


def check_target(path: Path | None) -> None:
    """Before anything is measured: whether there is a directory to write the file into."""
    if path is not None and str(path) != "-" and not path.absolute().parent.is_dir():
        raise SettingsError(f"{path} can't be written: there is no directory {path.absolute().parent}")
