"""What the tests have torchrun start: a Gloo group that sums once, and then works on until the file `finish` is there.

Workers do not talk to one another any more by then, so that none fails because another did: what ends them is their
agent. Each worker writes a line to `log` when its group has formed, and one when it is done; rank 0 marks each step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main(log: str, finish: str) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    def write(what: str, **more: object) -> None:
        entry = {"what": what, "rank": rank, "world": world, "pid": os.getpid(), "agent": os.getppid(), **more}
        with Path(log).open("a") as lines:
            lines.write(json.dumps(entry) + "\n")

    total = torch.ones(1)
    dist.all_reduce(total)
    master = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    write("started", sum=int(total), meet_at=master, master=os.environ.get("RAY_PCCL_MASTER", ""))
    while not Path(finish).exists():
        if rank == 0:
            with Path(f"{log}.steps").open("a") as marks:  # its length is what counts
                marks.write(".")
        time.sleep(0.02)
    write("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
