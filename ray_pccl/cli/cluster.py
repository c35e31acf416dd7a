"""Finding Ray, quietly and without long waits.

`ray.init` on an address where nobody is waits for a minute and writes warnings of its own. So the port is tried first,
what Ray's native part writes meanwhile is dropped, and if it still does not come back the program ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from ray_pccl.cli.errors import NoClusterError
from ray_pccl.cli.exit_codes import ExitCode
from ray_pccl.cli.options import Shared

PORT_TIMEOUT_S = 3.0
CONNECT_TIMEOUT_S = 20.0
"""How long `ray.init` may take once the port has answered."""
CURE = "give the cluster's address with --address HOST:PORT, or run this on one of its nodes"
TOKEN_CURE = "set RAY_AUTH_MODE=token, with the token in ~/.ray/auth_token or where RAY_AUTH_TOKEN_PATH says"  # noqa: S105
_REFUSED = b"InvalidAuthToken"
_LOOK_S = 0.25
_ADDRESS = re.compile(r"(?:ray://)?(?:\[(?P<six>[0-9a-fA-F:.]+)\]|(?P<host>[^:/\[\]]+)):(?P<port>[0-9]{1,5})")


@contextlib.contextmanager
def connected(shared: Shared) -> Iterator[Any]:
    """A connection to the cluster that was asked for, closed afterwards; gives the module `ray`.

    Raises:
        NoClusterError: None can be reached.
    """
    address = shared.address or os.environ.get("RAY_ADDRESS") or "auto"
    if address != "auto":
        check_port(address)
    import ray

    with _dropped() as dropped, _watched(address, dropped), _dropped_stderr(keep=shared.debug, into=dropped):
        _connect(ray, address)
    told_to_end = threading.Event()

    def end(_number: int, _frame: object) -> None:
        told_to_end.set()
        raise KeyboardInterrupt  # the only exception that Ray lets through unchanged

    # In the place of Ray's own, which writes a page about it: what was begun is undone, as after Ctrl-C.
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield ray
    except KeyboardInterrupt:
        if told_to_end.is_set():
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
    finally:
        with _dropped_stderr(keep=shared.debug):
            ray.shutdown()
        signal.signal(signal.SIGTERM, before)


def check_port(address: str) -> None:
    """Whether somebody listens at an address of Ray's.

    Raises:
        NoClusterError: Nobody does, or it is no address.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise NoClusterError(f"{address!r} is no address of a Ray cluster: {CURE}")
    host = found["six"] or found["host"]
    try:
        socket.create_connection((host, int(found["port"])), timeout=PORT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise NoClusterError(f"no Ray cluster answers at {address} ({reason.lower()}): {CURE}") from error


def _connect(ray: ModuleType, address: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, namespace=None)
    except Exception as error:  # Ray raises many kinds, for versions, tokens, nodes that it does not know
        if address == "auto" and isinstance(error, ConnectionError):
            raise NoClusterError(f"no Ray cluster runs on this machine: {CURE}") from error
        raise NoClusterError(f"the Ray cluster at {address} can't be joined: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """What an error says, without the explanations that Ray appends."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@contextlib.contextmanager
def _dropped() -> Iterator[int]:
    """A file without a name, for what only we are to see."""
    fd = os.memfd_create("ray_pccl-stderr")
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _watched(address: str, dropped: int) -> Iterator[None]:
    """Ends the program if what is inside takes too long: it may be in native code, which no exception reaches.

    Ray, too, tries for long where it was refused; it says so in what is dropped.
    """
    stderr = os.dup(2)
    done = threading.Event()

    def watch() -> None:
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        text = f"what listens at {address} did not answer as Ray within {CONNECT_TIMEOUT_S:g} s: {CURE}"
        while not done.wait(min(_LOOK_S, max(0.0, deadline - time.monotonic()))):
            refused = _REFUSED in os.pread(dropped, 1 << 16, 0)
            if refused:
                text = f"the Ray cluster at {address} wants its token: {TOKEN_CURE}"
            if refused or time.monotonic() >= deadline:
                os.write(stderr, f"ray-pccl: error: {text}\n".encode())
                os._exit(ExitCode.NO_CLUSTER)

    watcher = threading.Thread(target=watch, name="ray_pccl-connecting", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        os.close(stderr)


@contextlib.contextmanager
def _dropped_stderr(*, keep: bool, into: int | None = None) -> Iterator[None]:
    """Nothing that is written to the standard error inside, by whatever code, is seen: it goes nowhere, or there."""
    if keep:
        yield
        return
    sys.stderr.flush()
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere if into is None else into, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)
