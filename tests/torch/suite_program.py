"""Runs torch's own tests of a backend on "pccl": a program, since they test the one that the environment names.

``python -m tests.torch.suite_program FOLDER [NAME...]`` prints one line of JSON a test: its name, how it ended on each
rank, and what was said. A name with a dash in front is left out; without others, all tests are run. Ranks are forked
from this process, which has imported torch.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
import traceback
import unittest
from contextlib import redirect_stderr, redirect_stdout
from datetime import timedelta

WORLD_SIZE = 3
TEST_TIMEOUT_S = 60.0
PROBE_TIMEOUT_S = 5.0
RANKS = {"test_new_subgroups_with_group_param": 4}
"""Tests that need more, and do not say so."""
ASKING_FOR_GLOO = "test_accumulate_gradients_no_sync"
"""Tests whose body prepares its module for the backends that torch knows, and none for others."""
os.environ.update(BACKEND="pccl", WORLD_SIZE=str(WORLD_SIZE), TEMP_DIR=sys.argv[1], OMP_NUM_THREADS="1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.testing._internal import common_distributed, common_utils  # noqa: E402

import ray_pccl.torch.process_group  # noqa: E402, F401
from tests.torch.ranks import collect, fork  # noqa: E402

common_distributed.DistTestCases.backend_feature["subgroup"].add("pccl")
from torch.testing._internal.distributed import distributed_test  # noqa: E402

os.environ["BACKEND"] = "mpi"  # only this one is let into tests of subgroups with fewer than eight ranks

SKIPPED = {skip.exit_code: skip.message for skip in common_distributed.TEST_SKIPS.values()}


class PCCLDistributedTest(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    pass


def names() -> list[str]:
    return unittest.defaultTestLoader.getTestCaseNames(PCCLDistributedTest)


def run_rank(rank: int, size: int, name: str, folder: str) -> tuple[str, str]:
    os.environ["WORLD_SIZE"] = str(size)
    distributed_test.INIT_METHOD = f"file://{folder}/{name}.again"
    if name.startswith(ASKING_FOR_GLOO):
        distributed_test.BACKEND = "gloo"
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        try:
            test = PCCLDistributedTest(name)
            test.rank, test.file_name = rank, f"{folder}/{name}"
            dist.init_process_group(
                "pccl",
                init_method=test.init_method,
                world_size=size,
                rank=rank,
                timeout=timedelta(seconds=TEST_TIMEOUT_S / 2),
            )
            test._barrier()
            getattr(test, name)()
            test._barrier()
            dist.destroy_process_group()
        except unittest.SkipTest as skip:
            return "skipped", str(skip)
        except SystemExit as end:
            if end.code in SKIPPED:
                return "skipped", SKIPPED[end.code]
            return "passed" if end.code == 0 else "failed", f"exit code {end.code}\n{said.getvalue()}"
        except BaseException:
            return "failed", f"{traceback.format_exc()}\n{said.getvalue()}"
    return "passed", ""


def probe(name: str) -> tuple[str, str]:
    """Whether the test is left out, found out without a group: that is decided before its first line."""
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        try:
            test = PCCLDistributedTest(name)
            test.rank, test.file_name = 0, "none"
            getattr(test, name)()
        except unittest.SkipTest as skip:
            return "skipped", str(skip)
        except SystemExit as end:
            if end.code in SKIPPED:
                return "skipped", SKIPPED[end.code]
        except BaseException:
            return "runs", ""
    return "runs", ""


def run(name: str, folder: str) -> dict[str, object]:
    distributed_test.initialize_temp_directories()
    distributed_test.Barrier.init()
    began = time.monotonic()
    (probed,) = collect([fork(lambda answer: answer(probe(name)))], PROBE_TIMEOUT_S)
    if isinstance(probed, tuple) and probed[0] == "skipped":
        return {"test": name, "outcomes": [probed], "seconds": time.monotonic() - began}
    size = RANKS.get(name, WORLD_SIZE)
    ranks = [fork(lambda answer, rank=rank: answer(run_rank(rank, size, name, folder))) for rank in range(size)]
    ends = collect(ranks, TEST_TIMEOUT_S)
    distributed_test.cleanup_temp_dir()
    outcomes = [end if isinstance(end, tuple) else ("failed", repr(end)) for end in ends]
    return {"test": name, "outcomes": outcomes, "seconds": time.monotonic() - began}


def main() -> int:
    torch.set_num_threads(1)
    common_utils.set_rng_seed(1234)
    folder, *chosen = sys.argv[1:]
    left_out = {name[1:] for name in chosen if name.startswith("-")}
    for name in [name for name in chosen if not name.startswith("-")] or names():
        if name not in left_out:
            print(json.dumps(run(name, folder)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
