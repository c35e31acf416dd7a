"""Every collective, called inside Ray actors: blocking and in flight, with tags; messages; a mistake; a death.

    python examples/actors.py

Four actors each hold a `Communicator` of one group and call the same things. Each says what it was left with; the
driver compares that with what is due, and prints what rank 0 got. In the end one makes a mistake, and one is killed.
"""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

# Ray reports every process that dies. Here that is the point, and no news.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed")
import numpy as np
import ray

import ray_pccl
from ray_pccl import (
    CollectiveMismatchError,
    Communicator,
    DataType,
    PeerLostError,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceOp,
    Settings,
)

ACTORS = 4
PATIENCE_S = 60.0
IN_FLIGHT = 8
BYTES = QuantizationOptions(DataType.UINT8, QuantizationAlgorithm.MIN_MAX)


@ray.remote(num_cpus=0)
class Peer:
    """Any class will do: nothing is inherited. Rank r contributes r + 1."""

    def __init__(self, rank: int) -> None:
        # The group forms when all four are there, each with the rank it asks for.
        settings = Settings.from_env(last_call_s=PATIENCE_S)
        self.comm = Communicator(
            "actors", min_world_size=2, max_world_size=ACTORS, rank=rank, label=f"number {rank}", settings=settings
        )

    def connect(self) -> tuple[int, int]:
        """Joins."""
        self.comm.connect(timeout=PATIENCE_S)
        return self.comm.rank, self.comm.world_size

    def mine(self, count: int = 2) -> Any:
        """What this rank contributes."""
        return np.full(count, self.comm.rank + 1, np.float32)

    def reductions(self) -> dict[str, Any]:
        """All-reduce with every op, in place or not, in 8 bits; reduce to one; reduce-scatter."""
        comm, held = self.comm, {}
        for op in ReduceOp:
            tensor = self.mine()
            info = comm.all_reduce(tensor, op=op)  # in place
            held[f"all_reduce {op.name}"] = tensor
            assert info.world_size == len(info.contributors) == ACTORS
        result = np.empty(2, np.float32)
        comm.all_reduce(self.mine(), result)  # into another tensor
        held["all_reduce into another"] = result
        tensor = self.mine(1000)
        comm.all_reduce(tensor, quantization_options=BYTES)  # a byte an element travels; still the same bits on all
        held["all_reduce in 8 bits"] = tensor[:2]
        shared = ray_pccl.empty(2, np.float32)  # memory that the other peers of the host read in place
        shared[:] = self.mine()
        comm.all_reduce(shared)
        held["all_reduce of shared memory"] = np.array(shared)
        tensor = self.mine()
        comm.reduce(tensor, root=1)
        held["reduce to rank 1"] = tensor
        part = np.empty(1, np.float32)
        comm.reduce_scatter(self.mine(comm.world_size) * np.arange(1, 5, dtype=np.float32), part)
        held["reduce_scatter"] = part
        return held

    def moves(self) -> dict[str, Any]:
        """Those that bring tensors from rank to rank, and reduce nothing."""
        comm, held = self.comm, {}
        rank, world = comm.rank, comm.world_size
        tensor = self.mine()
        comm.broadcast(tensor, root=2)
        held["broadcast from rank 2"] = tensor
        everyone = np.empty(world, np.float32)
        comm.all_gather(self.mine(1), everyone)
        held["all_gather"] = everyone
        at_root = np.empty(world, np.float32) if rank == 0 else None
        comm.gather(self.mine(1), at_root, root=0)
        held["gather to rank 0"] = at_root if at_root is not None else np.empty(0)
        part = np.empty(1, np.float32)
        comm.scatter(np.arange(10, 10 + world, dtype=np.float32) if rank == 3 else None, part, root=3)
        held["scatter from rank 3"] = part
        swapped = np.empty(world, np.float32)
        comm.all_to_all(10 * self.mine(world) + np.arange(world, dtype=np.float32), swapped)
        held["all_to_all"] = swapped
        comm.barrier()  # all are here
        return held

    def messages(self) -> dict[str, Any]:
        """A token goes around the ring; then all send to the right, and receive from the left, at once."""
        comm = self.comm
        left, right = (comm.rank - 1) % comm.world_size, (comm.rank + 1) % comm.world_size
        token = np.zeros(1, np.float32)
        if comm.rank > 0:
            comm.recv(token, left)
        token += comm.rank + 1
        if comm.rank < comm.world_size - 1:
            comm.send(token, right)
        from_left = np.empty(2, np.float32)
        receiving = comm.recv_async(from_left, left, tag=1)
        comm.send(self.mine(), right, tag=1)
        receiving.result()
        return {"send and recv, a token": token, "send and recv, to the right": from_left}

    def in_flight(self) -> dict[str, Any]:
        """Eight all-reduces and a barrier at once. Their tags pair them: each rank launches them in another order."""
        comm = self.comm
        tensors = [tag * self.mine() for tag in range(IN_FLIGHT)]
        order = np.random.default_rng(comm.rank).permutation(IN_FLIGHT).tolist()
        handles = [comm.all_reduce_async(tensors[tag], tag=tag) for tag in order]
        handles.append(comm.barrier_async(tag=IN_FLIGHT))
        for handle in handles:
            succeeded, status, info = handle.wait()  # or handle.result(), which raises
            assert succeeded and info is not None, status
            assert handle.done()
        return {f"{IN_FLIGHT} all_reduce_async": np.array([tensor[0] for tensor in tensors])}

    def mistake(self) -> str:
        """Rank 3 brings a tensor of another size: an error for all, and nobody's input has changed."""
        tensor = self.mine(3 if self.comm.rank == 3 else 2)
        try:
            self.comm.all_reduce(tensor)
        except CollectiveMismatchError as error:
            assert (tensor == self.comm.rank + 1).all()
            return str(error)
        return ""

    def death(self) -> tuple[str, list[float], tuple[str, ...]]:
        """Rank 3 never comes, for it is killed. What an `_async` call says, and what a blocking one returns."""
        tensor = self.mine()
        said = ""
        try:
            self.comm.all_reduce_async(tensor, tag=1).result()
        except PeerLostError as error:  # retry=False is the default of `_async`
            said = str(error)
            assert (tensor == self.comm.rank + 1).all()
        info = self.comm.all_reduce(tensor)  # tries again by itself, with who is left
        return said, tensor.tolist(), tuple(peer_id.rpartition("-")[0] for peer_id in info.contributors)

    def pid(self) -> int:
        """Its process."""
        return os.getpid()


DUE: dict[str, Any] = {
    "all_reduce SUM": lambda rank: [10, 10],
    "all_reduce AVG": lambda rank: [2.5, 2.5],
    "all_reduce PROD": lambda rank: [24, 24],
    "all_reduce MAX": lambda rank: [4, 4],
    "all_reduce MIN": lambda rank: [1, 1],
    "all_reduce into another": lambda rank: [10, 10],
    "all_reduce in 8 bits": lambda rank: [10, 10],
    "all_reduce of shared memory": lambda rank: [10, 10],
    "reduce to rank 1": lambda rank: [10, 10] if rank == 1 else [rank + 1, rank + 1],
    "reduce_scatter": lambda rank: [10 * (rank + 1)],
    "broadcast from rank 2": lambda rank: [3, 3],
    "all_gather": lambda rank: [1, 2, 3, 4],
    "gather to rank 0": lambda rank: [1, 2, 3, 4] if rank == 0 else [],
    "scatter from rank 3": lambda rank: [10 + rank],
    "all_to_all": lambda rank: [10 + rank, 20 + rank, 30 + rank, 40 + rank],
    "send and recv, a token": lambda rank: [(rank + 1) * (rank + 2) / 2],
    "send and recv, to the right": lambda rank: [(rank - 1) % ACTORS + 1] * 2,
    f"{IN_FLIGHT} all_reduce_async": lambda rank: [10 * tag for tag in range(IN_FLIGHT)],
}
"""What each rank is left with."""


def main() -> None:
    """Raises if anything is not as it says."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    ray_pccl.start_master()
    peers = [Peer.remote(rank) for rank in range(ACTORS)]
    assert ray.get([peer.connect.remote() for peer in peers]) == [(rank, ACTORS) for rank in range(ACTORS)]
    seen = set()
    for what in ("reductions", "moves", "messages", "in_flight"):
        held = ray.get([getattr(peer, what).remote() for peer in peers], timeout=PATIENCE_S)
        for kind, first in held[0].items():
            for rank in range(ACTORS):
                assert held[rank][kind].tolist() == DUE[kind](rank), f"{kind}: rank {rank} has {held[rank][kind]}"
            print(f"{kind:28} {first}", flush=True)
            seen.add(kind)
    assert seen == DUE.keys()

    said = ray.get([peer.mistake.remote() for peer in peers], timeout=PATIENCE_S)
    assert all("count=2" in text and "count=3" in text for text in said), said  # on all, naming both sides
    print(f"a mistake, told to all:      {said[0]}", flush=True)

    *survivors, victim = peers
    pid = ray.get(victim.pid.remote())
    answers = [peer.death.remote() for peer in survivors]
    os.kill(pid, signal.SIGKILL)
    told, sums, who = zip(*ray.get(answers, timeout=PATIENCE_S), strict=True)
    assert all(told) and set(map(tuple, sums)) == {(6.0, 6.0)} and set(who) == {("number 0", "number 1", "number 2")}
    print(f"a death, in flight:          {told[0]}")
    print(f"a death, retried:            {sums[0]}, of {', '.join(who[0])}")
    print(f"{len(seen)} kinds of calls, and all {ACTORS} ranks were left with what is due")
    ray_pccl.stop_master()
    ray.shutdown()


if __name__ == "__main__":
    main()
