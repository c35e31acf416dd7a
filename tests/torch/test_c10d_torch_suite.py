"""Torch's own tests of a backend, all that need no GPU, on ours. Those gated to Gloo are run, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ray_pccl.testing.master import MasterProcess

ROOT = Path(__file__).parents[2]
SUITE_TIMEOUT_S = 600

NEEDS_CUDA = "moves tensors to a GPU, and does not ask whether there is one"
ONLY_GLOO = "monitored_barrier, which torch refuses on any backend but Gloo"
LEFT_OUT = {
    "test_all_to_all_cuda": NEEDS_CUDA,
    "test_all_to_all_cuda_complex": NEEDS_CUDA,
    "test_all_to_all_full_group_cuda": NEEDS_CUDA,
    "test_all_to_all_group_cuda": NEEDS_CUDA,
    "test_batch_isend_irecv_op_err": NEEDS_CUDA,
    "test_batch_isend_irecv_mixed_backend_err": "makes a group of NCCL, which a build for CPUs does not have",
    "test_monitored_barrier_failure_order": ONLY_GLOO,
    "test_monitored_barrier_gloo": ONLY_GLOO,
    "test_monitored_barrier_gloo_rank_0_timeout": ONLY_GLOO,
    "test_monitored_barrier_gloo_subgroup": ONLY_GLOO,
    "test_monitored_barrier_wait_all_ranks": ONLY_GLOO,
    "test_SyncBatchNorm_process_group": "needs torchvision",
}
"""What can't pass, and why. All else does, or says itself why not."""
SAID_THEMSELVES = ("CUDA is not available.", "Need at least ", "https://github.com/pytorch/", "Test is failing, see ")
"""How reasons begin that tests give for not running: no GPU; switched off by torch, on Linux or everywhere."""
PASSING = 120
"""At least so many tests run to their end: a suite that skips everything is no proof."""


@pytest.mark.slow
@pytest.mark.timeout(SUITE_TIMEOUT_S + 30)
def test_torchs_own_suite_passes(master_process: MasterProcess, tmp_path: Path) -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        "RAY_PCCL_MASTER": str(master_process.endpoint),
        "RAY_PCCL_SENTINEL": "0",  # one would be started for every test
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.torch.suite_program", str(tmp_path), *(f"-{name}" for name in LEFT_OUT)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        cwd=ROOT,
        timeout=SUITE_TIMEOUT_S,
        text=True,
        check=True,
    )
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    passed = [each["test"] for each in results if all(outcome == "passed" for outcome, _ in each["outcomes"])]
    failed, unexplained, skipped = [], [], []
    for each in results:
        for rank, (outcome, text) in enumerate(each["outcomes"]):
            if outcome == "failed":
                failed.append(f"{each['test']}, rank {rank}: {text}")
            elif outcome == "skipped":
                skipped.append(each["test"])
                if not text.startswith(SAID_THEMSELVES):
                    unexplained.append(f"{each['test']}: {text}")
    print(f"{len(passed)} of {len(results)} tests passed, {len(set(skipped))} skipped themselves")
    assert not failed, "\n\n".join(failed)
    assert not unexplained, "\n".join(unexplained)
    assert len(passed) >= PASSING, f"only {len(passed)} tests were run: {passed}"
