"""One member of a Gloo group whose store is ours: ``python gloo_member.py ENDPOINT RANK WORLD``. Prints the sum."""

from __future__ import annotations

import gc
import sys

import torch
import torch.distributed as dist

from ray_pccl.torch import PCCLStore


def main(endpoint: str, rank: int, world: int) -> None:
    # Nobody here holds the store after this line: C++ has to find its Python half all the same.
    dist.init_process_group(
        "gloo", store=PCCLStore.connect(endpoint, "gloo", world_size=world), rank=rank, world_size=world
    )
    gc.collect()
    total = torch.full((1000,), float(rank + 1))
    dist.all_reduce(total)
    pair = dist.new_group(list(range(world)), backend="gloo")
    dist.all_reduce(total, group=pair)
    dist.barrier()
    print(int(total[999]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
