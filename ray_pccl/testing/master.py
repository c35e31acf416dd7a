"""A master in a process of its own, that can be killed and started again on its journal."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
from dataclasses import fields
from pathlib import Path

from ray_pccl.control.endpoint import Endpoint
from ray_pccl.control.frames import FrameReader
from ray_pccl.control.handshake import CHALLENGE_BYTES, DIGEST_BYTES, ClientSide
from ray_pccl.control.messages import Welcome
from ray_pccl.settings import PREFIX, Settings
from ray_pccl.testing.ownership import Ownership
from ray_pccl.testing.waiting import eventually

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
SENTINEL_TIMEOUT_S = 10.0


class MasterProcess:
    """``python -m master_actor`` on a journal in `directory`; it keeps port and key through its restarts."""

    def __init__(
        self,
        directory: Path,
        settings: Settings | None = None,
        ownership: Ownership | None = None,
        *,
        dashboard_host: str = "",
    ) -> None:
        self._journal = directory / "journal"
        self.log_path = directory / "master.log"
        """What the master wrote to its standard error, in all of its lives."""
        self._settings = settings if settings is not None else Settings.from_env()
        self.ownership = ownership if ownership is not None else Ownership()
        self._dashboard_host = dashboard_host
        self._process: subprocess.Popen[str] | None = None
        self._endpoint: Endpoint | None = None
        self._master_id = ""

    @property
    def endpoint(self) -> Endpoint:
        """Where it listens, or did when it was last alive."""
        assert self._endpoint is not None, "the master was never started"
        return self._endpoint

    @property
    def pid(self) -> int:
        """Its process, dead or alive."""
        assert self._process is not None, "the master was never started"
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> Endpoint:
        """Starts the master and returns when it listens. Started again, it goes on where it was, on the same port."""
        assert not self.alive, "the master runs already"
        port = 0 if self._endpoint is None else self._endpoint.port
        command = [sys.executable, "-m", "master_actor", "--host", "127.0.0.1", "--port", str(port)]
        path = os.pathsep.join(filter(None, sys.path))
        environment = self.ownership.environment() | _as_variables(self._settings) | {"PYTHONPATH": path}
        with self.log_path.open("a") as log:
            self._process = subprocess.Popen(  # noqa: S603
                [*command, "--journal", str(self._journal), "--dashboard-host", self._dashboard_host],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
            )
        line = _first_line(self._process, START_TIMEOUT_S)
        if not line:
            self.kill()
            raise RuntimeError(f"the master did not start; its log says:\n{self.log_path.read_text()}")
        endpoint = Endpoint.parse(line)
        assert self._endpoint in (None, endpoint), f"the master moved from {self._endpoint!r} to {endpoint!r}"
        self._endpoint = endpoint
        self._master_id = _ask_master_id(endpoint)
        return endpoint

    def kill(self) -> None:
        """SIGKILL: nothing is said to anyone. Does nothing if it does not run."""
        if self._process is not None:
            self._process.kill()
            self._ended(STOP_TIMEOUT_S)

    def stop(self) -> int:
        """SIGTERM, as an operator would end it; returns its exit code. Does nothing if it does not run."""
        assert self._process is not None, "the master was never started"
        self._process.terminate()
        return self._ended(STOP_TIMEOUT_S)

    def close(self) -> None:
        """Ends the master, last of all: `AssertionError` if a process with its mark, or a sentinel of its, stays."""
        try:
            # A sentinel ends when it has reported its last peer's death; with no master to tell, it tries for long.
            if self._endpoint is not None and not self.alive and (self.ownership.processes() or self._sentinels()):
                self.start()
            self.ownership.wait_until_gone(besides=self._process.pid if self._process is not None else None)
            # One that a communicator of the test process itself started bears no mark.
            left = "the master's sentinel ends: a communicator of the test process was not closed"
            eventually(lambda: not self._sentinels(), SENTINEL_TIMEOUT_S, left)
        finally:
            self.kill()

    def _sentinels(self) -> list[str]:
        """The sockets that sentinels of this master listen on."""
        sockets = Path("/proc/net/unix").read_text().splitlines()
        return [line for line in sockets if self._master_id and f"@ray_pccl/{self._master_id}/" in line]

    def _ended(self, timeout: float) -> int:
        assert self._process is not None and self._process.stdout is not None
        code = self._process.wait(timeout)
        self._process.stdout.close()
        return code


def _first_line(process: subprocess.Popen[str], timeout: float) -> str:
    """What the process prints first; empty if it ended, or said nothing in time."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    assert process.stdout is not None
    threading.Thread(target=lambda pipe=process.stdout: lines.put(pipe.readline()), daemon=True).start()
    try:
        return lines.get(timeout=timeout).strip()
    except queue.Empty:
        return ""


def _ask_master_id(endpoint: Endpoint) -> str:
    """The name by which sentinels know the master: it says so to everyone who proves the key."""
    with socket.create_connection((endpoint.host, endpoint.port), timeout=START_TIMEOUT_S) as sock:
        handshake = ClientSide(endpoint.key)
        sock.sendall(handshake.answer(sock.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)))
        handshake.verify(sock.recv(DIGEST_BYTES, socket.MSG_WAITALL))
        reader = FrameReader(at_master=False)
        while data := sock.recv(4096):
            for message in reader.feed(data):
                if isinstance(message, Welcome):
                    return message.master_id
    raise RuntimeError("the master closed the connection without a welcome")


def _as_variables(settings: Settings) -> dict[str, str]:
    """The settings as environment variables: the program takes them in no other form."""
    values = {spec.name: getattr(settings, spec.name) for spec in fields(settings)}
    return {PREFIX + name.upper(): str(int(v) if isinstance(v, bool) else v) for name, v in values.items()}
