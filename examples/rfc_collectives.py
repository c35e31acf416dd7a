"""The two examples of Ray's RFC 202011 on collectives over ObjectRefs, with their imports and options changed.

    python examples/rfc_collectives.py

The first reduces refs from the driver, the second inside the actors.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import ray

import ray_pccl
from ray_pccl import collective


@ray.remote(num_gpus=1)
class Actor:
    """As the RFC has it."""

    def __init__(self) -> None:
        pass

    @collective
    def prepare(self) -> int:
        """What the collective begins with."""
        buffer = 1
        return buffer  # noqa: RET504

    def compute(self, buffer: int) -> int:
        """What is reduced."""
        return buffer * 2


@ray.remote(num_gpus=1)
class Imperative:
    """The RFC's second one."""

    def __init__(self) -> None:
        self.buffer = np.ones(4, np.float32)

    def compute(self) -> Any:
        """Reduces inside the actor."""
        return ray_pccl.allreduce(self.buffer)


def declarative() -> list[int]:
    """The first example."""
    actors = [
        ray_pccl.options(
            Actor, collective={"group_name": "177", "group_rank": [0, 1], "world_size": 2, "backend": "ring"}
        ).remote()
        for i in range(2)
    ]
    refs = [a.prepare.remote() for a in actors]
    results = ray_pccl.allreduce_refs([a.compute.remote(ref) for (a, ref) in zip(actors, refs, strict=True)])
    values: list[int] = ray.get(results)
    ray_pccl.get_group("177").destroy()
    return values


def imperative() -> list[Any]:
    """The second example."""
    actors = [
        ray_pccl.options(
            Imperative, collective={"group_name": "178", "group_rank": [0, 1], "world_size": 2, "backend": "ring"}
        ).remote()
        for i in range(2)
    ]
    results = [a.compute.remote() for a in actors]
    values: list[Any] = ray.get(results)
    ray_pccl.get_group("178").destroy()
    return values


def main() -> None:
    """Both. Ray's GPUs are only counted here, so any machine will do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="local", help="of a Ray cluster; without it, a local Ray is started")
    address = parser.parse_args().address
    ray.init(address=address, log_to_driver=False, **({"num_gpus": 4} if address == "local" else {}))
    print(declarative())
    print(imperative())


if __name__ == "__main__":
    main()
