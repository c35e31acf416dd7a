"""Chaos for as long as one likes: ``python -m tests.chaos.soak --minutes 30 --seed 7``."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.campaign import GLOO, TRANSPORTS, Campaign, Report


def main() -> int:
    """Prints a line after every group; 1 if something was found, and then the records are kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--transport", choices=TRANSPORTS, help="only this one")
    parser.add_argument("--bug", default="", help="one of tests.chaos.bugs, to see it found")
    parser.add_argument("--backend", choices=("ring", GLOO), default="ring", help="who moves the data")
    given = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="ray_pccl-chaos-"))
    print(f"seed {given.seed}, records in {directory}", flush=True)
    transports = (GLOO,) if given.backend == GLOO else (given.transport,) if given.transport else TRANSPORTS
    campaign = Campaign(directory, given.seed, transports=transports, bug=given.bug)
    ends = time.monotonic() + 60 * given.minutes

    def progress(report: Report) -> None:
        print(report, flush=True)

    report = campaign.run(lambda _: time.monotonic() >= ends, progress)
    print("\n".join(report.violations))
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
