"""The program ``ray-pccl``: what people and scripts do to a master and its groups, from any node of a cluster.

`application` has the commands and turns errors into one line and an exit code (`exit_codes`); `cluster` finds Ray;
`status`, `evict`, `master`, `launch`, `bench` and `doctor` hold the commands. What is shown is a pure function of what
was found (`report_view`, `doctor.checks`, `bench.figures`). Ray is imported when a command needs it, and not before:
``--help`` and the shell's completion answer at once.
"""

from __future__ import annotations

import sys


def main() -> None:
    """The entry point of ``ray-pccl`` and ``python -m ray_pccl.cli``: runs the command line and exits with its code."""
    from ray_pccl.cli.application import run

    sys.exit(run(sys.argv[1:]))
