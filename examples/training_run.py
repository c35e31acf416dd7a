"""What elastic_trainer.py and diloco.py have in common: something to train, peers in processes, and the picture.

Three peers train; where it is asked for, one of them is killed, and another one joins.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

import master_actor
from ray_pccl import Communicator, Settings

PEERS = 3
SAMPLES = 3072
PATIENCE_S = 90.0


class Row(NamedTuple):
    """What one peer tells of one step."""

    step: int
    samples: int
    """How many were used until then, by all."""
    loss: float
    contributors: int
    bits: int
    """A digest of what all peers are to hold alike."""


class Ending(NamedTuple):
    """What a peer holds in the end."""

    loss: float
    """On data that nobody has trained on."""
    bits: int
    samples: int
    joined_at: int
    """Steps that the others had made when it came."""
    sent: int = 0
    """Bytes that it handed to others for one average."""


@dataclass
class Story:
    """One whole run."""

    rows: list[Row]
    """Of a peer that was there all the time."""
    endings: list[Ending]
    killed_at: int = 0
    joined_at: int = 0
    everyones: dict[int, set[int]] = field(default_factory=dict)
    """Which digests were seen after each step."""

    @property
    def loss(self) -> float:
        """The final one."""
        return self.endings[0].loss


# ---------------------------------------------------------------------------------------------- what is trained


def problem(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A wavy surface, measured with errors: so no loss falls to 0."""
    generator = torch.Generator().manual_seed(seed)
    points = 4 * torch.rand(count, 2, generator=generator) - 2
    heights = torch.sin(2 * points[:, :1]) * points[:, 1:]
    return points, heights + 0.3 * torch.randn(count, 1, generator=generator)


def network(seed: int) -> torch.nn.Sequential:
    """A small one. Each peer begins with weights of its own: joining makes them one."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))


def loss_of(model: torch.nn.Module, points: torch.Tensor, heights: torch.Tensor) -> torch.Tensor:
    """The mean square error."""
    return (model(points) - heights).square().mean()


def final_loss(model: torch.nn.Module) -> float:
    """On data that nobody has trained on."""
    with torch.no_grad():
        return float(loss_of(model, *problem(seed=1000, count=SAMPLES)))


# --------------------------------------------------------------------------------------------------- the peers

Train = Callable[[Communicator, int, int, Callable[[Row], None]], Ending]
"""Trains in one peer: its communicator, its number, how many samples to use, and what to tell each step to."""


def _peer(train: Train, endpoint: str, number: int, budget: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    pipe.recv()  # told to begin
    # The group forms as soon as all three are there. All begin with the weights of rank 0, so both runs with the same.
    settings = Settings.from_env(last_call_s=PATIENCE_S)
    rank = number if number < PEERS else None
    with Communicator("train", master=endpoint, rank=rank, expected_world_size=PEERS, settings=settings) as comm:
        pipe.send(train(comm, number, budget, pipe.send))


class Run:
    """Peers in processes of their own, and what they have told."""

    def __init__(self, train: Train, endpoint: str, budget: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "ray_pccl.torch.training", "ray_pccl.torch.diloco"])
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for number in range(PEERS + 1):
            ours, theirs = context.Pipe()
            process = context.Process(target=_peer, args=(train, endpoint, number, budget, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.rows: list[list[Row]] = [[] for _ in self.pipes]
        self.endings: dict[int, Ending] = {}

    def begin(self, number: int) -> None:
        """Has a peer connect, and train."""
        self.pipes[number].send("begin")

    def until(self, what: str, done: Callable[[], bool]) -> None:
        """Listens to all peers until they have come so far."""
        deadline = time.monotonic() + PATIENCE_S
        listening = list(self.pipes)
        while not done():
            assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {what}"
            for pipe in wait(listening, 0.05):
                number = self.pipes.index(pipe)
                try:
                    told = pipe.recv()
                except EOFError:
                    listening.remove(pipe)
                    continue
                if isinstance(told, Ending):
                    self.endings[number] = told
                else:
                    self.rows[number].append(told)

    def samples(self) -> int:
        """How many were used so far."""
        return self.rows[0][-1].samples if self.rows[0] else 0


def run(train: Train, budget: int, *, faults: bool) -> Story:
    """Three peers use so many samples; with `faults` one is killed after a third, and another joins after half."""
    with master_actor.serve() as endpoint:
        crew = Run(train, str(endpoint), budget)
        expected = list(range(PEERS))
        try:
            for number in expected:
                crew.begin(number)
            if faults:
                crew.until("a third", lambda: crew.samples() > budget // 3)
                os.kill(crew.processes[1].pid, signal.SIGKILL)
                expected = [0, 2, PEERS]
                crew.until("half", lambda: crew.samples() > budget // 2)
                crew.begin(PEERS)
            crew.until("the end", lambda: all(number in crew.endings for number in expected))
        finally:
            for process in crew.processes:
                process.kill()
                process.join()
    return _told(crew, expected, faults=faults)


def _told(crew: Run, expected: list[int], *, faults: bool) -> Story:
    """The story, which must be one: no step has two results, and all hold the same in the end."""
    story = Story(crew.rows[0], [crew.endings[number] for number in expected])
    for rows in crew.rows:
        for row in rows:
            story.everyones.setdefault(row.step, set()).add(row.bits)
    apart = [step for step, digests in story.everyones.items() if len(digests) > 1]
    assert not apart, f"the peers went apart in step {apart[0]}"
    assert len({ending.bits for ending in story.endings}) == 1, "the peers hold different models in the end"
    assert [row.step for row in story.rows] == list(range(1, len(story.rows) + 1)), "a committed step was lost"
    if faults:
        sizes = [row.contributors for row in story.rows]
        story.killed_at = next(row.samples for row in story.rows if row.contributors == PEERS - 1)
        story.joined_at = next(row.samples for row in story.rows if row.step > story.endings[-1].joined_at)
        assert sizes[0] == sizes[-1] == PEERS and PEERS - 1 in sizes, f"the group had {sorted(set(sizes))} members"
    return story


def compare(calm: Story, faulty: Story, tolerance: float) -> None:
    """The same final loss within noise."""
    print(f"nobody died:                 final loss {calm.loss:.4f} after {calm.rows[-1].samples} samples")
    print(f"one was killed, one joined:  final loss {faulty.loss:.4f} after {faulty.rows[-1].samples} samples")
    print(f"{len(faulty.everyones)} steps under faults: the same bits on all peers after each")
    apart = abs(faulty.loss / calm.loss - 1)
    assert apart < tolerance, f"the losses differ by {apart:.1%}, more than {tolerance:.0%}"


def plot(title: str, calm: Story, faulty: Story, file: Path) -> None:
    """Draws both losses, and how many trained."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no loss curves without matplotlib: pip install ray-pccl[plot]")
        return
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 5), height_ratios=[4, 1], layout="constrained"
    )
    for story, color, name in ((calm, "tab:blue", "nobody dies"), (faulty, "tab:orange", "one dies, one joins")):
        samples = [row.samples for row in story.rows]
        top.plot(samples, _smooth([row.loss for row in story.rows]), color=color, linewidth=1.2, label=name)
        bottom.step(samples, [row.contributors for row in story.rows], where="mid", color=color)
    for at, what, color in ((faulty.killed_at, "killed", "tab:red"), (faulty.joined_at, "joined", "tab:green")):
        for axes in (top, bottom):
            axes.axvline(at, color=color, linestyle="--", linewidth=1)
        top.annotate(what, (at, 0.97), xycoords=("data", "axes fraction"), xytext=(4, 0), textcoords="offset points",
                     color=color, va="top")  # fmt: skip
    top.set(ylabel="loss", yscale="log", title=title)
    top.legend(loc="upper right")
    bottom.set(xlabel="samples used by all", ylabel="peers", ylim=(0, PEERS + 1), yticks=[0, PEERS])
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
    print(f"both curves: {file}")


def _smooth(values: list[float]) -> list[float]:
    """Each is the mean of the last ten."""
    return [sum(values[max(0, end - 10) : end]) / min(end, 10) for end in range(1, len(values) + 1)]
