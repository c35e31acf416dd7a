"""Reducing what actors hold, from the driver, without moving it: plain actors, nothing inherited, nothing imported.

    python examples/allreduce_refs.py                     on a Ray of its own
    python examples/allreduce_refs.py --address auto      on the cluster that runs here

Four actors compute gradients, which stay where they are made; the driver has them averaged and hands them back. Then
one actor is killed: the survivors' average is over three, and the loop goes on.
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

import numpy as np
import ray

import ray_pccl


@ray.remote(num_cpus=0)
class Worker:
    """A plain actor."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.weights = np.zeros(1 << 20, np.float32)

    @ray_pccl.collective
    def grads(self) -> dict[str, Any]:
        """A tensor, or any nest of them."""
        return {"w": np.full(1 << 20, self.value, np.float32), "b": np.full(8, self.value)}

    def apply(self, grads: dict[str, Any]) -> float:
        """What the driver hands back is the reduced tensors themselves: no copy, no serialisation."""
        self.weights -= 0.1 * grads["w"]
        return float(grads["w"][0])

    def die(self) -> None:
        """Kills its own process, on whichever node that is."""
        os.kill(os.getpid(), signal.SIGKILL)


def step(workers: list[Any]) -> list[float | str]:
    """One step of training: what each worker applied, or why it could not."""
    refs = [worker.grads.remote() for worker in workers]
    reduced = ray_pccl.allreduce_refs(refs, op=ray_pccl.ReduceOp.AVG)  # returns at once: refs again
    applied: list[float | str] = []
    for done in [worker.apply.remote(ref) for worker, ref in zip(workers, reduced, strict=True)]:
        try:
            applied.append(ray.get(done))
        except (ray_pccl.PeerLostError, ray.exceptions.RayActorError) as error:
            applied.append(type(error).__name__)
    return applied


def main() -> None:
    """The example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="local", help="of a Ray cluster; without it, a local Ray is started")
    ray.init(address=parser.parse_args().address, log_to_driver=False)
    workers = [Worker.remote(value) for value in (1.0, 2.0, 3.0, 6.0)]
    group = ray_pccl.create_group(workers, name="train")  # joins a communicator inside each actor
    print(f"4 actors apply {step(workers)}")
    refs = [worker.grads.remote() for worker in workers]
    total = ray.get(ray_pccl.allreduce_refs(refs)[0])  # and the driver may look
    print(f"the sum begins with {total['w'][:3]} and {total['b'][:3]}")
    workers[3].die.remote()
    print(f"one was killed: {step(workers)}")
    print(f"{group.world_size} actors apply {step(workers[:3])}")
    group.destroy()


if __name__ == "__main__":
    main()
