"""``python -m master_actor``: a master as a program of its own, until SIGINT or SIGTERM."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time

from master_actor.thread import MasterThread, serve
from ray_pccl.control.endpoint import DEFAULT_PORT
from ray_pccl.errors import PCCLError, SettingsError

KEY_VARIABLE = "RAY_PCCL_KEY"
LOOK_S = 0.25
FIRST_PEER_S = 60.0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m master_actor",
        description="Serve as the master of ray_pccl groups until SIGINT or SIGTERM. Prints the endpoint for peers.",
        epilog=f"The key is taken from the environment variable {KEY_VARIABLE} (hexadecimal), else from the journal, "
        "else a random one is made. Settings are taken from RAY_PCCL_* variables.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="the address to bind (default: %(default)s)")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="the port, 0 for any (default: %(default)s)")
    parser.add_argument("--journal", help="a file that lets the next run go on with the same groups and key")
    parser.add_argument(
        "--dashboard-host",
        default="127.0.0.1",
        help="the address to bind the live page to, empty for no page (default: %(default)s)",
    )
    parser.add_argument("--dashboard-port", type=int, help="the page's port (default: the last run's, 48149, or any)")
    parser.add_argument(
        "--linger",
        type=float,
        metavar="SECONDS",
        help="end by itself when no peer has been there for so long, or none has come within a minute",
    )
    return parser.parse_args()


def _key() -> bytes | None:
    try:
        return bytes.fromhex(os.environ.get(KEY_VARIABLE, "")) or None
    except ValueError:
        raise SettingsError(f"{KEY_VARIABLE} must be hexadecimal") from None


class _Company:
    """Whether a master that lingers only for so long after its last peer has been alone for that time."""

    def __init__(self, master: MasterThread, linger_s: float) -> None:
        self._master = master
        self._linger_s = linger_s
        self._alone_from = time.monotonic()
        self._patience_s = max(FIRST_PEER_S, linger_s)

    def gone(self) -> bool:
        """Asked again and again: whether it is time to end."""
        try:
            here, had_some = self._master.company()
        except TimeoutError:  # it is busy, and so not alone
            return False
        came_and_went = had_some and self._patience_s != self._linger_s  # between two looks
        if here or came_and_went:
            self._alone_from, self._patience_s = time.monotonic(), self._linger_s
        return time.monotonic() - self._alone_from >= self._patience_s


def main() -> int:
    """Runs the master; returns the exit code."""
    arguments = _arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    try:
        master = serve(
            arguments.host,
            arguments.port,
            journal=arguments.journal,
            key=_key(),
            dashboard_host=arguments.dashboard_host,
            dashboard_port=arguments.dashboard_port,
        )
        with master as endpoint:
            print(endpoint, flush=True)
            if master.page_url:
                print(f"live page: {master.page_url}", file=sys.stderr, flush=True)
            company = None if arguments.linger is None else _Company(master, arguments.linger)
            while not ended.wait(LOOK_S):
                if company is not None and company.gone():
                    break
                if master.superseded.is_set():
                    print("another master has taken over the journal; this one ends", file=sys.stderr)
                    return 3
    except (PCCLError, OSError) as error:
        print(f"master_actor: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
