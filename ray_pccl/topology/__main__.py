"""Orders one ring: ``python -m ray_pccl.topology [PARENT]`` reads a request from standard input and writes the answer.

It does not outlive its parent: nobody else wants the answer. The parent's process id can be given, for the case that
it dies before anybody here has looked.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from ray_pccl.topology.requests import answered

_LOOK_S = 0.2


def main() -> None:
    """Reads until the end of the input, answers, ends."""
    parent = int(sys.argv[1]) if sys.argv[1:] else os.getppid()
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    sys.stdout.buffer.write(answered(sys.stdin.buffer.read()))


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)


if __name__ == "__main__":
    main()
