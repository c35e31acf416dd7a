"""The notebooks, run as `make notebooks` runs them, in their short form: their key numbers, and nothing left behind."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from ray_pccl.testing import eventually
from tests.notebooks.saved import FOLDER, Saved

for package in ("nbclient", "ipykernel", "matplotlib"):
    pytest.importorskip(package, reason=f"{package} is not installed: pip install 'ray-pccl[notebooks]'")

MARK = "RAY_PCCL_TESTED_NOTEBOOK"
RECOVERED = re.compile(r"recovered .*after (\d+\.\d) ms")


def execute(name: str, into: Path) -> subprocess.CompletedProcess[str]:
    """Runs one, and sees that all processes that it started are gone: they have inherited a mark of this test's."""
    mark = secrets.token_hex(8)
    command = [sys.executable, str(FOLDER / "execute.py"), name, "--short", "--into", str(into)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=170, check=False, env={**os.environ, MARK: mark}
    )
    eventually(lambda: not marked(mark), 20, lambda: f"nothing is left running, but {marked(mark)}")
    return done


def marked(mark: str) -> list[str]:
    """The command lines of processes with this mark."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120])
        except OSError:
            continue
    return found


def executed(name: str, into: Path) -> Saved:
    done = execute(f"{name}.ipynb", into)
    assert done.returncode == 0, done.stdout + done.stderr
    notebook = Saved(into / f"{name}.ipynb")
    errors = [output.text for cell in notebook.code for output in cell.outputs if output.get("name") == "stderr"]
    assert not errors
    return notebook


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(200)
def test_the_tour_averages_over_survivors_and_heals_a_newcomer(tmp_path: Path) -> None:
    tour = executed("tour", tmp_path)
    assert tour.returned("average") == dict.fromkeys("abcd", 3.0)
    after = tour.returned("average-after-death")
    assert after.pop("d") in ("PeerLostError", "ActorDiedError")
    assert after == dict.fromkeys("abc", 2.0)
    held = tour.returned("healed")
    assert set(held) == set("ABC") and len(set(held.values())) == 1
    assert held["C"][:2] == (10, 0)  # ten syncs of the group, and nothing received in the last one
    assert "group train: epoch 2, 3 members, 1 lost" in tour.said("report")
    assert re.search(r"train: recovered after \d+\.\d ms", tour.said("report"))
    slowest = [int(rate) for rate in re.findall(r"(\d+) MB/s", tour.said("order"))]
    assert len(slowest) == 2 and slowest[0] < slowest[1]
    assert tour.drew("order") and tour.drew("timeline")


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(200)
def test_the_lab_shows_every_fault_with_its_milliseconds_and_no_wrong_sum(tmp_path: Path) -> None:
    lab = executed("fault_lab", tmp_path)
    assert "SIGKILL C" in lab.said("kill") and "lost       C" in lab.said("kill")
    (took,) = RECOVERED.findall(lab.said("kill"))
    assert 0 < float(took) < 5000
    assert "in it are A B D" in lab.said("kill-cost")
    assert "joined     E" in lab.said("join")
    assert "was stopped (SIGSTOP)" in lab.said("freeze") and "joined     B" in lab.said("freeze")
    assert re.search(r"booted .*boot 2\n.*returned .*\(epoch 5, 4 members\) after \d+", lab.said("master"))
    meanwhile = re.search(r"meanwhile (\d+) sums", lab.said("master-cost"))
    assert meanwhile and int(meanwhile[1]) > 0
    assert sum(map(int, re.findall(r"(\d) lost$", lab.said("own"), re.M))) == 2  # in one epoch, or in two
    assert ", 0 of them wrong" in lab.said("verdict") and re.search(r"[34] recoveries: ", lab.said("verdict"))
    assert all(lab.drew(tag) for tag in ("quiet", "kill-picture", "freeze-picture", "master-picture", "whole"))


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_benchmarks_are_tabled_and_drawn(tmp_path: Path) -> None:
    report = executed("benchmark", tmp_path)
    assert re.match(r"\d+ cores, \d+ GiB of memory", report.said("machine"))
    rows = [line.split() for line in report.said("table").splitlines()[1:]]
    assert [row[:2] for row in rows] == [["4KiB", "2"], ["4MiB", "2"]]
    assert all(float(row[2]) > 0 and float(row[3]) > 0 for row in rows)
    faults = re.findall(r"^(SIG\w+.*?) +(\d+) +(\d+\.\d) +(\d+\.\d)$", report.said("recovery"), re.M)
    assert [fault[0] for fault in faults] == [
        "SIGKILL",
        "SIGKILL in a 4 MiB all-reduce",
        "SIGKILL in 16 x 4 MiB in flight",
        "SIGSTOP",
    ]
    assert all(0 < float(median) <= float(slowest) for _, _, median, slowest in faults)
    assert float(faults[-1][2]) > 1000  # a freeze shorter than that is nobody's death
    assert all(report.drew(tag) for tag in ("times", "ratios", "recovery-picture"))


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_cell_that_fails_is_told_and_nothing_is_saved(tmp_path: Path) -> None:
    import nbformat

    broken, into = tmp_path / "broken.ipynb", tmp_path / "into"
    into.mkdir()
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")]), broken)
    before = broken.read_bytes()
    done = execute(str(broken), into)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert broken.read_bytes() == before and not list(into.iterdir())
