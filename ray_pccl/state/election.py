"""Whose content counts: a pure function of what all members told, so that all come to the same answer by themselves.

The rules, in the order in which they apply:

1. All tensors have the same names, types, shapes and flags everywhere, or it is a mismatch.
2. Either everyone says ENFORCE_POPULAR, or everyone says SEND_ONLY or RECEIVE_ONLY; two who only send hold the same.
3. The revision that is due is one more than the last one that anybody knows. Nobody knows one: the highest that is
   offered by those who may send. Who offers more is *ahead*, who offers less is *behind*.
4. Those who offer the due revision, and took part in the last sync, vote, each for the content it holds. So a newcomer
   never outvotes the group; in a first sync nobody has taken part in one, and all of them vote. Who says SEND_ONLY
   votes whether it took part or not.
5. The content with the most votes wins. Of contents with as many, the one that is held by the member who has taken part
   for longest (the lowest revision of its first sync), then by the one of the lowest rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import xxhash

from ray_pccl.errors import (
    NoUpToDatePeerError,
    OperationTimeoutError,
    PCCLError,
    RevisionError,
    SharedStateMismatchError,
)
from ray_pccl.state.rows import DIGEST_BYTES, Row, SharedStateSyncStrategy

Table = Mapping[str, Row]
"""A row of every member, in the order of ranks."""
_POPULAR = SharedStateSyncStrategy.ENFORCE_POPULAR
_SEND, _RECEIVE = SharedStateSyncStrategy.SEND_ONLY, SharedStateSyncStrategy.RECEIVE_ONLY


@dataclass(frozen=True, slots=True)
class Election:
    """What members agree on."""

    sync: bytes
    """Names this election: no other one has the same."""
    revision: int
    sources: tuple[str, ...]
    """Who voted for the content that won, the longest-standing first."""
    receivers: tuple[str, ...]
    """Who lacks anything of it."""
    newcomers: tuple[str, ...]
    """Receivers that get what may differ as well: as the first source holds it."""
    ahead: tuple[str, ...]
    """Who offered a later revision: it gets `RevisionError`, and keeps its state."""


def elect(table: Table) -> Election:
    """The election of a table in which all hold the same tensors. Raises the error that is everyone's."""
    _check_strategies(table)
    candidates = [peer for peer, row in table.items() if row.strategy is not _RECEIVE]
    if not candidates:
        who = ", ".join(table)
        raise NoUpToDatePeerError(
            f"everyone said RECEIVE_ONLY ({who}), so there is nobody to receive from: let those who "
            "hold the state say SEND_ONLY"
        )
    last = max((row.known for row in table.values() if row.known is not None), default=None)
    due = last + 1 if last is not None else max(table[peer].revision for peer in candidates)
    voters = [peer for peer in candidates if table[peer].revision == due and _votes(table[peer], last)]
    if not voters:
        raise _nobody_due(table, last, due)
    order = sorted(voters, key=lambda peer: (table[peer].since, voters.index(peer)))
    sources = _winners(table, order)
    content, loose = table[sources[0]].content, table[sources[0]].loose
    ahead = tuple(peer for peer, row in table.items() if row.revision > due)
    newcomers = tuple(
        peer
        for peer, row in table.items()
        if peer not in sources
        and peer not in ahead
        and _is_new(row, last, due)
        and row.has_loose
        and row.loose != loose
    )
    receivers = tuple(
        peer for peer, row in table.items() if peer not in ahead and (row.content != content or peer in newcomers)
    )
    _check_senders(table, receivers, ahead, due)
    return Election(name_of(table), due, tuple(sources), receivers, newcomers, ahead)


def name_of(table: Table) -> bytes:
    """A name for the election of this table; every call has a nonce, so it comes once."""
    text = b"".join(peer.encode() + b"\0" + row.nonce for peer, row in table.items())
    digest: bytes = xxhash.xxh3_128_digest(text)
    return digest[: DIGEST_BYTES - 1] + b"\1"  # never `NOWHERE`


def judge(table: Table, election: Election, tensor_of: Mapping[int, str]) -> bool:
    """Whether everyone has everything, once the transfer has begun. Raises the error that is everyone's.

    `tensor_of` tells the tensor's name of a piece.
    """
    for peer, row in table.items():
        if row.spoilt >= 0:
            raise SharedStateMismatchError(
                f"peer {peer} received tensor {tensor_of.get(row.spoilt, '?')!r} otherwise than it was announced, from "
                f"each of {', '.join(election.sources)}: a state must not be changed while it is synchronised",
                tensor=tensor_of.get(row.spoilt, ""),
                peers=(peer, *election.sources),
            )
    lacking = [peer for peer, row in table.items() if row.missing]
    if not lacking:
        return True
    if not any(source in table for source in election.sources):
        raise NoUpToDatePeerError(
            f"all peers that held revision {election.revision} are lost ({', '.join(election.sources)}), and "
            f"{', '.join(lacking)} had not received all of it; every state is as it was, and the next sync is a "
            "first one",
            peers=election.sources,
            lost=True,
        )
    late = [peer for peer in lacking if table[peer].overdue]
    if late:
        calls = {peer: f"sync_shared_state(), with {row.missing} bytes to come" for peer, row in table.items()}
        raise OperationTimeoutError(
            f"nothing of the shared state arrives any more at {', '.join(late)}; every state is as it was", calls=calls
        )
    return False


# --------------------------------------------------------------------------------------------------------- inside


def _votes(row: Row, last: int | None) -> bool:
    return last is None or row.known == last or row.strategy is _SEND


def _is_new(row: Row, last: int | None, due: int) -> bool:
    return row.revision < due if last is None else row.known != last


def _winners(table: Table, order: Sequence[str]) -> list[str]:
    """Those who hold the content that wins; `order` has the voters, the one who decides a tie first."""
    votes: dict[bytes, list[str]] = {}
    for peer in order:
        votes.setdefault(table[peer].content, []).append(peer)
    most = max(len(peers) for peers in votes.values())
    return next(peers for peers in votes.values() if len(peers) == most)


def _check_strategies(table: Table) -> None:
    said = {strategy: [peer for peer, row in table.items() if row.strategy is strategy] for strategy in _STRATEGIES}
    if said[_POPULAR] and (said[_SEND] or said[_RECEIVE]):
        raise _contradiction(said, "ENFORCE_POPULAR is everyone's strategy or nobody's")
    if len({table[peer].content for peer in said[_SEND]}) > 1:
        raise _contradiction({_SEND: said[_SEND]}, "those who only send hold different contents")


_STRATEGIES = (_POPULAR, _SEND, _RECEIVE)


def _check_senders(table: Table, receivers: Sequence[str], ahead: Sequence[str], due: int) -> None:
    """Who only sends must hold what wins."""
    behind = [peer for peer, row in table.items() if row.strategy is _SEND and row.revision < due]
    wrong = [peer for peer in receivers if table[peer].strategy is _SEND]
    if behind or wrong:
        offers = ", ".join(f"{peer} offers {table[peer].revision}" for peer in dict.fromkeys([*behind, *wrong]))
        text = f"who only sends must hold revision {due}, which all will hold: {offers}"
        raise _contradiction({_SEND: [*dict.fromkeys([*behind, *wrong])]}, text)


def _contradiction(said: Mapping[SharedStateSyncStrategy, Sequence[str]], why: str) -> PCCLError:
    who = "; ".join(f"{strategy.name}: {', '.join(peers)}" for strategy, peers in said.items() if peers)
    peers = tuple(peer for some in said.values() for peer in some)
    return SharedStateMismatchError(f"the strategies contradict one another: {why} ({who})", tensor="", peers=peers)


def _nobody_due(table: Table, last: int | None, due: int) -> RevisionError:
    offered = {peer: row.revision for peer, row in table.items()}
    text = ", ".join(f"{peer} offers {revision}" for peer, revision in offered.items())
    return RevisionError(
        f"the last sync of the group had revision {last}, so {due} is due, and nobody who took part in it offers that: "
        f"{text}; the revision grows by exactly one each sync",
        expected=due,
        offered=offered,
    )


def ahead_error(peer: str, table: Table, election: Election) -> RevisionError:
    """What a member gets that is ahead of the group."""
    offered = {other: row.revision for other, row in table.items()}
    return RevisionError(
        f"peer {peer} offers revision {table[peer].revision} of the shared state, but the group's is "
        f"{election.revision} now: the revision grows by exactly one each sync. Its state is as it was; with revision "
        f"{election.revision} it is brought up by the next sync",
        expected=election.revision,
        offered=offered,
    )
