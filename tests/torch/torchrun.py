"""Runs of torchrun on this machine: agents that are real processes, each as if on a node of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from ray_pccl.testing import MasterProcess, eventually

WORKER = Path(__file__).parent / "elastic_worker.py"
START_S = 60.0
"""How long an agent and its workers may take to start: they import torch, on a machine that has other things to do."""
ENTRY_POINTS = """[torchrun.handlers]
pccl = ray_pccl.torch.handlers:pccl
pccl-dynamic = ray_pccl.torch.handlers:pccl_dynamic
"""


class Run:
    """One run: its agents, and what their workers wrote."""

    def __init__(
        self, directory: Path, master: MasterProcess, backend: str = "pccl", nodes: str = "1:2", restarts: int = 0
    ) -> None:
        self._restarts = restarts
        self._directory = directory
        self._master = master
        self._backend, self._nodes = backend, nodes
        self._log, self._finish = directory / "log", directory / "finish"
        self.agents: list[subprocess.Popen[bytes]] = []

    def start_agent(self, *conf: str, workers: int = 1) -> subprocess.Popen[bytes]:
        """Starts one more node."""
        endpoint = self._master.endpoint
        options = {
            "nnodes": self._nodes,
            "nproc-per-node": workers,
            "rdzv-backend": self._backend,
            "rdzv-endpoint": f"{endpoint.host}:{endpoint.port}",
            "rdzv-id": "run",
            "rdzv-conf": ",".join(("join_timeout=60", *conf)),
            "local-addr": "127.0.0.1",
            "monitor-interval": 0.1,
            "max-restarts": self._restarts,
        }
        flags = [f"--{name}={value}" for name, value in options.items()]
        environment = self._master.ownership.environment() | {
            "PYTHONPATH": os.pathsep.join([self._entry_points(), *filter(None, sys.path)]),
            "RAY_PCCL_KEY": endpoint.key.hex(),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "LOGLEVEL": "INFO",
        }
        with (self._directory / f"agent{len(self.agents)}").open("wb") as output:
            command = [sys.executable, "-m", "torch.distributed.run", *flags, str(WORKER)]
            agent = subprocess.Popen(
                [*command, str(self._log), str(self._finish)], env=environment, stdout=output, stderr=output
            )
        self.agents.append(agent)
        return agent

    def _entry_points(self) -> str:
        """A directory from which torchrun learns of our handlers, where the package was installed without them."""
        if not entry_points(group="torchrun.handlers", name="pccl-dynamic"):
            info = self._directory / "entry_points" / "ray_pccl_handlers-0.dist-info"
            info.mkdir(parents=True, exist_ok=True)
            (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ray-pccl-handlers\nVersion: 0\n")
            (info / "entry_points.txt").write_text(ENTRY_POINTS)
        return str(self._directory / "entry_points")

    def lines(self, what: str = "started") -> list[dict[str, Any]]:
        """What workers have written so far."""
        text = self._log.read_text() if self._log.exists() else ""
        return [entry for line in text.splitlines() if (entry := json.loads(line))["what"] == what]

    def wait_started(self, world: int, agents: int, after: int = 0) -> list[dict[str, Any]]:
        """The lines of a whole group of workers that started after the first `after` lines."""
        wanted = {agent.pid for agent in self.agents[-agents:]} if agents > 1 else None

        def complete() -> list[dict[str, Any]] | None:
            for agent in self.agents:
                assert agent.poll() in (None, -signal.SIGKILL), self.outputs()
            found = [entry for entry in self.lines()[after:] if entry["world"] == world]
            latest = {entry["rank"]: entry for entry in found}
            whole = len(latest) == world and len({str(entry["meet_at"]) for entry in latest.values()}) == 1
            met = wanted is None or {entry["agent"] for entry in latest.values()} == wanted
            return [latest[rank] for rank in range(world)] if whole and met else None

        found = eventually(complete, START_S, lambda: f"{world} workers start:\n{self.outputs()}", every_s=0.05)
        assert found is not None
        return found

    def finish(self) -> None:
        """Lets the workers end, and waits for all agents, which must have succeeded unless they were killed."""
        self._finish.touch()
        for agent in self.agents:
            assert agent.wait(START_S) in (0, -signal.SIGKILL), self.outputs()

    def kill_node(self, agent: subprocess.Popen[bytes], workers: list[dict[str, Any]]) -> None:
        """SIGKILL to an agent and its workers, as when a machine is gone."""
        for pid in [agent.pid, *(entry["pid"] for entry in workers if entry["agent"] == agent.pid)]:
            os.kill(pid, signal.SIGKILL)
        agent.wait(START_S)

    def outputs(self) -> str:
        """What the agents and their workers said."""
        paths = sorted(self._directory.glob("agent*"))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-6000:]}" for path in paths)

    def wait_steps(self, number: int) -> None:
        """Returns when the workers have made so many more steps."""
        start = self._steps()
        eventually(lambda: self._steps() >= start + number, START_S, lambda: f"steps:\n{self.outputs()}")

    def _steps(self) -> int:
        path = Path(f"{self._log}.steps")
        return path.stat().st_size if path.exists() else 0

    def end(self) -> None:
        """Ends what is left of the run."""
        for agent in self.agents:
            if agent.poll() is None:
                agent.kill()
                agent.wait(START_S)
        for entry in self.lines():
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                if str(WORKER) in Path(f"/proc/{entry['pid']}/cmdline").read_text().replace("\0", " "):
                    os.kill(entry["pid"], signal.SIGKILL)
