"""Averaging what four actors hold, from the driver: the quickstart of the README, line by line.

    python examples/quickstart.py

It prints [1.0, 1.0, 1.0, 1.0], what each actor applied, and [1. 1. 1.], what the driver sees.
"""

# ruff: noqa: B905, D101, D102, E401, I001
import numpy as np, ray, ray_pccl

ray.init()


@ray.remote(num_cpus=0)
class Worker:  # a plain actor: nothing inherited, nothing imported inside
    @ray_pccl.collective
    def grads(self):  # a tensor or any nest of them: it stays in the actor, its ref carries a ticket
        return {"w": np.ones(1 << 20, np.float32), "b": np.ones(8)}

    def apply(self, grads):
        return float(grads["w"][0])


workers = [Worker.remote() for _ in range(4)]
group = ray_pccl.create_group(workers, name="train")  # joins a communicator inside each actor
refs = [worker.grads.remote() for worker in workers]
reduced = ray_pccl.allreduce_refs(refs, op=ray_pccl.ReduceOp.AVG)  # returns at once: refs again
print(ray.get([worker.apply.remote(ref) for worker, ref in zip(workers, reduced)]))  # no copy, no serialisation
print(ray.get(reduced[0])["w"][:3])  # and the driver may look
