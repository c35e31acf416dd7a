"""What the records of a run must tell, whoever wrote them: the living, the dead, the evicted. Records in, findings out.

A record is what a peer wrote about one operation. `returned` ones name the contributors that the peer was told of and
those that it read off the result.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]
_PUT_OUT = {"PeerEvictedError", "NotConnectedError"}
"""What only a peer gets that is no member any more: its word on the operation does not bind the others."""
_LOST = {"PeerLostError"}
_ROOTED = {"PeerLostError", "CollectiveMismatchError", "UsageError"}
"""A root is a rank of the epoch in which the call is made: a death in between may leave members of two minds."""


@dataclass
class History:
    """What one peer process has written."""

    name: str
    peer_id: str = ""
    slot: int = -1
    records: list[Record] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    """Peers to which it cut its link."""
    cut_library: bool = False
    """Whether it cut the connections of the library that moves the data: an error on all, that costs nobody's place."""
    ended: str = ""
    text: str = ""


def read(directory: Path) -> list[History]:
    """The histories of a run. A last line that a kill tore is left out."""
    return [parse(path.stem, path.read_text().splitlines()) for path in sorted(directory.glob("*.jsonl"))]


def parse(name: str, lines: Sequence[str]) -> History:
    """One peer's history."""
    history = History(name)
    for number, line in enumerate(lines):
        try:
            record = json.loads(line)
        except ValueError:
            if number == len(lines) - 1:
                break
            raise
        if "peer" in record:
            history.peer_id, history.slot = record["peer"], record["slot"]
        elif "cut" in record:
            history.cut.append(record["cut"])
        elif "cut_library" in record:
            history.cut_library = True
        elif "ended" in record:
            history.ended, history.text = record["ended"], record["text"]
        else:
            history.records.append(record)
    return history


def check(histories: Iterable[History], may_be_evicted: Iterable[str] = ()) -> list[str]:
    """Everything that can't be; empty if all is well."""
    histories = list(histories)
    slots = {history.peer_id: history.slot for history in histories if history.peer_id}
    found = []
    operations: dict[tuple[int, int], list[tuple[History, Record]]] = defaultdict(list)
    cut = {end for history in histories for other in history.cut for end in (history.peer_id, other)}
    evictable = {*may_be_evicted, *(history.name for history in histories if history.peer_id in cut)}
    broken = {"DelegatedBackendError"} if any(history.cut_library for history in histories) else set()
    for history in histories:
        if history.ended and (history.ended not in _PUT_OUT or history.name not in evictable):
            found.append(f"{history.name} ended with {history.ended}: {history.text}")
        for record in history.records:
            operations[record["op"][0], record["op"][1]].append((history, record))
    for key, told in sorted(operations.items()):
        found += [f"operation {key}: {problem}" for problem in _check_operation(told, slots, broken)]
    return found


def _check_operation(
    told: Sequence[tuple[History, Record]], slots: Mapping[str, int], broken: set[str]
) -> Iterable[str]:
    returned = [(history, record) for history, record in told if "error" not in record]
    failed = [(history, record) for history, record in told if record.get("error", "") not in {"", *_PUT_OUT}]
    for history, record in told:
        if not record["intact"]:
            yield f"{history.name}: the input was changed ({record.get('error', 'returned')})"
    for history, record in failed:
        allowed = _ROOTED if record["kind"] in ("reduce", "broadcast") else _LOST
        if record["error"] not in allowed | broken:
            yield f"{history.name} got {record['error']}: {record['text']}"
    if returned and failed and not _alone(returned, failed):
        yield f"{_names(returned)} returned, {_names(failed)} got {failed[0][1]['error']}: {failed[0][1]['text']}"
    for history, record in returned:
        yield from _check_result(history, record, slots)
    yield from _check_agreement(returned)


def _alone(returned: Sequence[tuple[History, Record]], failed: Sequence[tuple[History, Record]]) -> bool:
    """Not the same operation at all: a root that is no rank any more is refused before it begins, by who is left."""
    return len(failed) == 1 and failed[0][1]["error"] == "UsageError" and bool(returned)


def _check_result(history: History, record: Record, slots: Mapping[str, int]) -> Iterable[str]:
    contributors, decoded = record["contributors"], record.get("decoded")
    if record.get("garbled"):
        yield f"{history.name}: the result makes no sense: {record['garbled']}, decoded {decoded}, {contributors}"
        return
    if decoded is not None and len(set(decoded)) != len(decoded):
        yield f"{history.name}: something was counted twice: {decoded}"
    if contributors is None:
        if history.slot not in decoded:
            yield f"{history.name}: its own contribution is not in its result"
        return
    if history.peer_id not in contributors:
        yield f"{history.name} returned, but is no contributor"
    if record["world_size"] != len(contributors) or len(set(contributors)) != len(contributors):
        yield f"{history.name}: world size {record['world_size']}, contributors {contributors}"
    unknown = [peer_id for peer_id in contributors if peer_id not in slots]
    if unknown:
        # It was a member, so it had joined; but it may have been killed before it wrote its first line.
        return
    if decoded is None:
        return
    due = sorted(slots[peer_id] for peer_id in contributors)
    if record["kind"] == "broadcast":
        if len(decoded) != 1 or decoded[0] not in due:
            yield f"{history.name}: a broadcast brought {decoded}, which is not one of {due}"
    elif sorted(decoded) != due:
        yield f"{history.name}: the result holds {sorted(decoded)}, the contributors are {due}"


def _check_agreement(returned: Sequence[tuple[History, Record]]) -> Iterable[str]:
    for what in ("digest", "contributors", "world_size"):
        answers: dict[str, list[str]] = defaultdict(list)
        for history, record in returned:
            if record.get(what) is not None:
                answers[json.dumps(record[what])].append(history.name)
        if len(answers) > 1:
            yield f"they do not agree on the {what}: {dict(answers)}"
    for history, record in returned:
        for other, _ in returned:
            if record["contributors"] is not None and other.peer_id not in record["contributors"]:
                yield f"{other.name} returned, but {history.name} does not count it among the contributors"


def _names(told: Sequence[tuple[History, Record]]) -> str:
    return ", ".join(history.name for history, _ in told)
