"""Everything that is said on a control connection, as typed, immutable messages.

Decoding checks every field against its type, so that a malformed message is a `ProtocolError` here and never a
surprise further in. `Round` numbers are (boot, n): a master's boot number, then its count.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from ray_pccl.errors import PCCLError, error_named
from ray_pccl.types import Member

Round = tuple[int, int]
LEFT = "it left"
"""The reason in `Decide.lost` for who said goodbye."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base of all messages."""


class Failure(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An error on its way to the peer that will raise it: the class's name, its text, its attributes."""

    error: str
    text: str
    details: dict[str, Any] = {}


def error_of(failure: Failure) -> PCCLError:
    """The error that a failure describes."""
    # The wire knows no tuples; errors promise them.
    details = {name: _with_tuples(value) for name, value in failure.details.items()}
    return error_named(failure.error, failure.text, details)


def _with_tuples(value: Any) -> Any:
    return tuple(_with_tuples(each) for each in value) if isinstance(value, list) else value


class VoteKind(Enum):
    """The calls in which all members meet at the master."""

    UPDATE_TOPOLOGY = "update_topology"
    PEERS_PENDING = "are_peers_pending"
    AWAIT_MINIMUM = "await_minimum"
    OPTIMIZE_TOPOLOGY = "optimize_topology"


class OperationState(Enum):
    """How far a peer is in an operation, as it answers after a death."""

    RUNNING = "running"
    """Entered; its full result is not there yet."""
    PREPARED = "prepared"
    """Holds its full result, and has not heard the same from all."""
    COMMITTED = "committed"
    """Heard *prepared* from all, and may have returned."""
    FAILED = "failed"
    """Failed for good: consumed, never retried."""


class Verdict(Enum):
    """What the master decides about an operation."""

    COMMIT = "commit"
    ABORT = "abort"
    CONSUME = "consume"


class OperationReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One operation in a peer's answer. `epoch` is the one whose members' inputs it works on."""

    tag: int
    number: int
    state: OperationState
    epoch: int
    retry: bool = True
    failure: Failure | None = None
    root: str = ""
    """The peer without whom the operation makes no sense."""


class Outcome(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What became of one operation: the same for every member."""

    tag: int
    number: int
    verdict: Verdict
    epoch: int
    failure: Failure | None = None


class VoteCount(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How many votes of a kind the group has served, and the answer to the last one."""

    served: int = 0
    value: bool = False


class OpenVote(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A vote that its peer still waits for; `count` is how many of its kind had been served when it was cast."""

    kind: VoteKind
    count: int
    timeout_s: float
    only: tuple[str, ...] | None = None
    """Whom to admit; all who wait, if not given."""


class Edge(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one peer could send to another. `rate` in bytes per second; 0: they can't connect; None: not measured."""

    source: str
    target: str
    rate: float | None
    age_s: float = 0.0


# ---------------------------------------------------------------------------------------------- peer to master


class Join(Message, frozen=True):
    """A new peer asks to be in a group. `dial` counts its connections: the highest is the one that holds."""

    peer_id: str
    group: str
    host: str
    min_world_size: int
    max_world_size: int | None
    rank: int | None
    timeout_s: float
    last_call_s: float
    watched: bool
    passive_timeout_s: float | None
    dial: int = 0
    address: str = ""
    expected: int = 0


class Register(Message, frozen=True):
    """A member comes back after its connection or its master was lost, with all that it knows (R5)."""

    peer_id: str
    group: str
    host: str
    epoch: int
    members: tuple[Member, ...]
    frozen: bool
    votes: tuple[OpenVote, ...]
    broken_links: tuple[str, ...]
    watched: bool
    passive_timeout_s: float | None
    dial: int = 0


class Answer(Message, frozen=True):
    """A frozen peer tells what it holds of each operation that not everyone is known to have finished."""

    round: Round
    epoch: int
    operations: tuple[OperationReport, ...]


class Vote(Message, frozen=True):
    """The peer is in one of the calls in which all members meet."""

    vote: OpenVote


class Withdraw(Message, frozen=True):
    """The peer gave up a vote that it cast."""

    kind: VoteKind


class LinkBroken(Message, frozen=True):
    """The peer's link to `other` broke in `epoch`."""

    epoch: int
    other: str


class Measured(Message, frozen=True):
    """What the peer has measured: in answer to a `Probe`, if it names the survey, or what it knew from before."""

    edges: tuple[Edge, ...]
    survey: Round | None = None


class Observed(Message, frozen=True):
    """What the peer's links carried while collectives kept them busy."""

    edges: tuple[Edge, ...]


class Running(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An operation that a peer is in, and for how long it has been when it tells."""

    tag: int
    what: str
    seconds: float


class Tally(Message, frozen=True):
    """What the peer has done since it connected. For onlookers: nothing is decided by it."""

    operations: int
    bytes: int
    aborts: int
    retries: int
    failures: int
    in_flight: int
    running: tuple[Running, ...]
    store_bytes: int


def tally_interval_s(world_size: int) -> float:
    """How often members tell their tallies, if those have changed: so seldom that a thousand of them are no load."""
    return max(1.0, world_size / 200)


class Leave(Message, frozen=True):
    """The peer leaves, by `close()`."""


class Farewell(Message, frozen=True):
    """The peer knows that it was evicted, and does nothing more in the old epoch."""


class Poll(Message, frozen=True):
    """A passive peer asks for what was held back for it."""


class Beat(Message, frozen=True):
    """A sign of life; the master sends it back as it came, if asked to."""

    number: int
    echo: bool = True


class StoreOp(Enum):
    """What can be asked of the group's key-value store."""

    SET = "set"
    GET = "get"
    WAIT = "wait"
    CHECK = "check"
    ADD = "add"
    COMPARE_SET = "compare_set"
    DELETE = "delete"
    APPEND = "append"
    NUM_KEYS = "num_keys"


class StoreRequest(Message, frozen=True):
    """One request to the store.

    `number` is unique for the peer. Requests below `acknowledged` were all answered: the master may forget them. The
    two make a request that is sent again after a restart count once.
    """

    number: int
    acknowledged: int
    op: StoreOp
    keys: tuple[str, ...] = ()
    values: tuple[bytes, ...] = ()
    amount: int = 0
    timeout_s: float = 0.0


class Question(Enum):
    """What a peer may ask about its group at any time."""

    NUM_WAITING = "num_waiting"
    IS_CLOSED = "is_closed"
    SET_CLOSED = "set_closed"
    TOPOLOGY = "topology"


class Query(Message, frozen=True):
    """A question about the group, or the request to close it."""

    number: int
    what: Question


# -------------------------------------------------------------------------------------------- sentinel to master


class ProcessState(Enum):
    """What a sentinel sees of a process."""

    RUNNING = "running"
    STOPPED = "stopped"
    EXITING = "exiting"
    RELEASED = "released"
    """It runs, but asked not to be watched any more."""


class Watch(Message, frozen=True):
    """A sentinel's opening: the host it watches."""

    host: str


class Seen(Message, frozen=True):
    """The sentinel saw the process of a peer change, or watches it from now on."""

    peer_id: str
    state: ProcessState


# ---------------------------------------------------------------------------------------------- master to peer


class Welcome(Message, frozen=True):
    """The master's opening on every authenticated connection."""

    boot: int
    master_id: str
    shared: dict[str, float]


class Refused(Message, frozen=True):
    """The join failed."""

    failure: Failure


class Registered(Message, frozen=True):
    """The master knows the member again; its epoch stands unless a round follows.

    `votes` settles votes that were served while the member was away.
    """

    votes: dict[str, VoteCount]


class Ask(Message, frozen=True):
    """The question of a round: freeze the epoch, then answer (R1)."""

    round: Round


class Decide(Message, frozen=True):
    """A new epoch, as a whole: who is in it, and what became of everything that was open.

    To a peer that is known to be in the epoch before (`base`), `members` holds only the newcomers, and `removed` who is
    gone: with a thousand members, the whole list for each of them takes longer than everything else.
    """

    epoch: int
    members: tuple[Member, ...]
    admitted_in: int
    outcomes: tuple[Outcome, ...]
    votes: dict[str, VoteCount]
    lost: tuple[tuple[str, str], ...]
    min_world_size: int
    attributes: dict[str, int]
    base: int = 0
    removed: tuple[str, ...] = ()


class Evicted(Message, frozen=True):
    """The peer is out of its group."""

    reason: str


class VoteServed(Message, frozen=True):
    """All members voted, and nothing about the membership changes."""

    kind: VoteKind
    count: VoteCount


class VoteFailed(Message, frozen=True):
    """The vote will not be served: members are in different calls, or too few."""

    kind: VoteKind
    failure: Failure


class Reply(Message, frozen=True):
    """The answer to a `StoreRequest` or a `Query`."""

    number: int
    values: tuple[bytes, ...] = ()
    flag: bool = False
    amount: int = 0
    failure: Failure | None = None


class Probe(Message, frozen=True):
    """Measure the way to another member, whose data plane listens at `address`, and say `Measured`."""

    survey: Round
    other: str
    address: str
    sends: bool = True
    """Whether to measure the way there."""
    receives: bool = True
    """Whether to measure the way back."""


class Surveying(Message, frozen=True):
    """How far `optimize_topology()` is; the next word comes within `within_s`."""

    stage: str
    probed: int
    to_probe: int
    within_s: float


class TopologyReport(msgspec.Struct, frozen=True, array_like=True):
    """The first value of the reply to `Question.TOPOLOGY`; the second holds the rates from host to host."""

    order: tuple[tuple[str, int], ...]
    """Members by rank, each with the number of its host."""
    hosts: tuple[str, ...]
    bottleneck: float | None
    age_s: float | None


class News(Message, frozen=True):
    """Something happened to the group that callbacks may want to know."""

    change: str
    peer_id: str | None
    reason: str


class Stopped(Message, frozen=True):
    """The master ends for good."""

    reason: str


FromPeer = (
    Join
    | Register
    | Answer
    | Vote
    | Withdraw
    | LinkBroken
    | Measured
    | Observed
    | Tally
    | Leave
    | Farewell
    | Poll
    | Beat
    | StoreRequest
    | Query
)
FromSentinel = Watch | Seen
FromMaster = (
    Welcome
    | Refused
    | Registered
    | Ask
    | Decide
    | Evicted
    | VoteServed
    | VoteFailed
    | Reply
    | Probe
    | Surveying
    | News
    | Stopped
    | Beat
)
ToMaster = FromPeer | FromSentinel
