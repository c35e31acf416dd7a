"""Driving a benchmark's actors: spread over the nodes, in a group of their own, and gone afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ray_pccl.cli.bench.figures import Result
from ray_pccl.cli.bench.values import ElementType
from ray_pccl.cli.cluster import first_line
from ray_pccl.cli.errors import NotInTimeError, WrongResultError
from ray_pccl.errors import PCCLError

START_TIMEOUT_S = 60.0
LEAVE_TIMEOUT_S = 5.0
ROUND_BYTES = 64 << 20
"""Iterations between two looks at the progress: few of large tensors, many of small ones."""
ROUND_MOST = 50


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    actors: int
    """0: one a node, at least 2."""
    sizes: tuple[int, ...]
    iterations: int
    op: str
    element_type: ElementType
    timeout_s: float
    """For each step: joining, warming up, some iterations."""


def spread(nodes: Sequence[str], actors: int) -> list[str]:
    """On which node each actor runs: nodes filled evenly, and neighbours of the ring on the same node."""
    return sorted((nodes[number % len(nodes)] for number in range(actors)), key=nodes.index)


def rounds_of(nbytes: int, iterations: int) -> list[int]:
    """The iterations of one size, in the portions in which they are run."""
    portion = max(1, min(ROUND_MOST, ROUND_BYTES // max(1, nbytes)))
    return [min(portion, iterations - done) for done in range(0, iterations, portion)]


class Benchmark:
    """The actors of one benchmark. Leaving the context ends them, and with them their group and its master.

    The cluster's own master has no part in it: it would remember the group for ever.
    """

    def __init__(self, ray: Any, plan: Plan) -> None:
        self._ray, self._plan = ray, plan
        self.nodes: list[str] = []
        """The address of each actor's node, by rank."""
        self.node_count = 0
        self._master: Any = None
        self._actors: list[Any] = []

    def __enter__(self) -> Benchmark:
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def _start(self) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from ray_pccl.cli.bench.worker import TemporaryMaster, Worker

        alive = [node for node in self._ray.nodes() if node["Alive"]]
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in alive}
        actors = self._plan.actors or max(2, len(alive))
        places = spread([node["NodeID"] for node in alive], actors)
        self.nodes, self.node_count = [addresses[place] for place in places], len(set(places))
        # No CPUs are asked for: on a cluster that is busy, a benchmark that waits for ever would tell less.
        idle = {"num_cpus": 0, "max_restarts": 0}
        self._master = self._ray.remote(**idle)(TemporaryMaster).remote()
        [endpoint] = self._call([self._master], "endpoint", START_TIMEOUT_S)
        remote = self._ray.remote(**idle)(Worker)
        for rank, place in enumerate(places):
            near = NodeAffinitySchedulingStrategy(place, soft=False)
            self._actors.append(remote.options(scheduling_strategy=near).remote(endpoint, actors, rank))
        self._call(self._actors, "join", START_TIMEOUT_S + 10, START_TIMEOUT_S)

    def run(self, progress: Callable[[int, int], None]) -> Iterator[Result]:
        """The result of each size; `progress` is told the size and how many iterations were done just now."""
        plan = self._plan
        for nbytes in plan.sizes:
            self._all("prepare", nbytes, plan.element_type.value, plan.op)
            times: list[float] = []
            for iterations in rounds_of(nbytes, plan.iterations):
                answers = self._all("run", iterations)
                wrong = [rank for rank, (_, right) in enumerate(answers) if not right]
                if wrong:
                    raise WrongResultError(f"all-reduce of {nbytes} bytes came back wrong on ranks {wrong}")
                # The time of an operation is that of the last peer that was in it.
                times += [max(seconds) for seconds in zip(*(seconds for seconds, _ in answers), strict=True)]
                progress(nbytes, iterations)
            yield Result.of(nbytes, len(self._actors), times)

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        return self._call(self._actors, method, self._plan.timeout_s, *arguments)

    def _call(self, actors: Sequence[Any], method: str, timeout_s: float, *arguments: Any) -> list[Any]:
        """Calls a method of all actors at once."""
        from ray.exceptions import GetTimeoutError, RayError, RayTaskError

        calls = [getattr(actor, method).remote(*arguments) for actor in actors]
        try:
            answers: list[Any] = self._ray.get(calls, timeout=timeout_s)
        except GetTimeoutError as error:
            text = f"the benchmark's actors did not answer {method}() within {timeout_s:g} s"
            raise NotInTimeError(f"{text}: `ray-pccl doctor` may say why") from error
        except RayTaskError as error:
            if isinstance(error.cause, PCCLError):
                raise error.cause.again() from error
            raise PCCLError(f"an actor of the benchmark failed: {first_line(error.cause or error)}") from error
        except RayError as error:
            raise PCCLError(f"an actor of the benchmark is lost: {first_line(error)}") from error
        return answers

    def _end(self) -> None:
        """Tells the actors to leave, and ends them and their master."""
        actors, self._actors = self._actors, []
        with contextlib.suppress(Exception):
            leaving = [actor.leave.remote() for actor in actors]
            self._ray.wait(leaving, num_returns=len(leaving), timeout=LEAVE_TIMEOUT_S)
        for actor in [*actors, self._master]:
            with contextlib.suppress(Exception):
                self._ray.kill(actor)
