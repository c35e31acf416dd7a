"""Facts in, findings out: every check, with facts that are fine and facts that are not."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from rich.console import Console

from ray_pccl.cli.doctor import checks
from ray_pccl.cli.doctor.checks import Finding, Severity, examine, peers_for, worst
from ray_pccl.cli.doctor.command import view
from ray_pccl.cli.doctor.facts import ClusterFacts, MasterFacts, Memory, NodeFacts, Unreached
from ray_pccl.ring import segment

GIB = 1 << 30
VERSIONS: dict[str, str | None] = {
    "python": "3.11.7",
    "ray": "2.60.0",
    "ray-pccl": "0.1.0",
    "numpy": "2.4",
    "torch": None,
}
MASTER = MasterFacts("10.0.0.1:4242", largest_group=8)


def node(name: str = "10.0.0.1", **given: Any) -> NodeFacts:
    told: dict[str, Any] = {
        "versions": VERSIONS,
        "shm": (8 * GIB, 8 * GIB),
        "object_store": 4 * GIB,
        "memory": Memory(32 * GIB, 16 * GIB),
    }
    return NodeFacts(name=name, address=name, **(told | given))


def cluster(*nodes: NodeFacts, **given: Any) -> ClusterFacts:
    told: dict[str, Any] = {"silent": {}, "pairs": 1, "master": MASTER, "namespace": "ray_pccl"}
    return ClusterFacts(nodes=nodes or (node(), node("10.0.0.2")), **(told | given))


def complaints(facts: ClusterFacts, check: str) -> list[Finding]:
    """What a check has to say against a cluster; every complaint has a cure."""
    found = [finding for finding in examine(facts) if finding.severity is not Severity.OK]
    assert {finding.check for finding in found} <= {check}, "another check complained, too"
    assert all(finding.cure and finding.where and finding.what for finding in found)
    return found


def test_a_healthy_cluster_has_one_good_word_from_each_check() -> None:
    findings = examine(cluster())
    assert [finding.check for finding in findings] == list(checks.CHECKS)
    assert worst(findings) is Severity.OK


@pytest.mark.parametrize(
    ("check", "severity", "given", "told", "cure"),
    [
        ("shared memory", "problem", {"memfd_error": "F_SEAL_FUTURE_WRITE: invalid"}, "FUTURE_WRITE", "Linux 5.1"),
        ("shared memory", "problem", {"largest_file": 1 << 20}, "files may have 1 MiB", "ulimit -f"),
        ("shared memory", "warning", {"shm": (64 << 20, 1 << 20)}, "only 64 MiB in /dev/shm", "--shm-size"),
        ("shared memory", "warning", {"shm": None}, "no /dev/shm", "tmpfs"),
        ("memory", "problem", {"memory": Memory(32 * GIB, 10 << 20)}, "10 MiB are left", "more memory"),
        ("memory", "warning", {"memory": Memory(32 * GIB, 200 << 20)}, "200 MiB are left", "more memory"),
        (
            "memory",
            "problem",
            {"memory": Memory(32 * GIB, 9 * GIB, GIB, GIB)},
            "0 B of the container's 1 GiB",
            "memory",
        ),
        ("memory", "note", {"memory": Memory()}, "can't be found out", "/proc"),
        ("open files", "problem", {"files_soft": 256, "files_hard": 256}, "groups of 0 peers", "(soft and hard)"),
        ("open files", "warning", {"files_soft": 400}, "400 open files", "ulimit -n 65536"),
        ("processes", "warning", {"proc_error": "permission denied"}, "noticed later: permission", "hidepid"),
        ("processor", "warning", {"machine": "aarch64"}, "aarch64", "RAY_PCCL_TRANSPORT=tcp"),
        ("clocks", "note", {"clock_ahead_s": -90.0}, "90 s behind", "chrony"),
        ("network", "problem", {"listen_error": "can't assign"}, "can't listen on its own", "--node-ip-address"),
    ],
)
def test_a_node_that_is_not_as_it_should_be_is_found(
    check: str, severity: str, given: dict[str, Any], told: str, cure: str
) -> None:
    [found] = complaints(cluster(node(), node("10.0.0.2", **given)), check)
    assert (found.check, found.severity.value, found.where) == (check, severity, "10.0.0.2")
    assert told in found.what and cure in found.cure


def test_nodes_with_the_same_complaint_share_a_line() -> None:
    nodes = [node(f"10.0.0.{number}", machine="aarch64") for number in range(9)]
    [found] = complaints(cluster(*nodes), "processor")
    assert found.where == "10.0.0.0, 10.0.0.1, 10.0.0.2, 10.0.0.3, 10.0.0.4, 10.0.0.5 and 3 more"


def test_a_large_group_needs_more_files() -> None:
    few = cluster(node(files_soft=1024), master=MasterFacts("m", largest_group=200))
    assert peers_for(1024) < 200
    assert [found.severity for found in complaints(few, "open files")] == [Severity.PROBLEM]
    assert not complaints(cluster(node(files_soft=1024)), "open files")
    assert not complaints(cluster(node(files_soft=-1)), "open files")  # no limit at all


def test_a_small_shm_is_fine_for_a_small_object_store() -> None:
    assert not complaints(cluster(node(shm=(256 << 20, 0), object_store=100 << 20)), "shared memory")


def test_clocks_are_not_blamed_for_a_slow_answer() -> None:
    assert not complaints(cluster(node(clock_ahead_s=3.0, clock_error_s=2.5)), "clocks")


def test_pairs_that_do_not_reach_one_another_are_told_by_source() -> None:
    unreached = [Unreached("a", target, "timed out") for target in ("b", "c")] + [Unreached("b", "a", "refused")]
    first, second = complaints(cluster(unreached=tuple(unreached)), "network")
    assert (first.where, first.what) == ("a", "can't connect to b, c: timed out")
    assert (second.where, second.what) == ("b", "can't connect to a: refused")
    assert first.severity is Severity.PROBLEM and "TCP ports" in first.cure


def test_a_node_that_runs_no_tasks_is_a_problem() -> None:
    [found] = complaints(cluster(node(), silent={"10.0.0.9": "no answer within 30 s"}), "nodes")
    assert (found.severity, found.where) == (Severity.PROBLEM, "10.0.0.9") and "no answer" in found.what


def test_the_master_is_missed_looked_for_and_asked_for_from_every_node() -> None:
    [missing] = complaints(cluster(master=None), "master")
    assert missing.severity is Severity.NOTE and "'ray_pccl'" in missing.what and "start-master" in missing.cure
    [mute] = complaints(cluster(master=MasterFacts("?", error="no answer")), "master")
    assert mute.severity is Severity.PROBLEM and "no answer" in mute.what
    shut = msgspec.structs.replace(MASTER, unreached=(Unreached("10.0.0.2", MASTER.where, "timed out"),))
    [cut] = complaints(cluster(master=shut), "master")
    assert (cut.severity, cut.where) == (Severity.PROBLEM, "10.0.0.2") and MASTER.where in cut.cure


@pytest.mark.parametrize(
    ("name", "version", "severity"),
    [
        ("python", "3.12.1", "problem"),
        ("python", "3.11.9", "warning"),
        ("ray", "2.59.0", "problem"),
        ("ray-pccl", "0.2.0", "problem"),
        ("ray-pccl", None, "problem"),
        ("numpy", "1.26", "warning"),
        ("torch", "2.13", "warning"),
    ],
)
def test_versions_that_differ_are_found(name: str, version: str | None, severity: str) -> None:
    odd = node("10.0.0.3", versions=VERSIONS | {name: version})
    [found] = complaints(cluster(node(), node("10.0.0.2"), odd), "versions")
    assert found.severity.value == severity and name in found.what
    assert "10.0.0.3" in found.what or found.where == "10.0.0.3"


def test_the_segment_is_not_larger_than_the_doctor_thinks() -> None:
    assert segment.SEGMENT_BYTES <= checks.SEGMENT_BYTES < 1.1 * segment.SEGMENT_BYTES


def test_findings_are_legible_at_80_columns_without_colours() -> None:
    unreached = (Unreached("10.0.0.1", "10.0.0.2", "timed out"),)
    findings = examine(cluster(node(), node("10.0.0.2", machine="aarch64"), unreached=unreached, master=None))
    out = io.StringIO()
    Console(file=out, width=80, highlight=False, markup=False).print(view(findings))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80 and "\x1b" not in text
    assert "PROBLEM  network        10.0.0.1: can't connect to 10.0.0.2: timed out" in text
    assert "-> open all TCP ports between the nodes" in text
    assert text.rstrip().endswith("1 problem, 1 warning, 1 note.")
