"""Training that does not stop: four Ray actors, one is killed, one joins, and then the master is killed.

    python examples/demo.py                    (or: make demo) about half a minute, and a picture in demo.png
    python examples/demo.py --png FILE
    python examples/demo.py --quick            fewer steps

Four actors train a small network data-parallel, each on data of its own: at every step they average their gradients.
What each of them does is in demo_training.py, what is shown in demo_display.py. What happens is told with milliseconds,
and checked: after every step all actors hold the same bits; a replay of the whole run in one process gives the same
losses and weights. The demo ends with exit code 1 if anything that it claims did not hold.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Ray reports every process that dies. Here that is the point, and no news.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the actors share the cores
import numpy as np
import ray
from demo_display import Display, Happening, Mark, draw
from demo_training import ACTORS, PATIENCE_S, Model, Step, Trainer, digest, replay

import ray_pccl
from ray_pccl import MembershipChange

STEPS, QUICK_STEPS = 900, 200


class ClaimError(Exception):
    """Something that the demo says was not so."""


def claim(holds: bool, what: str) -> None:
    """What the demo says must hold."""
    if not holds:
        raise ClaimError(what)


class Run:
    """What the driver knows of the training."""

    def __init__(self, display: Display) -> None:
        self.display = display
        self.actors: dict[int, Any] = {}
        self.seen: dict[int, list[Step]] = {}

    @property
    def step(self) -> int:
        """The last step that all living actors have made."""
        return min(steps[-1].number if (steps := self.seen.get(actor)) else -1 for actor in self.actors)

    def look(self) -> None:
        """Asks the living actors for their news."""
        answers = [(n, a.look.remote(len(self.seen.setdefault(n, [])))) for n, a in self.actors.items()]
        for number, ref in answers:
            steps, error = ray.get(ref, timeout=PATIENCE_S)
            claim(not error, f"actor {number} failed: {error}")
            self.seen[number] += steps
        last = max((steps[-1] for steps in self.seen.values() if steps), default=None)
        if last is not None:
            self.display.progress(last.number + 1, last.loss, len(last.contributors))

    def until(self, what: str, done: Callable[[], bool]) -> None:
        """Lets the training come so far."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            claim(time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {what}")
            time.sleep(0.05)
            self.look()

    def advance(self, steps: int) -> None:
        """Lets all make so many steps more."""
        due = self.step + steps
        self.until(f"step {due}", lambda: self.step >= due)

    def all_have(self, what: str, wanted: Callable[[Step], bool]) -> list[Step]:
        """The first such step of each living actor. Waits for it."""

        def find() -> list[Step]:
            firsts = [next(filter(wanted, self.seen.get(number, [])), None) for number in self.actors]
            return [step for step in firsts if step is not None]

        self.until(what, lambda: len(find()) == len(self.actors))
        return find()

    def all_saw(self, change: MembershipChange, since: float) -> float:
        """When the last of the living actors saw such an event. Waits for it."""
        times: list[float] = []

        def find() -> bool:
            told = ray.get([actor.tell.remote() for actor in self.actors.values()], timeout=PATIENCE_S)
            firsts = [[at for at, event in events if at >= since and event.change is change] for events, _, _ in told]
            times[:] = [found[0] for found in firsts if found]
            return len(times) == len(self.actors)

        self.until(f"all have seen {change.value!r}", find)
        return max(times)

    # ------------------------------------------------------------------------------------------- what happens

    def form(self) -> Happening:
        """Four actors begin."""
        self.actors = {number: Trainer.remote(number, seed=0) for number in range(ACTORS)}
        ray.get([actor.pid.remote() for actor in self.actors.values()], timeout=PATIENCE_S)  # all are up
        ray.get([actor.train.remote() for actor in self.actors.values()])
        firsts = self.all_have("the first step", lambda step: True)
        asked = min(ray.get(actor.tell.remote())[1] for actor in self.actors.values())
        took_ms = 1000 * (max(step.at for step in firsts) - asked)
        claim({len(step.contributors) for step in firsts} == {ACTORS}, "all four contribute to the first step")
        self.display.say(f"{ACTORS} actors have found each other and made their first step, {took_ms:.0f} ms", "green")
        return Happening(
            f"{ACTORS} actors form a group", "their first common step", took_ms, f"epoch {firsts[0].epoch}"
        )

    def kill_one(self) -> tuple[Happening, Mark]:
        """One is killed in the middle of it."""
        victim, before = ACTORS - 1, self.seen[0][-1].epoch
        pid = ray.get(self.actors[victim].pid.remote())
        struck = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        del self.actors[victim]
        firsts = self.all_have("a step without it", lambda s: s.at > struck and victim not in s.contributors)
        took_ms = 1000 * (max(step.at for step in firsts) - struck)
        claim({(s.number, s.contributors, s.epoch) for s in firsts} == {(firsts[0].number, (0, 1, 2), before + 1)},
              "the survivors go on with the same step, in the next epoch")  # fmt: skip
        self.display.say(f"actor {victim} is killed (SIGKILL): the others hold their average, {took_ms:.1f} ms", "red")
        happening = Happening(f"actor {victim} is killed", f"all {len(firsts)} others hold the next average", took_ms,
                              f"epoch {before + 1}; step {firsts[0].number} is the first without it")  # fmt: skip
        return happening, Mark(struck, f"actor {victim} is killed\n{took_ms:.0f} ms", "tab:red")

    def join_one(self) -> tuple[Happening, Mark]:
        """A new one comes, with weights of its own, and is healed."""
        number = ACTORS
        began = time.monotonic()
        newcomer = Trainer.remote(number, seed=99)
        ray.get(newcomer.train.remote(), timeout=PATIENCE_S)
        self.actors[number] = newcomer
        firsts = self.all_have("a step with it", lambda step: number in step.contributors)
        _, asked, received = ray.get(newcomer.tell.remote())
        took_ms = 1000 * (max(step.at for step in firsts) - asked)
        state = Model(0)
        wanted = state.weights.nbytes + state.velocity.nbytes + state.step.nbytes
        claim({step.number for step in firsts} == {firsts[0].number}, "its first step is the same one for all")
        claim(received == wanted, f"it receives the state of {wanted} bytes, not {received}")
        remark = f"{received:,} bytes of state received; its process took {asked - began:.1f} s"
        self.display.say(f"actor {number} joins, and receives the state: {took_ms:.0f} ms to its first step", "green")
        happening = Happening(f"actor {number} joins", "its first common step with the others", took_ms, remark)
        return happening, Mark(asked, f"actor {number} joins\n{took_ms:.0f} ms", "tab:green")

    def kill_master(self, master: Any) -> tuple[list[Happening], Mark]:
        """The master is killed. Nobody waits for it."""
        pid, epoch = ray.get(master.pid.remote()), self.seen[0][-1].epoch
        struck = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        noticed_ms = 1000 * (self.all_saw(MembershipChange.MASTER_LOST, struck) - struck)
        self.display.say(
            f"the master is killed (SIGKILL): all have noticed after {noticed_ms:.1f} ms, and go on", "red"
        )
        back = self.all_saw(MembershipChange.MASTER_BACK, struck)
        self.advance(1)
        away = [step for step in self.seen[0] if struck < step.at < back]
        claim(bool(away), "steps are made without a master")
        claim({step.epoch for step in self.seen[0] if step.at > struck} == {epoch}, "the epoch stays")
        claim(ray.get(master.pid.remote()) != pid, "it is another process")
        back_ms = 1000 * (back - struck)
        self.display.say(f"Ray has restarted it, {back_ms:.0f} ms; meanwhile {len(away)} steps were made", "green")
        longest_ms = max(1, math.ceil(1000 * max(np.diff([step.at for step in away]), default=0.0)))
        remark = f"{len(away)} steps meanwhile, each under {longest_ms} ms; still epoch {epoch}"
        happenings = [
            Happening("the master is killed", "all members have noticed", noticed_ms, "and go on without it"),
            Happening("", "Ray has restarted it, all are registered", back_ms, remark),
        ]
        return happenings, Mark(
            struck, f"the master is killed\n{len(away)} steps without it", "tab:purple", back - struck
        )

    def finish(self) -> list[Any]:
        """Ends the training: the weights that each living actor holds."""
        weights: list[Any] = ray.get([actor.finish.remote() for actor in self.actors.values()], timeout=PATIENCE_S)
        self.look()
        return weights


def check(seen: dict[int, list[Step]], weights: list[Any]) -> list[str]:
    """What held, of all steps that anyone saw and of the weights in the end. Raises if something did not."""
    history = seen[0]  # it was there all the time
    claim([step.number for step in history] == list(range(len(history))), "no step is left out or made twice")
    alike: dict[int, set[tuple[Any, ...]]] = {}
    for steps in seen.values():
        for step in steps:
            alike.setdefault(step.number, set()).add((step.bits, step.loss, step.contributors))
    apart = [number for number, found in alike.items() if len(found) > 1]
    claim(not apart, f"all hold the same bits after each step, but not after step {apart[:1]}")
    claim({digest(held) for held in weights} == {history[-1].bits}, "all hold the same weights in the end")
    model, losses = replay(0, [step.contributors for step in history])
    off = max(abs(step.loss - loss) for step, loss in zip(history, losses, strict=True))
    same = off < 1e-3 and np.allclose(model.weights, weights[0], atol=1e-3)
    claim(same, f"a replay in one process has the same losses and weights, but it is off by {off:g}")
    first, last = (float(np.mean([step.loss for step in part])) for part in (history[:10], history[-10:]))
    claim(last < 0.8 * first, f"the loss falls, but it went from {first:.3f} to {last:.3f}")
    return [
        f"{len(history)} steps, the same bits on all after each; weights {history[-1].bits[:8]}",
        f"a replay in one process has the same losses, within {off:.0e}",
        f"the loss fell from {first:.3f} to {last:.3f}",
    ]


def train(display: Display, steps: int) -> tuple[dict[int, list[Step]], list[Happening], list[Mark], list[str]]:
    """The whole story: who saw which steps, what happened, what to mark in the picture, and what held."""
    master = ray_pccl.start_master()
    with display:
        run = Run(display)
        formed = run.form()
        run.advance(steps // 5)
        killed, died = run.kill_one()
        run.advance(steps // 8)
        joined, came = run.join_one()
        run.advance(steps // 5)
        away, gone = run.kill_master(master)
        run.advance(max(steps // 5, steps - run.step))
        weights = run.finish()
    ray_pccl.stop_master()
    return run.seen, [formed, killed, joined, *away], [died, came, gone], check(run.seen, weights)


def main() -> None:
    """Exit code 1 if anything was not as it says."""
    parser = argparse.ArgumentParser(description="Training that goes on while actors, and the master, are killed.")
    parser.add_argument("--png", type=Path, default=Path("demo.png"), help="the picture (default: ./%(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    arguments = parser.parse_args()
    started = time.monotonic()
    steps = QUICK_STEPS if arguments.quick else STEPS
    display = Display(steps)
    display.say("a local Ray starts, with a master and four actors ...")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        seen, happenings, marks, held = train(display, steps)
    except (ClaimError, TimeoutError, ray.exceptions.RayError) as error:
        display.console.print(f"the demo failed: {error}", style="bold red", markup=False)
        sys.exit(1)
    finally:
        ray.shutdown()
    display.table(happenings, "What happened, from each event on")
    for what in held:
        display.say(f"checked: {what}", "green")
    history = seen[0]
    try:
        draw(arguments.png, *zip(*[(s.at, s.loss, len(s.contributors)) for s in history], strict=True), marks)
        display.say(f"the loss, the members and the events are drawn in {arguments.png}")
    except ImportError:
        display.say("no picture without matplotlib: pip install ray-pccl[plot]")
    display.say(f"all of it took {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
