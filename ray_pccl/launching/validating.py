"""What is wrong with a cluster's file, before anything is started: against Ray's own schema, and against what we need.

Pure: the text, the schema and the answer to "is there such a file?" are given.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jsonschema  # type: ignore[import-untyped]

from ray_pccl.launching import kuberay
from ray_pccl.launching.document import Document, Problem, UnreadableError

PROVIDERS = ("local", "aws", "gcp", "azure", "vsphere", "aliyun", "external")
INSTALL = re.compile(r"\b(?:pip3?|uv|conda|mamba|poetry)\b[^\n;&|]*\bray[-_]pccl\b")
START_MASTER = re.compile(r"\bray[-_]pccl(?:\.cli)?\s+(?:-\S+\s+)*start-master\b|\bray_pccl\.start_master\b")
HEAD_START = re.compile(r"\bray\s+start\b[^\n;&|]*--head\b")
PLACEHOLDER = re.compile(r"192\.0\.2\.\d+|your-[a-z-]+")
"""What stands in examples/cluster where only the user knows what to write: addresses that are nobody's, names."""
TOKEN_CURE = "run `ray get-auth-token --generate` first"  # noqa: S105
SETUP = ("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands")

Exists = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Checked:
    """A file that was looked at."""

    problems: tuple[Problem, ...]
    config: Mapping[str, Any]
    """What it holds; empty if it can't be read."""
    is_kuberay: bool = False
    """Whether it is for `kubectl apply`, and not for `ray up`."""

    @property
    def is_good(self) -> bool:
        """Whether it can be used: there is nothing but advice."""
        return not any(problem.fatal for problem in self.problems)


def check(text: str, *, schema: Mapping[str, Any], exists: Exists) -> Checked:
    """Looks at the text of a cluster's file.

    Args:
        text: What the file holds.
        schema: Ray's own, ``ray/autoscaler/ray-schema.json``.
        exists: Whether this machine has a file of this name (which may begin with ``~``).
    """
    try:
        document = Document(text)
    except UnreadableError as error:
        return Checked((error.problem,), {})
    if kuberay.is_kuberay(document):
        found = [*document.twice(), *kuberay.problems(document)]
        return Checked(tuple(sorted(found, key=_order)), document.data, is_kuberay=True)
    found = [*_against_schema(document, schema), *_against_provider(document, exists), *_worker_numbers(document)]
    found += [*_against_commands(document), *_files(document, exists)]
    return Checked(tuple(sorted([*document.twice(), *_once(found)], key=_order)), document.data)


def _order(problem: Problem) -> tuple[bool, int]:
    return (not problem.fatal, problem.line)


def _once(found: list[Problem]) -> list[Problem]:
    """One problem a field: what we say of it is clearer than what the schema says, and comes later."""
    return list({(problem.where, problem.fatal): problem for problem in found}.values())


# -------------------------------------------------------------------------------------------------------- the schema


def _against_schema(document: Document, schema: Mapping[str, Any]) -> Iterator[Problem]:
    config = dict(document.data)
    if document.get("provider", "type") == "local":
        config.pop("min_workers", None)  # Ray takes it out before it looks
    for error in jsonschema.Draft7Validator(schema).iter_errors(config):
        path = tuple(error.absolute_path)
        if error.validator == "required":
            name = error.message.split("'")[1]
            # Ray asks AWS itself what a machine has.
            if name != "resources" or document.get("provider", "type") != "aws":
                yield document.problem((*path, name), "is missing", "add it")
        elif error.validator == "additionalProperties":
            known = list(error.schema.get("properties", ()))
            for name in sorted(set(error.instance) - set(known)):
                near = difflib.get_close_matches(str(name), known, 1)
                cure = f"did you mean {near[0]}?" if near else "Ray knows no such field; take it out"
                yield document.problem((*path, name), "is unknown", cure)
        elif error.validator == "type":
            wanted = error.validator_value
            kind = wanted if isinstance(wanted, str) else " or ".join(wanted)
            yield document.problem(path, f"is {error.instance!r}", f"it must be of the type {kind}")
        else:
            yield document.problem(path, "is not as Ray wants it", error.message)


# ---------------------------------------------------------------------------------------------------------- provider


def _against_provider(document: Document, exists: Exists) -> Iterator[Problem]:
    kind = document.get("provider", "type")
    if document.get("provider") is not None and not isinstance(kind, str):
        yield document.problem(("provider", "type"), "is missing", f"say one of {', '.join(PROVIDERS)}")
    elif isinstance(kind, str) and kind not in PROVIDERS:
        near = difflib.get_close_matches(kind, PROVIDERS, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        yield document.problem(("provider", "type"), f"is {kind!r}", f"{hint}There are {', '.join(PROVIDERS)}")
    elif kind == "local":
        yield from _against_local(document)
    elif kind == "gcp" and not document.get("provider", "project_id"):
        yield document.problem(("provider", "project_id"), "is missing", "name the project that pays")
    if kind in ("aws", "gcp"):
        for field in ("region", "availability_zone"):
            if not document.get("provider", field):
                yield document.problem(("provider", field), "is missing", "say where the machines are to be")
    yield from _placeholders(document)
    key = document.get("auth", "ssh_private_key")
    if isinstance(key, str) and not exists(key):
        cure = "name the private key that opens the machines, or make one with `ssh-keygen -t ed25519`"
        yield document.problem(("auth", "ssh_private_key"), f"is {key}, which is not there", cure)
    if kind in PROVIDERS and kind != "external" and not document.get("auth", "ssh_user"):
        yield document.problem(("auth", "ssh_user"), "is missing", "say who logs in on the machines")


def _against_local(document: Document) -> Iterator[Problem]:
    head, workers = document.get("provider", "head_ip"), document.get("provider", "worker_ips")
    managed = document.get("provider", "coordinator_address") is not None
    if not managed and not head:
        yield document.problem(("provider", "head_ip"), "is missing", "add the address of the machine that leads")
    if not managed and workers is None:
        yield document.problem(("provider", "worker_ips"), "is missing", "list the addresses of all other machines")
    if isinstance(workers, list):
        for place, worker in enumerate(workers):
            path = ("provider", "worker_ips", place)
            if not isinstance(worker, str) or not worker:
                yield document.problem(path, f"is {worker!r}", "write an address or a host's name")
            elif worker == head:
                yield document.problem(path, "is the head's address, too", "list only the other machines")
            elif worker in workers[:place]:
                yield document.problem(path, f"names {worker} again", "list each machine once")
    for field in ("available_node_types", "head_node", "worker_nodes"):
        if document.get(field):
            yield document.problem((field,), "is not for machines of your own", "take it out")


def _placeholders(document: Document) -> Iterator[Problem]:
    provider = document.get("provider")
    for field, value in provider.items() if isinstance(provider, Mapping) else ():
        for place, each in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(each, str) and PLACEHOLDER.fullmatch(each):
                path = ("provider", field, place) if isinstance(value, list) else ("provider", field)
                yield document.problem(path, f"is {each}, as in the example", "write yours")


def _worker_numbers(document: Document) -> Iterator[Problem]:
    low, high = document.get("min_workers"), document.get("max_workers")
    addresses = document.get("provider", "worker_ips")
    types = document.get("available_node_types")
    if "min_workers" in document.data and (not isinstance(low, int) or low < 0):
        yield document.problem(("min_workers",), f"is {low!r}", "it must be a number, 0 or more")
    elif isinstance(low, int) and isinstance(high, int) and low > high:
        yield document.problem(("min_workers",), f"is {low}, more than max_workers", f"make it {high} or less")
    if isinstance(addresses, list) and isinstance(low, int) and low > len(addresses):
        cure = f"list more machines, or make it {len(addresses)}"
        yield document.problem(("min_workers",), f"is {low}, but worker_ips lists {len(addresses)}", cure)
    if not isinstance(types, Mapping) or not types:
        return
    total = 0
    for name, kind in types.items():
        least, most = document.get("available_node_types", name, "min_workers"), None
        if isinstance(kind, Mapping):
            most = kind.get("max_workers")
        if isinstance(least, int):
            total += least
            if isinstance(most, int) and least > most:
                path = ("available_node_types", name, "min_workers")
                yield document.problem(path, f"is {least}, more than max_workers", f"make it {most} or less")
    # Ray's own default for the clouds.
    if total > (high if isinstance(high, int) else 2):
        yield document.problem(("max_workers",), f"is less than all min_workers, {total}", f"make it {total} or more")
    head = document.get("head_node_type")
    if head is None:
        yield document.problem(("head_node_type",), "is missing", f"name one of {', '.join(map(str, types))}")
    elif not isinstance(head, str) or head not in types:
        cure = f"name one of {', '.join(map(str, types))}"
        yield document.problem(("head_node_type",), f"is {head!r}, which available_node_types has not", cure)


# ---------------------------------------------------------------------------------------------------------- commands


def _against_commands(document: Document) -> Iterator[Problem]:
    field = "head_start_ray_commands"
    start = _joined(document, field)
    ray, master = HEAD_START.search(start), START_MASTER.search(start)
    if start and not ray:
        yield document.problem(
            (field,), "do not start Ray", "add `ray start --head --port=6379 ...`, as in the examples"
        )
    elif ray and "--autoscaling-config" not in start:
        cure = "add `--autoscaling-config=~/ray_bootstrap_config.yaml` to `ray start`"
        yield document.problem((field,), "would start no workers", cure)
    elif not master:
        yield document.problem((field,), "do not start the master", "add `ray-pccl start-master` after `ray start`")
    elif ray and master.start() < ray.start():
        cure = "put `ray-pccl start-master` after `ray start`"
        yield document.problem((field,), "start the master before there is a Ray", cure)
    everywhere = INSTALL.search(_joined(document, "initialization_commands", "setup_commands"))
    head, workers = (INSTALL.search(_joined(document, f"{node}_setup_commands")) for node in ("head", "worker"))
    if not everywhere and not (head and workers):
        nodes = "the workers" if head else "the head" if workers else "the nodes"
        cure = "add `pip install ray-pccl`, unless they have it already, in the image for instance"
        yield document.problem(("setup_commands",), f"do not install ray-pccl on {nodes}", cure, fatal=False)
    text = _joined(document, *SETUP, field, "worker_start_ray_commands")
    if "RAY_AUTH_MODE" not in text and "RAY_AUTH_TOKEN" not in text:
        what = "let in everybody who reaches the cluster's ports"
        cure = "set RAY_AUTH_MODE=token and copy ~/.ray/auth_token in file_mounts, as in the examples"
        yield document.problem((field,), what, cure, fatal=False)


def _joined(document: Document, *fields: str) -> str:
    lists = [document.get(field) for field in fields]
    return "\n".join(str(command) for commands in lists if isinstance(commands, list) for command in commands)


def _files(document: Document, exists: Exists) -> Iterator[Problem]:
    mounts = document.get("file_mounts")
    for remote, local in mounts.items() if isinstance(mounts, Mapping) else ():
        if isinstance(local, str) and not exists(local):
            cure = TOKEN_CURE if local.endswith("auth_token") else "name a file or a directory of this machine"
            yield document.problem(("file_mounts", remote), f"is {local}, which is not there", cure)
