"""Nothing is left behind: no process of ours, no shared memory, compared with what was there before the tests."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

OURS = ("ray_pccl", "master_actor", "raylet", "gcs_server")
PATIENCE_S = 20.0
MEMORY = Path(tempfile.gettempdir()) / f"ray_pccl-leftovers-{os.getuid()}.json"


def processes() -> dict[str, str]:
    """Command lines of what runs and belongs to us or to a Ray of ours, by process id and start time."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in (os.getpid(), os.getppid()):
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            started = (entry / "stat").read_text().rpartition(")")[2].split()[19]
        except OSError:
            continue
        if any(word in command for word in OURS):
            found[f"{entry.name}@{started}"] = command[:160]
    return found


def shared_memory() -> list[str]:
    return sorted(entry.name for entry in Path("/dev/shm").iterdir())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--remember", action="store_true", help="note what is there before the tests")
    if parser.parse_args().remember:
        MEMORY.write_text(json.dumps({"processes": processes(), "shared_memory": shared_memory()}))
        return 0
    before = json.loads(MEMORY.read_text())
    deadline = time.monotonic() + PATIENCE_S
    while True:
        left = [f"process {key}: {line}" for key, line in processes().items() if key not in before["processes"]]
        left += [f"/dev/shm/{name}" for name in shared_memory() if name not in before["shared_memory"]]
        if not left or time.monotonic() >= deadline:
            break
        time.sleep(0.2)
    MEMORY.unlink()
    print("\n".join(["left behind by the tests:", *left]) if left else "nothing was left behind")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
