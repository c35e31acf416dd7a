"""What becomes of the operations that were in flight when someone died.

The rule (R0): if anyone committed, all commit; if every survivor is prepared in the same epoch, all commit; otherwise
nobody does. A commit anywhere, even by a peer that died since, needs *prepared* from all: so whoever returned a result
returned the one that the survivors will.

What is neither is retried, unless that makes no sense any more: its caller asked for no retry and someone is lost, its
root is among them, or too few are left. Then it is *consumed* (R3): it fails for everyone, also who comes to it later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ray_pccl.control.messages import Failure, OperationReport, OperationState, Outcome, Verdict

Key = tuple[int, int]


def agree(
    answers: Mapping[str, Iterable[OperationReport]], lost: Iterable[tuple[str, str]], minimum: int = 1
) -> tuple[Outcome, ...]:
    """One outcome for each operation that any survivor knows of.

    `answers` holds every survivor's; an operation missing in one of them was not entered there. `lost` are the peers
    that are gone since the last epoch, with the reasons. Fewer survivors than `minimum` retry nothing.
    """
    by_operation: dict[Key, dict[str, OperationReport]] = {}
    for peer_id, operations in answers.items():
        for report in operations:
            by_operation.setdefault((report.tag, report.number), {})[peer_id] = report
    survivors = len(answers)
    gone = tuple(lost)
    too_few = _too_few(survivors, minimum) if survivors < minimum else None
    return tuple(
        _decide(key, list(reports.values()), survivors, gone, too_few) for key, reports in sorted(by_operation.items())
    )


def _decide(
    key: Key,
    reports: list[OperationReport],
    survivors: int,
    lost: tuple[tuple[str, str], ...],
    too_few: Failure | None,
) -> Outcome:
    tag, number = key
    for report in reports:
        if report.state is OperationState.COMMITTED:
            return Outcome(tag, number, Verdict.COMMIT, report.epoch)
    for report in reports:
        if report.state is OperationState.FAILED:
            return Outcome(tag, number, Verdict.CONSUME, report.epoch, report.failure)
    epochs = {report.epoch for report in reports}
    prepared = [report for report in reports if report.state is OperationState.PREPARED]
    if len(prepared) == survivors and len(epochs) == 1:
        return Outcome(tag, number, Verdict.COMMIT, epochs.pop())
    epoch = max(epochs)
    if lost and (not all(report.retry for report in reports) or _lacks_root(reports, lost)):
        return Outcome(tag, number, Verdict.CONSUME, epoch, _peer_lost(lost))
    if too_few is not None:
        return Outcome(tag, number, Verdict.CONSUME, epoch, too_few)
    return Outcome(tag, number, Verdict.ABORT, epoch)


def _lacks_root(reports: list[OperationReport], lost: tuple[tuple[str, str], ...]) -> bool:
    gone = {peer_id for peer_id, _ in lost}
    return any(report.root in gone for report in reports)


def _too_few(survivors: int, minimum: int) -> Failure:
    text = f"the group fell to {survivors} peers, below min_world_size={minimum}; the next call waits for newcomers"
    return Failure("TooFewPeersError", text)


def _peer_lost(lost: tuple[tuple[str, str], ...]) -> Failure:
    text = "; ".join(f"peer {peer_id} was lost: {reason}" for peer_id, reason in lost)
    details = {"peers": tuple(peer_id for peer_id, _ in lost), "reason": "; ".join(reason for _, reason in lost)}
    return Failure("PeerLostError", text, details)
