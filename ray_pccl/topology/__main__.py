"""Orders one ring: ``python -m ray_pccl.topology`` reads a request from standard input and writes the answer.

It does not outlive its parent: nobody else wants the answer.
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
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    sys.stdout.buffer.write(answered(sys.stdin.buffer.read()))


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)


if __name__ == "__main__":
    main()
