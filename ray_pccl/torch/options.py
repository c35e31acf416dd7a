"""What a user may say about a process group: ``init_process_group("pccl", pg_options=Options(...))``."""

from __future__ import annotations

from dataclasses import dataclass

from ray_pccl.control.endpoint import Endpoint
from ray_pccl.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a process group of the backend "pccl" finds its master, and what a death does to it.

    Give the same on all ranks. Without `master`, it is ``RAY_PCCL_MASTER``; else the master of the Ray that rank 0 is
    in; else rank 0 starts one as a process of its own, which ends with the last group that uses it.
    """

    master: Endpoint | str | None = None
    """Where the master is: an endpoint, or its string form ``host:port#key``."""
    group: str | None = None
    """The group's name at the master. Who is to come later to an elastic group has to know it."""
    elastic: bool = False
    """Whether the group outlives its members: it shrinks with a death, and `ray_pccl.torch.step` admits newcomers."""
    min_world_size: int = 1
    """Of an elastic group: with fewer members, calls wait for newcomers."""
    max_world_size: int | None = None
    """Of an elastic group: at most so many members."""
    settings: Settings | None = None
    """How long to wait for what; from ``RAY_PCCL_*`` variables if not given."""
    namespace: str | None = None
    """The Ray namespace of the master, if not the default one."""
