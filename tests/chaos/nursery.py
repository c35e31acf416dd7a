"""A process that has imported everything, and forks a peer for each line it reads: a peer starts in milliseconds.

It has no threads, and makes no communicator: so forking it is safe. Peers die with it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Reads a peer's `Config` as a line of JSON, writes its pid, until the end of the input."""
    import ray_pccl.peer.operations
    import ray_pccl.ring.plane
    from tests.chaos import peer, workload

    workload.preload()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    libc = ctypes.CDLL(None)
    for line in sys.stdin:
        config = peer.Config(**json.loads(line))
        if config.transport == "gloo":
            import ray_pccl.torch.delegated  # noqa: F401
        pid = os.fork()
        if pid == 0:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            code = 1
            try:
                code = peer.main(config)
            finally:
                os._exit(code)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
