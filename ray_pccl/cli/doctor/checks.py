"""Facts in, findings out. Each finding says where, what, and how it is cured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from enum import Enum

import msgspec

from ray_pccl.cli import units
from ray_pccl.cli.doctor.facts import ClusterFacts, NodeFacts, Unreached

SEGMENT_BYTES = 77 << 20
"""What a peer shows to the others of its host, at most; a test holds it to the data plane's own figure."""
TIGHT_BYTES = 512 << 20
SMALL_SHM_BYTES = 1 << 30
FILES_BASE = 256
FILES_PER_PEER = 4
"""Descriptors that a process with Ray in it needs, and those that each other peer of its group adds."""
FEW_PEERS = 64
CLOCK_S = 1.0
LISTED = 6


class Severity(Enum):
    """How bad it is. Only a problem makes the doctor's exit code 1."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(msgspec.Struct, frozen=True):
    """One line of the examination."""

    severity: Severity
    check: str
    where: str
    what: str
    cure: str = ""


def examine(facts: ClusterFacts) -> list[Finding]:
    """Every finding, in the order of the checks; a check without complaint is one finding that says so."""
    findings = []
    for name, check in CHECKS.items():
        for severity, where, what, cure in check(facts):
            findings.append(Finding(severity, name, where, what, cure))
    return findings


def worst(findings: list[Finding]) -> Severity:
    """The worst severity of all."""
    order = list(Severity)
    return max((finding.severity for finding in findings), key=order.index, default=Severity.OK)


Complaint = tuple[Severity, str, str, str]
ALL = "all nodes"


def _fine(what: str, where: str = ALL) -> Complaint:
    return Severity.OK, where, what, ""


def _grouped(found: dict[tuple[Severity, str, str], list[str]], fine: str) -> Iterator[Complaint]:
    """One complaint for all nodes that have the same one."""
    for (severity, what, cure), names in found.items():
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        yield severity, ", ".join(names[:LISTED]) + more, what, cure
    if not found:
        yield _fine(fine)


def _each(
    facts: ClusterFacts, look: Callable[[NodeFacts], tuple[Severity, str, str] | None], fine: str
) -> Iterator[Complaint]:
    found: dict[tuple[Severity, str, str], list[str]] = defaultdict(list)
    for node in facts.nodes:
        complaint = look(node)
        if complaint is not None:
            found[complaint].append(node.name)
    yield from _grouped(found, fine)


# ------------------------------------------------------------------------------------------------------------- checks


def _nodes(facts: ClusterFacts) -> Iterator[Complaint]:
    cure = "see `ray status` and the raylet's log on that node; if it is gone, take it out of the cluster"
    for name, error in facts.silent.items():
        yield Severity.PROBLEM, name, f"does not run tasks: {error}", cure
    if not facts.silent:
        yield _fine(f"{units.several(len(facts.nodes), 'node')} answer" + ("s" if len(facts.nodes) == 1 else ""))


def _reach(facts: ClusterFacts) -> Iterator[Complaint]:
    cure = "open all TCP ports between the nodes: peers and the master listen on ports that the kernel chooses"
    deaf = {node.name for node in facts.nodes if node.listen_error}
    for node in facts.nodes:
        if node.listen_error:
            what = f"can't listen on its own address {node.address}: {node.listen_error}"
            yield Severity.PROBLEM, node.name, what, "start Ray there with --node-ip-address of an interface it has"
    yield from _pairs([pair for pair in facts.unreached if pair.target not in deaf], "can't connect to", cure)
    if not facts.unreached and not deaf:
        what = f"all reach one another over TCP ({units.several(facts.pairs, 'pair')}, both ways)"
        yield _fine(what) if facts.pairs else _fine("a single node: there is nobody to reach")


def _pairs(pairs: list[Unreached], verb: str, cure: str) -> Iterator[Complaint]:
    """A complaint for each source, whatever the number of its targets."""
    by_source: dict[tuple[str, str], list[str]] = defaultdict(list)
    for pair in pairs:
        by_source[pair.source, pair.error].append(pair.target)
    for (source, error), targets in by_source.items():
        more = f" and {len(targets) - LISTED} more" if len(targets) > LISTED else ""
        yield Severity.PROBLEM, source, f"{verb} {', '.join(targets[:LISTED])}{more}: {error}", cure


def _master(facts: ClusterFacts) -> Iterator[Complaint]:
    master = facts.master
    if master is None:
        what = f"there is none in the namespace {facts.namespace!r}"
        yield Severity.NOTE, "master", what, "`ray-pccl start-master` starts one; create_group() does by itself"
        return
    if master.error:
        yield (
            Severity.PROBLEM,
            "master",
            f"does not answer: {master.error}",
            "`ray-pccl stop --yes`, then start it anew",
        )
        return
    cure = f"open TCP from there to {master.where}, or start the master on a node that all can reach"
    yield from _pairs(list(master.unreached), "can't connect to", cure)
    if not master.unreached:
        yield _fine(f"answers at {master.where}, from every node", "master")


def _versions(facts: ClusterFacts) -> Iterator[Complaint]:
    agreed = True
    names = dict.fromkeys(name for node in facts.nodes for name in node.versions)
    for name in names:
        by_version: dict[str | None, list[str]] = defaultdict(list)
        for node in facts.nodes:
            by_version[node.versions.get(name)].append(node.name)
        if name == "ray-pccl" and None in by_version:
            agreed = False
            cure = "pip install ray-pccl there, in the environment of Ray's workers"
            yield Severity.PROBLEM, ", ".join(by_version[None][:LISTED]), "ray-pccl is not installed", cure
            del by_version[None]
        if len(by_version) > 1:
            agreed = False
            # Other patches of Python understand one another; so do those who lack what is optional.
            light = name in ("torch", "msgspec", "numpy") or _same_minor(name, list(by_version))
            counts = sorted(by_version.items(), key=lambda item: -len(item[1]))
            what = "; ".join(f"{version or 'none'} on {', '.join(nodes[:LISTED])}" for version, nodes in counts)
            severity = Severity.WARNING if light else Severity.PROBLEM
            yield (
                severity,
                f"{len(facts.nodes)} nodes",
                f"{name} differs: {what}",
                f"install the same {name} everywhere",
            )
    if agreed and facts.nodes:
        told = [f"{name} {version}" for name, version in facts.nodes[0].versions.items() if version is not None]
        yield _fine(", ".join(told))


def _same_minor(name: str, versions: list[str | None]) -> bool:
    return name == "python" and len({str(version).rsplit(".", 1)[0] for version in versions}) == 1


def _shared_memory(facts: ClusterFacts) -> Iterator[Complaint]:
    def look(node: NodeFacts) -> tuple[Severity, str, str] | None:
        if node.memfd_error:
            cure = "use Linux 5.1 or newer, and a seccomp profile that allows memfd_create; or RAY_PCCL_TRANSPORT=tcp"
            return Severity.PROBLEM, f"memory can't be shared: {node.memfd_error}", cure
        if node.largest_file is not None and node.largest_file < SEGMENT_BYTES:
            what = (
                f"files may have {units.memory(node.largest_file)}, a peer's memory needs {units.memory(SEGMENT_BYTES)}"
            )
            return Severity.PROBLEM, what, "raise it before Ray starts: ulimit -f unlimited"
        if node.shm is None:
            return Severity.WARNING, "there is no /dev/shm: Ray keeps its objects on disk", "mount a tmpfs there"
        wanted = node.object_store if node.object_store is not None else SMALL_SHM_BYTES
        if node.shm[0] < min(wanted, SMALL_SHM_BYTES):
            what = f"only {units.memory(node.shm[0])} in /dev/shm: Ray keeps its objects on disk"
            return Severity.WARNING, what, "docker run --shm-size=8g, or a medium: Memory volume in Kubernetes"
        return None

    smallest = min((node.shm[0] for node in facts.nodes if node.shm is not None), default=0)
    yield from _each(facts, look, f"memfd and its seals work; /dev/shm has {units.memory(smallest)} or more")


def _memory(facts: ClusterFacts) -> Iterator[Complaint]:
    def look(node: NodeFacts) -> tuple[Severity, str, str] | None:
        free = free_memory(node)
        if free is None:
            return Severity.NOTE, "how much memory is left can't be found out", "mount /proc and /sys/fs/cgroup"
        inside = f" of the container's {units.memory(node.memory.limit)}" if node.memory.limit is not None else ""
        what = f"{units.memory(free)}{inside} are left; each peer shares up to {units.memory(SEGMENT_BYTES)}"
        cure = "give it more memory, or run fewer actors there"
        if free < SEGMENT_BYTES:
            return Severity.PROBLEM, what, cure
        return (Severity.WARNING, what, cure) if free < TIGHT_BYTES else None

    known = [free for free in map(free_memory, facts.nodes) if free is not None]
    yield from _each(facts, look, f"{units.memory(min(known, default=0))} or more are left")


def free_memory(node: NodeFacts) -> int | None:
    """What is left to the processes of a node: of the machine's, or the container's if that is less."""
    left = [] if node.memory.available is None else [node.memory.available]
    if node.memory.limit is not None:
        left.append(max(0, node.memory.limit - (node.memory.used or 0)))
    return min(left, default=None)


def _files(facts: ClusterFacts) -> Iterator[Complaint]:
    largest = facts.master.largest_group if facts.master is not None else 0

    def look(node: NodeFacts) -> tuple[Severity, str, str] | None:
        peers = peers_for(node.files_soft)
        what = f"{units.count(node.files_soft)} open files are allowed: enough for groups of {units.count(peers)} peers"
        raised = "to 65536" if node.files_hard >= 65536 or node.files_hard < 0 else "(soft and hard)"
        cure = f"raise the limit {raised} before Ray starts: ulimit -n 65536, or LimitNOFILE= of its service"
        if peers < max(2, largest):
            return Severity.PROBLEM, what, cure
        return (Severity.WARNING, what, cure) if peers < FEW_PEERS else None

    fewest = min((peers_for(node.files_soft) for node in facts.nodes), default=0)
    yield from _each(facts, look, f"enough open files for groups of {units.count(fewest)} peers or more")


def peers_for(files: int) -> int:
    """How large a group may be, with this many descriptors for each process; a negative limit is none."""
    return 1 << 20 if files < 0 else max(0, (files - FILES_BASE) // FILES_PER_PEER)


def _processes(facts: ClusterFacts) -> Iterator[Complaint]:
    def look(node: NodeFacts) -> tuple[Severity, str, str] | None:
        if not node.proc_error:
            return None
        what = f"the sentinel can't see processes die, so deaths are noticed later: {node.proc_error}"
        return Severity.WARNING, what, "mount /proc there, without hidepid"

    yield from _each(facts, look, "the sentinel can see processes die")


def _machine(facts: ClusterFacts) -> Iterator[Complaint]:
    def look(node: NodeFacts) -> tuple[Severity, str, str] | None:
        if node.machine in ("x86_64", "AMD64"):
            return None
        what = f"{node.machine}: ray_pccl's shared memory counts on the strong order of stores of x86_64"
        return Severity.WARNING, what, "set RAY_PCCL_TRANSPORT=tcp for the peers there"

    yield from _each(facts, look, "x86_64")


def _clocks(facts: ClusterFacts) -> Iterator[Complaint]:
    def look(node: NodeFacts) -> tuple[Severity, str, str] | None:
        if abs(node.clock_ahead_s) - node.clock_error_s <= CLOCK_S:
            return None
        way = "ahead" if node.clock_ahead_s > 0 else "behind"
        what = f"its clock is {units.duration(abs(node.clock_ahead_s))} {way}; only times in logs are wrong by that"
        return Severity.NOTE, what, "run an NTP client such as chrony there"

    yield from _each(facts, look, f"within {units.duration(CLOCK_S)} of this node's")


CHECKS: dict[str, Callable[[ClusterFacts], Iterator[Complaint]]] = {
    "nodes": _nodes,
    "network": _reach,
    "master": _master,
    "versions": _versions,
    "shared memory": _shared_memory,
    "memory": _memory,
    "open files": _files,
    "processes": _processes,
    "processor": _machine,
    "clocks": _clocks,
}
