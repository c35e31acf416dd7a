"""``ray-pccl launch``: a whole cluster from a file. What it does is in `ray_pccl.launching`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ray_pccl.cli.options import Shared, console

TIMEOUT_S = 900.0


def launch(
    shared: Shared,
    cluster_yaml: Annotated[
        Path, typer.Argument(metavar="CLUSTER_YAML", help="A cluster file, as `ray up` takes it.", dir_okay=False)
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    timeout: Annotated[float, typer.Option(min=0.0, help="How long to wait for all of it, in seconds.")] = TIMEOUT_S,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Return when `ray up` has; wait for nothing.")] = False,
) -> int:
    """Bring up a cluster with `ray up`, and wait until it works.

    The file is checked first. At the end all nodes and the master have answered, and the status is shown.
    """
    from ray_pccl.launching.command import launch as begin

    return begin(cluster_yaml, yes=yes, timeout_s=timeout, wait=not no_wait, console=console())
