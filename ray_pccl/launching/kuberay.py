"""What is wrong with a file for the KubeRay operator: its structure, and whether package and master are thought of.

The operator checks the rest itself when the file is applied, with `kubectl`, which `ray up` has no part in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ray_pccl.launching.document import Document, Path, Problem

KINDS = ("RayCluster", "RayJob", "RayService")
OVERWRITE = "ray.io/overwrite-container-cmd"
GENERATED = "KUBERAY_GEN_RAY_START_CMD"


def is_kuberay(document: Document) -> bool:
    """Whether the file is for Kubernetes, rightly or not."""
    return document.get("apiVersion") is not None or document.get("kind") in KINDS


def problems(document: Document) -> Iterator[Problem]:
    """What is wrong with the file."""
    version, kind = document.get("apiVersion"), document.get("kind")
    if not str(version).startswith("ray.io/"):
        yield document.problem(("apiVersion",), f"is {version!r}", "write ray.io/v1")
    if kind != "RayCluster":
        yield document.problem(("kind",), f"is {kind!r}", "write RayCluster: only that can be checked here")
        return
    if not document.get("metadata", "name"):
        yield document.problem(("metadata", "name"), "is missing", "give the cluster a name")
    head: Path = ("spec", "headGroupSpec")
    if not isinstance(document.get(*head), Mapping):
        yield document.problem(head, "is missing", "describe the head's pod")
    else:
        yield from _pod(document, head)
        if "start-master" not in _commands(document, head):
            cure = "have the head's container run `ray-pccl start-master` once Ray is up, as in the example"
            yield document.problem(head, "does not start the master", cure)
    groups = document.get("spec", "workerGroupSpecs")
    if not isinstance(groups, list) or not groups:
        yield document.problem(("spec", "workerGroupSpecs"), "is missing", "describe at least one group of workers")
        return
    names = [document.get("spec", "workerGroupSpecs", place, "groupName") for place in range(len(groups))]
    for place, name in enumerate(names):
        path: Path = ("spec", "workerGroupSpecs", place)
        if not name:
            yield document.problem((*path, "groupName"), "is missing", "give the group a name")
        elif name in names[:place]:
            yield document.problem((*path, "groupName"), f"is {name!r} again", "give each group a name of its own")
        yield from _replicas(document, path)
        yield from _pod(document, path)
    if document.get("spec", "authOptions", "mode") != "token" and "RAY_AUTH_MODE" not in str(document.get("spec")):
        what = "let in everybody who reaches the cluster's ports"
        yield document.problem(("spec", "authOptions"), what, "set mode: token (KubeRay 1.6 or later)", fatal=False)


def _replicas(document: Document, path: Path) -> Iterator[Problem]:
    least, wanted, most = (document.get(*path, field) for field in ("minReplicas", "replicas", "maxReplicas"))
    numbers = [number for number in (least, wanted, most) if isinstance(number, int)]
    if numbers != sorted(numbers):
        what = f"is {wanted}, not between minReplicas and maxReplicas"
        yield document.problem((*path, "replicas"), what, "put the three numbers in order")
    if wanted is None and least is None:
        yield document.problem((*path, "replicas"), "is missing", "say how many workers there are to be")


def _pod(document: Document, path: Path) -> Iterator[Problem]:
    here: Path = (*path, "template", "spec", "containers")
    containers = document.get(*here)
    if not isinstance(containers, list) or not containers:
        yield document.problem(here, "is missing", "describe the container that Ray runs in")
        return
    for field in ("name", "image"):
        if not document.get(*here, 0, field):
            yield document.problem((*here, 0, field), "is missing", "add it")
    commands = _commands(document, path)
    if "ray-pccl" not in commands and "pccl" not in str(document.get(*here, 0, "image")):
        cure = "run `pip install ray-pccl` before Ray is started, unless it is in the image"
        yield document.problem((*here, 0), "does not install ray-pccl", cure, fatal=False)
    own = document.get(*here, 0, "command") or document.get(*here, 0, "args")
    if own and document.get("metadata", "annotations", OVERWRITE) in ("true", True) and GENERATED not in commands:
        yield document.problem((*here, 0), "never starts Ray", f"end its command with ${GENERATED}")


def _commands(document: Document, path: Path) -> str:
    """All that the first container of a pod, and its hooks, run."""
    container = document.get(*path, "template", "spec", "containers", 0)
    if not isinstance(container, Mapping):
        return ""
    parts = [container.get("command"), container.get("args"), container.get("lifecycle")]
    return "\n".join(_texts([*parts, document.get(*path, "template", "spec", "initContainers")]))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, Mapping):
        yield from _texts(list(value.values()))
