"""One master with a thousand peers: what their heartbeats cost it, and how fast all of them hear of a death.

    python benchmarks/master_load.py

The master is a process of its own. The peers are light clients in another one: each has its own connection, proves the
key, joins, beats as often as the master asks for, and answers its questions. One thing they do not do: a real peer
decodes a new epoch on a core of its own. These share one, so each only compares its bytes with those of the first.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import resource
import secrets
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from peers import PATIENCE_S, SPAWN, MasterProcess, Row, print_table, progress, shown, write_json

from ray_pccl import Endpoint
from ray_pccl.control import frames
from ray_pccl.control.handshake import CHALLENGE_BYTES, DIGEST_BYTES, ClientSide
from ray_pccl.control.messages import Answer, Ask, Beat, Decide, Join, Refused, Welcome
from ray_pccl.peer.host import host_id

GROUP = "crowd"
DIALS_AT_ONCE = 50
RECEIVE_BYTES = 1 << 18
FOOTNOTES = """\
The share is taken once a second, user and kernel time, with the beats spread evenly. A death is the reset of one
connection: until the last survivor got the master's question, which ends the old epoch for it; and until the last
survivor has the new epoch, which begins when all of them have answered. Master and clients share one machine."""
_LENGTH = struct.Struct(">I")
_BEAT, _DECIDE = b"\xa4Beat", b"\xa6Decide"
"""A message is a msgpack array that opens with its name: so these two are known without being decoded."""


class LightClient:
    """One connection to the master, with no more behind it than the master can tell."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.peer_id = f"{host_id()}-{os.getpid()}-{secrets.token_hex(8)}"
        self.buffer = bytearray()
        self.sock = socket.create_connection((endpoint.host, endpoint.port), timeout=PATIENCE_S)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._handshake = ClientSide(endpoint.key)

    def prove(self) -> None:
        """The handshake, on both sides."""
        self.sock.sendall(self._handshake.answer(self._exactly(CHALLENGE_BYTES)))
        self._handshake.verify(self._exactly(DIGEST_BYTES))
        self.sock.setblocking(False)

    def join(self, size: int) -> None:
        """Asks to be one of `size`; nobody watches this process, so that its own beats count."""
        host = host_id()
        self.send(frames.encode(Join(self.peer_id, GROUP, host, size, size, None, PATIENCE_S, 0.0, False, None)))

    def send(self, frame: bytes) -> None:
        """Sends a small frame; the kernel always has room for it."""
        sent = self.sock.send(frame)
        assert sent == len(frame), "the master does not read"

    def receive(self) -> list[bytes]:
        """The bodies of the frames that are complete."""
        data = self.sock.recv(RECEIVE_BYTES)
        if not data:
            raise ConnectionError(f"the master dropped {self.peer_id}")
        buffer = self.buffer
        buffer += data
        bodies, start = [], 0
        while len(buffer) - start >= _LENGTH.size:
            end = start + _LENGTH.size + _LENGTH.unpack_from(buffer, start)[0]
            if len(buffer) < end:
                break
            bodies.append(bytes(buffer[start + _LENGTH.size : end]))
            start = end
        del buffer[:start]
        return bodies

    def reset(self) -> None:
        """Ends the connection as a crash would: with a reset."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def _exactly(self, size: int) -> bytes:
        data = self.sock.recv(size, socket.MSG_WAITALL)
        assert len(data) == size, "the master closed the connection during the handshake"
        return data


class Crowd:
    """All light clients, on one epoll: they beat in turn, and answer what they are asked."""

    def __init__(self, endpoint: Endpoint, size: int) -> None:
        self.epoch = 0
        self._epoll = select.epoll()
        self._clients: dict[int, LightClient] = {}
        self._answers: dict[bytes, bytes] = {}
        self._decision = b""
        self._asked: set[int] = set()
        self._informed: set[int] = set()
        self._interval_s = self._echo_s = 0.0
        for _ in range(0, size, DIALS_AT_ONCE):
            clients = [LightClient(endpoint) for _ in range(min(DIALS_AT_ONCE, size - len(self._clients)))]
            for client in clients:
                client.prove()
                self._clients[client.sock.fileno()] = client
                self._epoll.register(client.sock.fileno(), select.EPOLLIN)
        for client in self._clients.values():
            client.join(size)
        self._beats = itertools.count(1)
        self._turns = deque((time.monotonic(), number) for number in self._clients)
        self._run_until(lambda: self._interval_s > 0)
        spread = self._interval_s / size
        now = time.monotonic()
        self._turns = deque((now + place * spread, number) for place, number in enumerate(self._clients))
        self._run_until(lambda: self.epoch == 1 and len(self._informed) == size)

    def idle(self, until: Callable[[], bool]) -> None:
        """Beats until told otherwise."""
        self._run_until(until, patience_s=float("inf"))

    def bury_one(self) -> tuple[float, float]:
        """One connection is reset. Seconds until all others were asked, and until all others hold the next epoch."""
        number, victim = random.choice(list(self._clients.items()))
        self._epoll.unregister(number)
        del self._clients[number]
        self._asked.clear()
        self._informed.clear()
        started = time.monotonic()
        victim.reset()
        self._run_until(lambda: len(self._asked) == len(self._clients))
        asked = time.monotonic()
        self._run_until(lambda: len(self._informed) == len(self._clients))
        return asked - started, time.monotonic() - started

    def _run_until(self, done: Callable[[], bool], *, patience_s: float = PATIENCE_S) -> None:
        ends = time.monotonic() + patience_s
        while not done():
            assert time.monotonic() < ends, f"{len(self._informed)} of {len(self._clients)} hold epoch {self.epoch}"
            for number, _ in self._epoll.poll(0.001):
                for body in self._clients[number].receive():
                    self._received(number, body)
            self._beat(time.monotonic())

    def _beat(self, now: float) -> None:
        while self._interval_s and self._turns and self._turns[0][0] <= now:
            due, number = self._turns.popleft()
            if number in self._clients:
                echo = due % self._echo_s < self._interval_s  # as often as a peer of the library asks for it
                self._clients[number].send(frames.encode(Beat(next(self._beats), echo)))
                self._turns.append((due + self._interval_s, number))

    def _received(self, number: int, body: bytes) -> None:
        if body.startswith(_BEAT, 1):
            return
        if body.startswith(_DECIDE, 1):
            self._decided(number, body)
        elif body in self._answers:  # everyone is asked the same: the answer is encoded once
            self._asked.add(number)
            self._clients[number].send(self._answers[body])
        else:
            self._first(number, body)

    def _decided(self, number: int, body: bytes) -> None:
        """A client got a new epoch: the same bytes as everybody else, which the first one decodes and checks."""
        if not self._informed:
            decision = _decode(body)
            assert isinstance(decision, Decide) and decision.epoch == self.epoch + 1, "not the next epoch"
            self.epoch, self._decision = decision.epoch, body
        assert body == self._decision, "two clients got different decisions"
        self._informed.add(number)

    def _first(self, number: int, body: bytes) -> None:
        message = _decode(body)
        if isinstance(message, Ask):
            self._answers = {body: frames.encode(Answer(message.round, self.epoch, ()))}
            self._received(number, body)
        elif isinstance(message, Welcome):
            self._interval_s = message.shared["heartbeat_interval_ms"] / 1000
            self._echo_s = message.shared["heartbeat_timeout_s"] / 2
        elif isinstance(message, Refused):
            raise RuntimeError(f"a client was refused: {message.failure.text}")


def _decode(body: bytes) -> object:
    return frames.FrameReader(at_master=False).feed(_LENGTH.pack(len(body)) + body)[0]


def _live(pipe: Connection, endpoint: str, size: int, trials: int) -> None:
    """The process of the light clients: gathers them, idles until told, then lets them die one by one."""
    _raise_file_limit()
    crowd = Crowd(Endpoint.parse(endpoint), size)
    pipe.send("gathered")
    crowd.idle(pipe.poll)
    for _ in range(trials):
        pause_ends = time.monotonic() + random.uniform(0.2, 0.5)
        crowd.idle(lambda: time.monotonic() >= pause_ends)  # noqa: B023
        pipe.send(crowd.bury_one())


def _raise_file_limit() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def cpu_seconds(pid: int) -> float:
    """The time that a process has spent on a core so far, in user and kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run(size: int, trials: int, seconds: float) -> list[Row]:
    """The load of the beats, then the deaths."""
    _raise_file_limit()  # the master inherits it
    with MasterProcess() as master:
        pipe, theirs = SPAWN.Pipe()
        crowd = SPAWN.Process(target=_live, args=(theirs, master.endpoint, size, trials), daemon=True)
        crowd.start()
        theirs.close()
        progress(f"{size} clients connect")
        pipe.recv()
        shares = []
        for second in range(round(seconds)):
            progress(f"{size} clients beat: second {second + 1} of {seconds:g}")
            began, before = time.monotonic(), cpu_seconds(master.pid)
            time.sleep(1.0)
            shares.append((cpu_seconds(master.pid) - before) / (time.monotonic() - began))
        pipe.send("go")
        asked, held = [], []
        for trial in range(trials):
            progress(f"a death among {size}: trial {trial + 1} of {trials}")
            seconds_to = pipe.recv()
            asked.append(1000 * seconds_to[0])
            held.append(1000 * seconds_to[1])
        crowd.join(PATIENCE_S)
    progress("")
    return [
        Row(f"heartbeats of {size} peers: the master's share of a core", "cores", shares, 0.5, "< 0.5"),
        Row("a death: all survivors know of it, ms", "ms", asked, 100, "< 100"),
        Row("a death: all survivors hold the new epoch, ms", "ms", held, 100, "< 100"),
    ]


def main() -> int:
    """Returns 0 if both targets were met, else 1."""
    parser = argparse.ArgumentParser(description="What a crowd of peers costs the master.")
    parser.add_argument("--peers", type=int, default=1000, help="how many (default: %(default)s)")
    parser.add_argument("--trials", type=int, default=10, help="how many deaths (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=12, help="how long to watch the beats (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write every sample to a file")
    arguments = parser.parse_args()
    rows = run(arguments.peers, arguments.trials, arguments.seconds)
    lines = [
        [row.name, str(len(row.samples)), shown(row.median), shown(max(row.samples)), row.target_text, _yes(row.met)]
        for row in rows
    ]
    print_table(["measured", "samples", "median", "max", "target", "met"], lines)
    print(f"\n{FOOTNOTES}")
    if arguments.json:
        write_json(arguments.json, rows, peers=arguments.peers, cores=os.cpu_count())
    return 0 if all(row.met for row in rows) else 1


def _yes(met: bool) -> str:
    return "yes" if met else "NO"


if __name__ == "__main__":
    sys.exit(main())
