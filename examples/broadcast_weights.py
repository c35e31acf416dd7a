"""New weights for inference actors while they serve: a trainer publishes, eight actors take over, one of them dies.

    python examples/broadcast_weights.py             16 MiB of weights, 10 versions
    python examples/broadcast_weights.py --quick     4 MiB, 5 versions

The trainer's weights stay in its process; `broadcast_ref` brings a copy to each inference actor, and returns at once:
refs, which the driver passes on to the actors. Meanwhile it goes on asking them for predictions. It is asserted that
every prediction was made with the weights of one version alone, that no actor ever goes back to an older one, and that
all that live hold each new version, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import signal
import statistics
import time
from typing import Any

# Ray reports every process that dies. Here that is the point, and no news.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed|will be retried")
import numpy as np
import ray

import ray_pccl
from ray_pccl import PeerLostError

SERVERS = 8
TARGET = 3.0
PATIENCE_S = 60.0


@ray.remote(num_cpus=0)
class Trainer:
    """Its weights come halfway closer to the target with each step."""

    def __init__(self, count: int) -> None:
        self.version = 0
        self.weights = np.zeros(count, np.float32)

    @ray_pccl.collective
    def publish(self) -> dict[str, Any]:
        """A step of training. What it returns stays here until it is broadcast; its ref carries a ticket."""
        self.weights = self.weights + (np.float32(TARGET) - self.weights) / 2
        self.version += 1
        return {"version": self.version, "weights": self.weights}


@ray.remote(num_cpus=0, max_concurrency=2)  # one thread takes over weights, one predicts
class Server:
    """Serves. A plain actor: nothing of ray_pccl in it."""

    def __init__(self) -> None:
        self.model: dict[str, Any] | None = None

    def load(self, model: dict[str, Any]) -> int:
        """Takes over a version. What the driver hands over is this actor's own copy: nothing is copied again."""
        self.model = model
        return int(model["version"])

    def digest(self) -> str:
        """The same for the same bits."""
        assert self.model is not None
        return hashlib.blake2b(self.model["weights"], digest_size=16).hexdigest()

    def predict(self, scale: float) -> tuple[int, float, float]:
        """The version it was made with, and the smallest and the largest of all predictions."""
        model = self.model
        if model is None:
            return 0, 0.0, 0.0
        predictions = scale * model["weights"][::64]
        return model["version"], float(predictions.min()), float(predictions.max())

    def pid(self) -> int:
        """Its process."""
        return os.getpid()


def due(version: int) -> float:
    """What every weight of a version is."""
    return float(TARGET * (1 - 0.5**version))


class Clients:
    """Ask all servers for predictions, and look at what comes."""

    def __init__(self, servers: list[Any]) -> None:
        self.servers = servers
        self.asked = {server: server.predict.remote(2.0) for server in servers}
        self.newest = dict.fromkeys(servers, 0)
        self.answers = 0

    def look(self) -> None:
        """Checks the answers that are there, and asks anew."""
        for server, ref in list(self.asked.items()):
            if not ray.wait([ref], timeout=0)[0]:
                continue
            try:
                version, smallest, largest = ray.get(ref)
            except ray.exceptions.RayActorError:  # it died; a client would ask another one
                del self.asked[server], self.newest[server]
                continue
            assert smallest == largest == 2 * due(version), f"a mixture: {smallest} to {largest} in version {version}"
            assert version >= self.newest[server], "it went back to an older version"
            self.newest[server] = version
            self.answers += 1
            self.asked[server] = server.predict.remote(2.0)


def publish(trainer: Any, group: Any, clients: Clients, victim: Any, kill: int | None) -> tuple[float, dict[Any, int]]:
    """One version for all: milliseconds until all have it, and which each then has. Kills one in the midst of it."""
    began = time.monotonic()
    ref = trainer.publish.remote()
    actors = group.actors  # the trainer, and who serves
    copies = ray_pccl.broadcast_ref(ref, group=group)  # one for each of these actors, in their order; returns at once
    if kill is not None:
        os.kill(kill, signal.SIGKILL)
    loading = {
        server.load.remote(copy): server for server, copy in zip(actors, copies, strict=True) if server != trainer
    }
    held: dict[Any, int] = {}
    waiting = list(loading)
    while waiting:
        assert time.monotonic() < began + PATIENCE_S, "the servers do not get their weights"
        clients.look()  # they serve meanwhile
        ready, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0.001)
        for done in ready:
            try:
                held[loading[done]] = ray.get(done)
            except (PeerLostError, ray.exceptions.RayActorError):
                assert loading[done] == victim, "one that was not killed has died"
    return 1000 * (time.monotonic() - began), held


def main() -> None:
    """Raises if anything that it claims did not hold."""
    parser = argparse.ArgumentParser(description="Weights for inference actors, while they serve.")
    parser.add_argument("--quick", action="store_true", help="smaller weights, fewer versions")
    quick = parser.parse_args().quick
    mib, versions = (4, 5) if quick else (16, 10)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    trainer = Trainer.remote(mib << 18)
    servers = [Server.remote() for _ in range(SERVERS)]
    group = ray_pccl.create_group([trainer, *servers], name="weights")
    group.wait_ready(PATIENCE_S)
    pids = ray.get([server.pid.remote() for server in servers])
    clients = Clients(servers)
    took: list[float] = []
    seen: set[str] = set()
    alive = SERVERS
    for version in range(1, versions + 1):
        dies = version == versions // 2 + 1
        milliseconds, held = publish(trainer, group, clients, servers[3], pids[3] if dies else None)
        alive -= dies
        assert len(held) == alive and set(held.values()) == {version}, held
        digests = set(ray.get([server.digest.remote() for server in held]))
        assert len(digests) == 1 and not digests & seen, "they hold different weights, or old ones"
        seen |= digests
        note = "; one was killed in the midst of it" if dies else ""
        print(f"version {version}: {mib} MiB to {alive} servers in {milliseconds:.0f} ms{note}", flush=True)
        took.append(milliseconds)
    served = clients.answers
    while set(clients.newest.values()) != {versions}:  # the requests that were under way
        assert clients.answers < served + 100 * SERVERS, clients.newest
        clients.look()
    assert len(clients.newest) == alive
    print(f"{clients.answers} predictions meanwhile, each with one version; {alive} servers hold version {versions}")
    print(f"{statistics.median(took):.0f} ms for a broadcast, the median of {versions}, while they serve")
    group.destroy()
    ray_pccl.stop_master()
    ray.shutdown()


if __name__ == "__main__":
    main()
