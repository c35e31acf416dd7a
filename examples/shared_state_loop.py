"""The loop that PCCL recommends: admit, order the ring, synchronise the shared state, reduce; peers come and go.

    python examples/shared_state_loop.py

What each line of the loop is for, and what would go wrong without it:
- *Not before the second iteration* is the topology updated. A peer that was just admitted has missed that call, for it
  was the one that admitted it. (Here an early call does no harm: it returns at once.)
- *The world size is read anew* after each call that may change it, and only then is anything decided by it: else two
  members would go different ways.
- *The revision is one more than before*, each time. Members that step alike hold alike: only who is new receives
  anything.

Two peers, each a process of its own, begin; a third joins, and one is killed. The model is a sum: at each iteration
everyone adds the average of what the members contribute.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from master_actor import serve
from ray_pccl import Attribute, Communicator, ReduceOp, Settings, SharedState, TensorInfo

COUNT = 4096
PATIENCE_S = 30.0


def loop(comm: Communicator, pipe: Connection, number: float) -> None:
    """The recommended loop, until the example says that it is enough."""
    weights = np.full(COUNT, number, np.float32)
    state = SharedState([TensorInfo.from_numpy("model_weights", weights)])
    world_size = comm.get_attribute(Attribute.PEER_GROUP_WORLD_SIZE)
    iteration = 0
    while not pipe.poll():
        if iteration > 0:
            comm.update_topology()  # admits who waits
            world_size = comm.get_attribute(Attribute.PEER_GROUP_WORLD_SIZE)
        if world_size > 1:
            comm.optimize_topology()  # may find that the world has shrunk
            world_size = comm.get_attribute(Attribute.PEER_GROUP_WORLD_SIZE)
        iteration += 1
        if world_size < 2:
            time.sleep(0.05)  # until there are two
            continue
        state.revision += 1
        info = comm.sync_shared_state(state)
        is_new = iteration == 1
        assert is_new or info.rx_bytes == 0, "members that step alike hold alike"
        gradient = np.full(COUNT, number, np.float32)
        comm.all_reduce(gradient, op=ReduceOp.AVG)
        weights += gradient
        assert (weights == weights[0]).all()
        pipe.send((info.revision, info.rx_bytes, world_size, float(weights[0])))
        time.sleep(0.01)


def peer(pipe: Connection, endpoint: str, number: float) -> None:
    """The life of one peer."""
    settings = Settings.from_env(last_call_s=PATIENCE_S)
    with Communicator("loop", master=endpoint, expected_world_size=2, settings=settings) as comm:
        loop(comm, pipe, number)


class Peer:
    """A peer's process, and what it has told of its iterations: revision, bytes received, world size, weight."""

    def __init__(self, endpoint: str, number: float) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=peer, args=(theirs, endpoint, number), daemon=True)
        self.process.start()
        theirs.close()
        self.told: list[tuple[int, int, int, float]] = []

    def until(self, world_size: int, iterations: int = 10) -> None:
        """Waits for so many more iterations of a world of this size."""
        left = iterations
        while left:
            if not self._pipe.poll(PATIENCE_S):
                raise TimeoutError(f"a peer said nothing for {PATIENCE_S:g} s")
            self.told.append(self._pipe.recv())
            left -= self.told[-1][2] == world_size

    def end(self) -> None:
        """Kills it."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(PATIENCE_S)


def same(peers: list[Peer]) -> dict[int, float]:
    """The weight after every revision: the same on all who told of it."""
    weights: dict[int, Any] = {}
    for told in (each.told for each in peers):
        for revision, _, _, weight in told:
            assert weights.setdefault(revision, weight) == weight, f"members differ after revision {revision}"
    return weights


def main() -> None:
    """Raises if anything is not as it says."""
    with serve() as endpoint:
        first, second = peers = [Peer(str(endpoint), number) for number in (1.0, 2.0)]
        for each in peers:
            each.until(2)
        print(f"two peers, at revision {first.told[-1][0]}: {len(same(peers))} iterations alike", flush=True)
        third = Peer(str(endpoint), 4.0)
        peers.append(third)
        for each in peers:
            each.until(3)
        revision, received, _, _ = third.told[0]
        assert received == 4 * COUNT and all(told[1] == 0 for told in third.told[1:])
        print(f"a third has joined at revision {revision}, and received {received} bytes, once", flush=True)
        second.end()
        for each in (first, third):
            each.until(2)
        print(f"one was killed: two go on, at revision {first.told[-1][0]}; {len(same(peers))} iterations alike")
        for each in (first, third):
            each.end()


if __name__ == "__main__":
    main()
