"""What runs in each actor of a benchmark."""

from __future__ import annotations

import os
import time
from typing import Any

from master_actor.thread import MasterThread
from ray_pccl.cli.bench.values import ElementType, expected, is_right, pattern, tensor
from ray_pccl.control.endpoint import Endpoint
from ray_pccl.descriptors import ReduceOp
from ray_pccl.peer.communicator import Communicator
from ray_pccl.settings import Settings


class TemporaryMaster:
    """A master that ends with its actor, which ends with the command."""

    def __init__(self) -> None:
        import ray

        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._master = MasterThread(host=host)
        self._endpoint = self._master.start()

    def endpoint(self) -> Endpoint:
        """Where it listens."""
        return self._endpoint


class Worker:
    """One peer. It joins when it is told to, and leaves when it is told to, or with its process."""

    def __init__(self, master: Endpoint, world_size: int, rank: int) -> None:
        settings = Settings.from_env(last_call_s=0.0)
        self._comm = Communicator(
            "bench",
            master=master,
            min_world_size=world_size,
            max_world_size=world_size,
            rank=rank,
            settings=settings,
        )
        self._send: Any = None
        self._recv: Any = None
        self._wanted: Any = None
        self._element_type = ElementType.FLOAT32
        self._op = ReduceOp.SUM

    def join(self, timeout_s: float) -> tuple[int, str, int]:
        """Joins the group; its rank, its id and its process."""
        self._comm.connect(timeout=timeout_s)
        return self._comm.rank, self._comm.peer_id, os.getpid()

    def prepare(self, nbytes: int, element_type: str, op: str) -> None:
        """Makes the tensors, and warms up."""
        self._element_type, self._op = ElementType(element_type), ReduceOp[op]
        self._send = tensor(self._element_type, nbytes, pattern(self._comm.rank, self._op))
        self._recv = tensor(self._element_type, nbytes)
        self._wanted = expected(self._comm.world_size, self._op)
        self.run(2)

    def run(self, iterations: int) -> tuple[list[float], bool]:
        """The seconds of each all-reduce, all peers beginning together; and whether the last one's result is right."""
        seconds = []
        for _ in range(iterations):
            self._comm.barrier()
            began = time.perf_counter()
            self._comm.all_reduce(self._send, self._recv, op=self._op)
            seconds.append(time.perf_counter() - began)
        return seconds, is_right(self._recv, self._wanted, self._element_type)

    def leave(self) -> None:
        """Leaves the group."""
        self._comm.close()
