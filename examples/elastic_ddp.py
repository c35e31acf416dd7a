"""Data-parallel training on Ray actors that come and go: one joins late and is healed, one is killed.

    python examples/elastic_ddp.py                       about 160 steps, and a loss curve in elastic_ddp.png
    python examples/elastic_ddp.py --steps 10            fewer
    python examples/elastic_ddp.py --plot FILE

Three actors train one model, each on data of its own. At every step they let in who waits, bring their shared state
(the model's and the optimiser's) to the same content, average their gradients, and let the optimiser make its step.
That step is deterministic: so the sync, which compares all contents, finds nothing to send. It is asserted at each step
that it sent nothing, except to a newcomer, and in the end that all actors held the same bits after every one.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# Ray reports every process that dies. Here that is the point, and no news.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed")
import ray
import torch

import ray_pccl
from ray_pccl import Communicator, ReduceOp, Settings, SharedState

ACTORS = 3
GROUP = "elastic"
PATIENCE_S = 60.0
BATCH = 256
PAUSE_S = 0.005


class Step(NamedTuple):
    """What one actor saw of one step."""

    revision: int
    loss: float
    contributors: int
    received: int
    """Bytes of shared state that it received."""
    bits: str
    """A digest of its weights and of the optimiser's state, after the step."""


@ray.remote(num_cpus=0, max_concurrency=4)
class Trainer:
    """One peer. Its training runs in a thread, so that the driver can ask how far it is."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)  # every actor begins with weights of its own: the first sync makes them one
        self._data = torch.Generator().manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-2)
        self.steps: list[Step] = []
        self.error = ""
        self._enough = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def pid(self) -> int:
        """Its process."""
        return os.getpid()

    def train(self) -> None:
        """Begins."""
        self._thread.start()

    def look(self) -> tuple[list[Step], str, bool]:
        """All steps so far, what went wrong, and whether it has ended."""
        return self.steps, self.error, not self._thread.is_alive()

    def finish(self) -> None:
        """Has all actors stop after a step that they agree on."""
        self._enough = True

    def _run(self) -> None:
        try:
            # The group forms as soon as all three are there; one or two would wait for the others.
            settings = Settings.from_env(last_call_s=PATIENCE_S)
            comm = Communicator(GROUP, expected_world_size=ACTORS, settings=settings)
            with comm:
                self._train(comm)
        except BaseException as error:
            self.error = f"{type(error).__name__}: {error}"

    def _train(self, comm: Communicator) -> None:
        state = SharedState.from_state_dict(self.model, self.optimizer)
        is_new = True
        while True:
            comm.update_topology()  # lets in who waits; a newcomer's first call returns at once
            state.revision += 1
            info = comm.sync_shared_state(state)
            assert is_new or info.rx_bytes == 0, f"the weights went apart: {info.updated} were replaced"
            is_new = False
            loss, contributors, enough = self._step(comm)
            self.steps.append(Step(info.revision, loss, contributors, info.rx_bytes, self._bits(state)))
            if enough:
                return
            time.sleep(PAUSE_S)

    def _step(self, comm: Communicator) -> tuple[float, int, bool]:
        """One step on the average gradient. Whoever dies in it: the others average theirs."""
        points = 4 * torch.rand(BATCH, 2, generator=self._data) - 2
        target = torch.sin(3 * points[:, :1]) * points[:, 1:]
        loss = (self.model(points) - target).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        parameters = list(self.model.parameters())
        gradients = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])
        # The loss, and the wish to stop, travel with the gradients: so all see the same of them, too.
        shared = torch.cat([gradients, torch.tensor([float(loss.detach()), float(self._enough)])])
        info = comm.all_reduce(shared, op=ReduceOp.AVG)
        start = 0
        for parameter in parameters:
            parameter.grad = shared[start : start + parameter.numel()].reshape(parameter.shape).clone()
            start += parameter.numel()
        self.optimizer.step()
        return float(shared[-2]), info.world_size, bool(shared[-1] > 0)

    @staticmethod
    def _bits(state: SharedState) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for info in state.infos:
            digest.update(info.load())
        return digest.hexdigest()


# ------------------------------------------------------------------------------------------------------ the driver


class Run:
    """What the driver knows of the training."""

    def __init__(self) -> None:
        self.actors: dict[str, Any] = {}
        self.seen: dict[str, list[Step]] = {}
        self.busy = [""]
        """Who still trains."""

    def start(self, name: str) -> None:
        """Starts the training of an actor that is there."""
        ray.get(self.actors[name].train.remote())

    def look(self) -> None:
        """Asks all living actors how far they are."""
        answers = ray.get([actor.look.remote() for actor in self.actors.values()], timeout=PATIENCE_S)
        self.busy = [name for name, (_, _, ended) in zip(self.actors, answers, strict=True) if not ended]
        for name, (steps, error, _) in zip(self.actors, answers, strict=True):
            assert not error, f"actor {name} failed: {error}"
            self.seen[name] = steps

    def until(self, done: Callable[[], bool], what: str) -> None:
        """Waits for the training to come so far."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {what}"
            time.sleep(0.02)
            self.look()

    def revision(self, name: str) -> int:
        """The last revision that an actor has trained on."""
        steps = self.seen.get(name)
        return steps[-1].revision if steps else 0

    def advance(self, steps: int) -> None:
        """Waits until all have made so many steps more."""
        due = max(map(self.revision, self.actors)) + steps
        self.until(lambda: all(self.revision(name) >= due for name in self.actors), f"revision {due}")


def train(steps: int) -> tuple[dict[str, list[Step]], int, int]:
    """The whole training: what everyone saw, and the revisions at which one joined and one was killed."""
    run = Run()
    names = [f"actor {number}" for number in range(ACTORS)]
    run.actors = {name: Trainer.remote(number) for number, name in enumerate(names)}
    late = Trainer.remote(99)
    pids = ray.get([actor.pid.remote() for actor in [*run.actors.values(), late]])
    for name in names:
        run.start(name)
    run.advance(steps)
    print(f"{ACTORS} actors have made {run.revision(names[0])} steps, with the same bits after each", flush=True)

    run.actors["late actor"] = late
    run.start("late actor")
    run.until(lambda: bool(run.seen.get("late actor")), "the late actor is in")
    healed = run.seen["late actor"][0]
    assert healed.received > 0, "it began with weights of its own, and was not healed"
    print(f"one joined at step {healed.revision}, and received {healed.received} bytes of model and optimiser")
    run.advance(steps)

    victim = names[1]
    before = run.revision(victim)
    os.kill(pids[1], signal.SIGKILL)
    del run.actors[victim]
    run.until(lambda: any(s.contributors == ACTORS for s in run.seen[names[0]] if s.revision > before), "they go on")
    lost = next(s.revision for s in run.seen[names[0]] if s.revision > before and s.contributors == ACTORS)
    print(f"one was killed: from step {lost} on, {ACTORS} are left, and average without it", flush=True)
    run.advance(2 * steps)
    ray.get([actor.finish.remote() for actor in run.actors.values()])
    run.until(lambda: not run.busy, "all have stopped")
    return run.seen, healed.revision, lost


def check(seen: dict[str, list[Step]]) -> None:
    """All who took part in a step held the same bits after it, and nobody received anything but its first state."""
    by_revision: dict[int, set[tuple[str, float]]] = {}
    for name, steps in seen.items():
        assert [step.revision for step in steps] == list(range(steps[0].revision, steps[0].revision + len(steps)))
        assert all(step.received == 0 for step in steps[1:]), f"{name} received something in the steady state"
        for step in steps:
            by_revision.setdefault(step.revision, set()).add((step.bits, step.loss))
    apart = [revision for revision, found in by_revision.items() if len(found) > 1]
    assert not apart, f"the weights went apart at step {apart[0]}"
    print(
        f"{len(by_revision)} steps of {len(seen)} actors: bit-identical after each, rx_bytes == 0 in the steady state"
    )


def plot(steps: list[Step], joined: int, lost: int, file: Path) -> None:
    """Draws the loss, and how many contributed to it."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 5), height_ratios=[4, 1], layout="constrained"
    )
    revisions = [step.revision for step in steps]
    top.plot(revisions, [step.loss for step in steps], color="tab:blue", linewidth=1.2)
    top.set(ylabel="mean loss of all contributors", yscale="log", title="Elastic data-parallel training on Ray actors")
    events = ((joined, "one joins, and is healed", "tab:green", 0.98), (lost, "one is killed", "tab:red", 0.91))
    for at, what, color, height in events:
        for axes in (top, bottom):
            axes.axvline(at, color=color, linestyle="--", linewidth=1)
        top.annotate(what, (at, height), xycoords=("data", "axes fraction"), xytext=(4, 0), textcoords="offset points",
                     color=color, va="top")  # fmt: skip
    bottom.step(revisions, [step.contributors for step in steps], where="mid", color="black")
    bottom.set(xlabel="step (revision of the shared state)", ylabel="actors", ylim=(0, ACTORS + 2), yticks=[0, 2, 4])
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
    print(f"the loss fell from {steps[0].loss:.3f} to {steps[-1].loss:.3f}: {file}")


def main() -> None:
    """Raises if anything that it claims did not hold."""
    parser = argparse.ArgumentParser(description="Training that goes on while actors come and go.")
    parser.add_argument("--steps", type=int, default=40, help="between two events (default: %(default)s)")
    parser.add_argument("--plot", type=Path, default=Path("elastic_ddp.png"), help="where the loss curve goes")
    arguments = parser.parse_args()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        ray_pccl.start_master()
        seen, joined, lost = train(arguments.steps)
        ray_pccl.stop_master()
    finally:
        ray.shutdown()
    check(seen)
    try:
        plot(seen["actor 0"], joined, lost, arguments.plot)
    except ImportError:
        print("no loss curve without matplotlib: pip install ray-pccl[plot]")


if __name__ == "__main__":
    main()
