"""Getting the facts: a probe on each live node, with a deadline for each answer."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import msgspec

from ray_pccl.cli.cluster import first_line
from ray_pccl.cli.doctor.facts import ClusterFacts, MasterFacts, Memory, NodeFacts, Unreached
from ray_pccl.errors import MasterError, MasterNotFoundError

MASTER_TIMEOUT_S = 5.0


class Examination:
    """Probes on the nodes of the connected cluster. Leaving the context ends them."""

    def __init__(self, ray: Any, namespace: str | None, timeout_s: float) -> None:
        self._ray, self._namespace, self._timeout_s = ray, namespace, timeout_s
        alive = [node for node in ray.nodes() if node["Alive"]]
        self._nodes = {node["NodeID"]: node for node in alive}
        self._names = names_of(alive)
        self._probes: dict[str, Any] = {}
        self._silent: dict[str, str] = {}

    def __enter__(self) -> Examination:
        return self

    def __exit__(self, *error: object) -> None:
        for probe in self._probes.values():
            with contextlib.suppress(Exception):
                self._ray.kill(probe)

    def collect(self) -> ClusterFacts:
        """All of the facts. Takes at most some timeouts, whoever does not answer."""
        self._start()
        told = self._ask(dict.fromkeys(self._probes, ("look", ())))
        clocks = {node: self._clock(node) for node in told}
        listening = {node: answer for node, answer in told.items() if answer["port"]}
        targets = {
            node: [other for other in listening if other != node]
            for node in told
            if len(listening) > (node in listening)
        }
        answers = self._ask(
            {node: ("dial", ([self._door(other, listening) for other in others],)) for node, others in targets.items()}
        )
        unreached = [
            Unreached(self._names[node], self._names[other], error)
            for node, errors in answers.items()
            for other, error in zip(targets[node], errors, strict=True)
            if error
        ]
        from ray_pccl.driver.master import DEFAULT_NAMESPACE, NAMESPACE_VARIABLE

        return ClusterFacts(
            nodes=tuple(self._facts(node, answer, clocks[node]) for node, answer in told.items()),
            silent=self._silent,
            unreached=tuple(unreached),
            pairs=len(listening) * (len(listening) - 1) // 2,
            master=self._master(list(told)),
            namespace=self._namespace or os.environ.get(NAMESPACE_VARIABLE) or DEFAULT_NAMESPACE,
        )

    def _start(self) -> None:
        from ray import cloudpickle
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from ray_pccl.cli.doctor import probe

        cloudpickle.register_pickle_by_value(probe)  # type: ignore[no-untyped-call]
        try:
            remote = self._ray.remote(num_cpus=0, max_restarts=0)(probe.Probe)
            for node, about in self._nodes.items():
                near = NodeAffinitySchedulingStrategy(node, soft=False)
                self._probes[node] = remote.options(scheduling_strategy=near).remote(about["NodeManagerAddress"])
        finally:
            cloudpickle.unregister_pickle_by_value(probe)  # type: ignore[no-untyped-call]

    def _ask(self, calls: dict[str, tuple[str, tuple[Any, ...]]]) -> dict[str, Any]:
        """Calls a method of several probes; the answers of those that gave one in time. The others are silent."""
        if not calls:
            return {}
        pending = {getattr(self._probes[node], name).remote(*given): node for node, (name, given) in calls.items()}
        ready, late = self._ray.wait(list(pending), num_returns=len(pending), timeout=self._timeout_s)
        for reference in late:
            self._silent[self._names[pending[reference]]] = f"no answer within {self._timeout_s:g} s"
        answers = {}
        for reference in ready:
            node = pending[reference]
            try:
                answers[node] = self._ray.get(reference, timeout=self._timeout_s)
            except Exception as error:  # whatever befell the node: it is a finding
                self._silent[self._names[node]] = first_line(error)
        return {node: answers[node] for node in calls if node in answers}

    def _clock(self, node: str) -> tuple[float, float]:
        """How far a node's clock is ahead, and how far that may be off: half of the way there and back."""
        best = (0.0, float("inf"))
        for _ in range(3):
            before = time.time()
            try:
                theirs = self._ray.get(self._probes[node].now.remote(), timeout=self._timeout_s)
            except Exception:
                return best
            after = time.time()
            best = min(best, (theirs - (before + after) / 2, (after - before) / 2), key=lambda known: known[1])
        return best

    def _door(self, node: str, listening: dict[str, Any]) -> tuple[str, int, str]:
        return self._nodes[node]["NodeManagerAddress"], listening[node]["port"], listening[node]["token"]

    def _facts(self, node: str, told: dict[str, Any], clock: tuple[float, float]) -> NodeFacts:
        about = self._nodes[node]
        store = about.get("Resources", {}).get("object_store_memory")
        known = {name: told[name] for name in NodeFacts.__struct_fields__ if name in told and name != "memory"}
        return NodeFacts(
            name=self._names[node],
            address=about["NodeManagerAddress"],
            object_store=int(store) if store is not None else None,
            memory=msgspec.convert(told["memory"], Memory),
            clock_ahead_s=clock[0],
            clock_error_s=clock[1],
            **known,
        )

    def _master(self, nodes: list[str]) -> MasterFacts | None:
        from ray_pccl.driver.master import report

        try:
            told = report(self._namespace, timeout_s=MASTER_TIMEOUT_S)
        except MasterNotFoundError:
            return None
        except MasterError as error:
            return MasterFacts("an unknown address", error=first_line(error))
        answers = self._ask({node: ("dial", ([(told.host, told.port, "")],)) for node in nodes})
        where = f"{told.host}:{told.port}"
        unreached = [Unreached(self._names[node], where, error) for node, (error,) in answers.items() if error]
        largest = max((len(group.members) for group in told.groups), default=0)
        return MasterFacts(where, largest, unreached=tuple(unreached))


def names_of(nodes: list[dict[str, Any]]) -> dict[str, str]:
    """Each node's address; where nodes share one, with the beginning of its id."""
    addresses = [node["NodeManagerAddress"] for node in nodes]
    return {
        node["NodeID"]: address if addresses.count(address) == 1 else f"{address} ({node['NodeID'][:6]})"
        for node, address in zip(nodes, addresses, strict=True)
    }
