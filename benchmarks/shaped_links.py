"""How well all-reduce fills slow links: four "hosts", each a network namespace whose way out carries 1 Gbit/s.

    python benchmarks/shaped_links.py            all of it
    python benchmarks/shaped_links.py --quick    one round

The namespaces hang on a bridge in a fifth one, so no packet is seen outside. Needs root, `ip` and `tc`; where it may
not make namespaces it says so and exits with 0. What it made it removes, and what an earlier run left that was killed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

from peers import print_table, progress
from report import machine
from teams import WORKER, Team, TeamFailed
from work import MIB, Work

from ray_pccl.testing.namespaces import NotPermitted, inside, master_in, namespaces, run, shape

HOSTS = 4
STREAM_BYTES = 128 * MIB
PLAIN, QUANTIZED = Work(64 * MIB), Work(64 * MIB, quantized=True)
TARGET_SHARE, TARGET_SPEEDUP = 0.94, 3.0
PATIENCE_S = 60.0


# ------------------------------------------------------------------------------------------------------ the hosts


def address(host: int) -> str:
    """Of the host, in its namespace."""
    return f"10.199.77.{host + 1}"


@contextlib.contextmanager
def shaped_hosts(rate: str) -> Iterator[list[str]]:
    """The names of the namespaces, one per host; they are gone afterwards, with whoever was still in them."""
    with namespaces("switch", *map(str, range(HOSTS))) as (switch, *hosts):
        run("ip", "-n", switch, "link", "add", "name", "bridge0", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "bridge0", "up")
        for number, host in enumerate(hosts):
            port = f"port{number}"
            ends = ["type", "veth", "peer", "name", "eth0", "netns", host]
            run("ip", "-n", switch, "link", "add", "name", port, *ends)
            run("ip", "-n", switch, "link", "set", port, "master", "bridge0", "up")
            run("ip", "-n", host, "address", "add", f"{address(number)}/24", "dev", "eth0")
            run("ip", "-n", host, "link", "set", "eth0", "up")
            shape(host, "eth0", rate)
        yield hosts


# ------------------------------------------------------------------------------------------------- measurements


def stream_rate(hosts: list[str]) -> float:
    """Bytes per second that one plain TCP stream reaches from one host to another."""
    script = str(Path(__file__).resolve())
    receiver = subprocess.Popen(
        inside(hosts[1], sys.executable, script, "--receive", address(1)), stdout=subprocess.PIPE, text=True
    )
    try:
        assert receiver.stdout is not None
        port = receiver.stdout.readline().strip()
        send = [sys.executable, script, "--send", f"{address(1)}:{port}"]
        subprocess.run(inside(hosts[0], *send), check=True, timeout=PATIENCE_S)
        return float(receiver.stdout.readline())
    finally:
        receiver.kill()
        receiver.wait()


def receive(host: str) -> None:
    """Prints a port, takes one stream there, and prints the rate between its first and its last byte."""
    buffer = bytearray(MIB)
    with socket.create_server((host, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
        with connection:
            connection.recv_into(buffer, 1)
            began, received = time.monotonic(), 0
            while count := connection.recv_into(buffer):
                received += count
            print(received / (time.monotonic() - began), flush=True)


def send(target: str) -> None:
    """Sends one stream."""
    host, _, port = target.rpartition(":")
    data = bytes(MIB)
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        for _ in range(STREAM_BYTES // len(data)):
            connection.sendall(data)


def all_reduce_seconds(hosts: list[str], rounds: int) -> dict[Work, list[float]]:
    """Times of all-reduce, a peer on each host: as float32 and in 8 bits, in turn."""
    seconds: dict[Work, list[float]] = {PLAIN: [], QUANTIZED: []}
    with master_in(hosts[0], address(0)) as endpoint:
        command = [sys.executable, str(WORKER), "ours", "SOCKET", str(HOSTS), endpoint, "shaped"]
        team = Team("ours", HOSTS, [inside(host, *command) for host in hosts])
        try:
            for work in seconds:
                progress("checking that the sums are right")
                team.call("hold", work)
                team.call("check", work)
            for number in range(rounds):
                for work, times in seconds.items():
                    progress(f"round {number + 1} of {rounds}: {'8 bits' if work.quantized else 'float32'}")
                    by_rank = team.call("time", work, 1, 3)
                    times += [max(each) for each in zip(*by_rank, strict=True)]
        finally:
            team.end()
    progress("")
    return seconds


# -------------------------------------------------------------------------------------------------------- the whole


def report(rate: float, seconds: dict[Work, list[float]]) -> dict[str, float]:
    """Prints the table; the figures behind it."""
    plain, quantized = (statistics.median(times) for times in seconds.values())
    bound = 2 * (HOSTS - 1) / HOSTS * PLAIN.nbytes / rate
    share, speedup = bound / plain, plain / quantized
    lines = [
        ["one plain TCP stream, the fastest", f"{8 * rate / 1e6:.0f} Mbit/s", "-", "-"],
        ["64 MiB float32 in the least time", f"{1000 * bound:.0f} ms", "-", "-"],
        ["64 MiB float32, ours", f"{1000 * plain:.0f} ms", "-", "-"],
        _judged(
            "share of what is possible", f"{100 * share:.1f} %", f">= {100 * TARGET_SHARE:g} %", share, TARGET_SHARE
        ),
        ["64 MiB in 8 bits, ours", f"{1000 * quantized:.0f} ms", "-", "-"],
        _judged("times as fast as float32", f"{speedup:.2f}", f">= {TARGET_SPEEDUP:g}", speedup, TARGET_SPEEDUP),
    ]
    print_table([f"{HOSTS} hosts", "found", "target", "met"], lines)
    print("\nThe least time is 2(n-1)/n times the bytes at the rate of the plain stream, the fastest of four.")
    print("A time is the slowest rank's.")
    if share > 1:
        print("More than is possible: the plain streams were disturbed, so the share says nothing. Run it again.")
    return {
        "stream_bytes_per_s": rate,
        "float32_s": plain,
        "quantized_s": quantized,
        "share": share,
        "speedup": speedup,
    }


def _judged(name: str, value: str, target: str, found: float, least: float) -> list[str]:
    return [name, value, target, "yes" if found >= least else "NO"]


def interrupted(number: int, _: FrameType | None) -> NoReturn:
    """A signal ends the run through all that cleans up, also where the shell has Ctrl-C ignored."""
    raise KeyboardInterrupt(f"signal {number}")


def main() -> int:
    """Returns 0 if every target was met, or nothing could be measured here; else 1."""
    parser = argparse.ArgumentParser(description="How well all-reduce fills links of 1 Gbit/s.")
    parser.add_argument("--rate", default="1gbit", help="of each host's way out, as tc takes it (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one round instead of five")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to a file")
    parser.add_argument("--receive", metavar="HOST", help=argparse.SUPPRESS)
    parser.add_argument("--send", metavar="HOST:PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.receive or arguments.send:
        receive(arguments.receive) if arguments.receive else send(arguments.send)
        return 0
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupted)
    try:
        with shaped_hosts(arguments.rate) as hosts:
            progress("one plain TCP stream")
            rate = max(stream_rate(hosts) for _ in range(2))
            seconds = all_reduce_seconds(hosts, 1 if arguments.quick else 5)
            # A disturbed stream would make ours look better than it is: the fastest counts.
            rate = max(rate, *(stream_rate(hosts) for _ in range(2)))
    except NotPermitted as reason:
        print(f"nothing is measured, because network namespaces can't be had here: {reason}")
        return 0
    except (TeamFailed, RuntimeError) as failure:
        print(f"all-reduce failed on a plain stream of {8 * rate / 1e6:.0f} Mbit/s:\n{failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; all namespaces are removed", file=sys.stderr)
        return 130
    figures = report(rate, seconds)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"machine": machine([]), **figures}, indent=2) + "\n")
    return 0 if TARGET_SHARE <= figures["share"] <= 1 and figures["speedup"] >= TARGET_SPEEDUP else 1


if __name__ == "__main__":
    sys.exit(main())
