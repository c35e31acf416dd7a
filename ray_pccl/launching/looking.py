"""``python -m ray_pccl.launching.looking``: run on a cluster's head, tells in lines of JSON who is there, till all are.

Its one reader is `command`, on a machine that is not in the cluster, which sees its output among that of `ray exec`.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec

import ray_pccl
from ray_pccl.launching.expecting import Expected, Node, Seen, missing

MARK = "ray_pccl saw "
"""What a line begins with that is meant for `command`."""
LOOK_S = 1.0
ANSWER_S = 5.0


def line_of(seen: Seen) -> str:
    """What is seen, as a line."""
    return MARK + msgspec.json.encode(seen).decode()


def seen_in(line: str) -> Seen | None:
    """What a line tells, if it is one of ours."""
    _, mark, text = line.partition(MARK)
    if not mark:
        return None
    try:
        return msgspec.json.decode(text.strip(), type=Seen)
    except msgspec.MsgspecError:
        return None  # cut off by something else on the terminal


def look(wanted: Expected) -> Seen:
    """What is there now."""
    addresses = {name: _resolved(name) for name in wanted.workers}
    seen = Seen(addresses=addresses, version=ray_pccl.__version__)
    try:
        with _quiet():
            import ray

            if not ray.is_initialized():
                ray.init(address="auto", logging_level=logging.ERROR, log_to_driver=False)
        known: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        nodes = tuple(_node(node) for node in known if node["Alive"])
    except Exception as error:  # Ray raises many kinds while it starts
        return msgspec.structs.replace(seen, why=f"Ray does not answer: {_first_line(error)}")
    seen = msgspec.structs.replace(seen, nodes=nodes)
    try:
        from ray_pccl.driver.master import find_endpoint

        endpoint = find_endpoint(timeout_s=ANSWER_S)
        socket.create_connection((endpoint.host, endpoint.port), timeout=ANSWER_S).close()
    except (ray_pccl.PCCLError, OSError) as error:
        return msgspec.structs.replace(seen, why=_first_line(error))
    return msgspec.structs.replace(seen, master=f"{endpoint.host}:{endpoint.port}")


def main(arguments: list[str] | None = None) -> int:
    """Looks until all are there, and says so whenever something has changed; 1 if they are not in time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timeout", type=float, required=True, help="in seconds")
    parser.add_argument("--least", type=int, required=True, help="how many workers there are to be")
    parser.add_argument("--worker", action="append", default=[], help="the address of one, where it is known")
    options = parser.parse_args(arguments)
    wanted = Expected("", tuple(options.worker), options.least)
    deadline, before = time.monotonic() + options.timeout, None
    while True:
        seen = look(wanted)
        if seen != before:
            sys.stdout.write(line_of(seen) + "\n")
            sys.stdout.flush()
        if not missing(wanted, seen):
            return 0
        if time.monotonic() >= deadline:
            return 1
        before = seen
        time.sleep(LOOK_S)


def _node(node: dict[str, Any]) -> Node:
    resources = node["Resources"]
    is_head = "node:__internal_head__" in resources
    return Node(node["NodeManagerAddress"], is_head, resources.get("CPU", 0), resources.get("GPU", 0))


def _resolved(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return name


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What Ray's native part writes would run into our lines."""
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


if __name__ == "__main__":
    sys.exit(main())
