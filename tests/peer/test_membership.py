"""A peer's life in a group as a pure machine: messages in, exact effects out, under a clock that the test moves."""

from __future__ import annotations

import pytest

from ray_pccl.control.messages import (
    Answer,
    Ask,
    Beat,
    Decide,
    Evicted,
    Failure,
    Farewell,
    Join,
    Leave,
    LinkBroken,
    Message,
    News,
    OpenVote,
    OperationReport,
    OperationState,
    Outcome,
    Poll,
    Query,
    Question,
    Refused,
    Register,
    Registered,
    Reply,
    Stopped,
    StoreOp,
    StoreRequest,
    Verdict,
    Vote,
    VoteCount,
    VoteFailed,
    VoteKind,
    VoteServed,
    Welcome,
    Withdraw,
)
from ray_pccl.errors import (
    MasterStoppedError,
    MasterUnreachableError,
    NotConnectedError,
    OperationTimeoutError,
    PCCLError,
    PeerEvictedError,
    ProtocolError,
    RendezvousClosedError,
    RendezvousTimeoutError,
    StoreTimeoutError,
    UsageError,
)
from ray_pccl.peer.effects import Effect, Fail, Identity, Send, Settle, Tell
from ray_pccl.peer.ledger import FrozenError
from ray_pccl.peer.membership import JOIN, Membership, Standing
from ray_pccl.settings import Settings
from ray_pccl.types import Member, MembershipChange, MembershipEvent

SETTINGS = Settings(master_lease_s=60, master_timeout_s=90)
TOPOLOGY, PENDING, MINIMUM = VoteKind.UPDATE_TOPOLOGY, VoteKind.PEERS_PENDING, VoteKind.AWAIT_MINIMUM


def _of(*peers: str) -> tuple[Member, ...]:
    return tuple(Member(peer_id, "h") for peer_id in peers)


def _decide(epoch: int, *peers: str, topology: int = 1, **given) -> Decide:
    fields = {
        "admitted_in": 1,
        "outcomes": (),
        "votes": {"update_topology": VoteCount(topology, True)},
        "lost": (),
        "min_world_size": 2,
        "attributes": {"global_world_size": len(peers)},
    }
    return Decide(epoch, _of(*peers), **(fields | given))


class Peer:
    """A `Membership` of peer `a` in group `g`, under a clock of the test's."""

    def __init__(self, settings: Settings = SETTINGS, *, rank: int | None = None) -> None:
        self.now = 0.0
        self.machine = Membership(Identity("a", "g", "h", 2, None, rank), settings, 0.0)
        self.machine.join(10.0, 0.0)

    def welcome(self, boot: int = 1) -> list[Message]:
        return self.machine.welcome(Welcome(boot, "master", self.machine.settings.shared()), self.now)

    def member(self, *others: str) -> Peer:
        """Lets the peer in, in epoch 1."""
        self.welcome()
        self.receive(_decide(1, "a", *(others or ("b",))))
        assert self.machine.standing is Standing.MEMBER
        return self

    def receive(self, message) -> list[Effect]:
        return self.machine.received(message, self.now)

    def at(self, now: float, *, heard: bool = True) -> list[Effect]:
        """Time passes; with `heard`, the master echoed a beat just now."""
        self.now = now
        if heard:
            self.machine.heard(now)
        return self.machine.tick(now)

    def vote(self, kind: VoteKind = TOPOLOGY, timeout_s: float = 20.0) -> list[Effect]:
        call, effects = self.machine.vote(kind, timeout_s, self.now)
        assert call is kind
        return effects

    def ask(self, op: StoreOp = StoreOp.SET, **given) -> tuple[int, list[Effect]]:
        call, effects = self.machine.request(op, self.now, **given)
        assert isinstance(call, int)
        return call, effects


def _event(change: MembershipChange, epoch: int, *members: str, peer: str | None = None, reason: str = "") -> Tell:
    return Tell(MembershipEvent(change, "g", epoch, peer, reason, members))


def _failures(effects: list[Effect]) -> dict[object, type[PCCLError]]:
    return {effect.call: type(effect.error) for effect in effects if isinstance(effect, Fail)}


# --------------------------------------------------------------------------------------------------------- joining


def test_a_welcomed_peer_joins_with_the_time_that_is_left() -> None:
    peer = Peer(rank=3)
    peer.now = 4.0
    assert peer.welcome() == [Join("a", "g", "h", 2, None, 3, 6.0, SETTINGS.last_call_s, False, None, dial=1)]


def test_a_peer_that_loses_its_connection_while_it_waits_joins_again() -> None:
    peer = Peer()
    peer.welcome()
    assert peer.machine.disconnected() == []
    peer.now = 9.0
    (join,) = peer.welcome(boot=2)
    assert isinstance(join, Join) and join.timeout_s == 1.0


def test_the_first_decision_makes_it_a_member() -> None:
    peer = Peer()
    peer.welcome()
    with pytest.raises(NotConnectedError):
        peer.machine.require_member()
    effects = peer.receive(_decide(1, "b", "a"))
    assert effects == [_event(MembershipChange.EPOCH, 1, "b", "a"), Settle(JOIN)]
    view = peer.machine.view
    assert (view.epoch, view.rank, view.members, view.min_world_size) == (1, 1, _of("b", "a"), 2)
    assert view.attributes == {"global_world_size": 2}
    peer.machine.require_member()


def test_a_refusal_ends_the_join_with_its_error() -> None:
    peer = Peer()
    peer.welcome()
    effects = peer.receive(Refused(Failure("RendezvousClosedError", "the group was closed")))
    assert _failures(effects) == {JOIN: RendezvousClosedError}
    assert peer.machine.standing is Standing.REFUSED
    with pytest.raises(RendezvousClosedError, match="was closed"):
        peer.machine.require_member()


def test_without_any_master_the_join_ends_in_time() -> None:
    peer = Peer()
    assert peer.at(9.99, heard=False) == []
    assert _failures(peer.at(10.0, heard=False)) == {JOIN: MasterUnreachableError}


def test_a_master_that_neither_admits_nor_refuses_ends_the_join_a_moment_after_its_time() -> None:
    peer = Peer()
    peer.welcome()
    assert peer.at(10.0) == []
    assert _failures(peer.at(12.0)) == {JOIN: RendezvousTimeoutError}


def test_a_peer_takes_over_the_masters_settings() -> None:
    peer = Peer()
    shared = Settings(master_lease_s=7, heartbeat_timeout_s=0.5).shared()
    peer.machine.welcome(Welcome(1, "master", shared), 0.0)
    assert (peer.machine.settings.master_lease_s, peer.machine.master_id) == (7, "master")


# ---------------------------------------------------------------------------------------------------------- rounds


def test_a_question_freezes_the_epoch_and_is_answered_with_what_the_peer_holds() -> None:
    peer = Peer().member()
    key = peer.machine.ledger.enter(0, 1, 0.0)
    peer.machine.ledger.prepare(key, 0.0)
    report = OperationReport(0, 0, OperationState.PREPARED, 1)
    assert peer.receive(Ask((1, 1))) == [Send(Answer((1, 1), 1, (report,)))]
    with pytest.raises(FrozenError):
        peer.machine.ledger.commit(key, 0.0)


def test_a_question_that_comes_again_has_the_same_answer() -> None:
    peer = Peer().member()
    first = peer.receive(Ask((1, 1)))
    assert peer.receive(Ask((1, 1))) == first


@pytest.mark.parametrize("stale", [(1, 4), (1, 3), (0, 9)])
def test_a_question_of_an_older_round_is_ignored(stale: tuple[int, int]) -> None:
    peer = Peer().member()
    peer.receive(Ask((1, 5)))
    assert peer.receive(Ask(stale)) == []


def test_a_question_of_a_newer_master_is_answered() -> None:
    peer = Peer().member()
    peer.receive(Ask((1, 5)))
    assert peer.receive(Ask((2, 1))) == [Send(Answer((2, 1), 1, ()))]


def test_a_decision_is_applied_as_a_whole_and_thaws() -> None:
    peer = Peer().member("b", "c")
    key = peer.machine.ledger.enter(0, 1, 0.0)
    peer.machine.ledger.prepare(key, 0.0)
    peer.receive(Ask((1, 1)))
    lost = (("b", "it left"), ("c", "its process is exiting"))
    effects = peer.receive(_decide(2, "a", lost=lost, outcomes=(Outcome(0, 0, Verdict.COMMIT, 1),)))
    assert effects == [
        _event(MembershipChange.LEFT, 2, "a", peer="b", reason="it left"),
        _event(MembershipChange.LOST, 2, "a", peer="c", reason="its process is exiting"),
        _event(MembershipChange.EPOCH, 2, "a"),
    ]
    assert peer.machine.ledger.operations[key].state is OperationState.COMMITTED
    assert not peer.machine.ledger.frozen
    assert (peer.machine.view.epoch, peer.machine.view.rank) == (2, 0)


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_decision_of_an_old_epoch_is_ignored_and_thaws_nothing(epoch: int) -> None:
    peer = Peer().member()
    peer.receive(Ask((1, 1)))
    assert peer.receive(_decide(epoch, "a")) == []
    assert peer.machine.ledger.frozen and peer.machine.view.members == _of("a", "b")


def test_someone_lost_while_the_master_restarted_is_lost_for_a_reason_too() -> None:
    peer = Peer().member("b")
    first, _ = peer.receive(_decide(3, "a"))
    assert isinstance(first, Tell) and first.event.change is MembershipChange.LOST and first.event.reason


def test_operation_numbers_restart_only_with_an_admission() -> None:
    peer = Peer().member()
    peer.machine.ledger.enter(0, 1, 0.0)
    peer.receive(Ask((1, 1)))
    peer.receive(_decide(2, "a", admitted_in=1))
    assert peer.machine.ledger.enter(0, 2, 0.0) == (0, 1)
    peer.receive(Ask((1, 2)))
    peer.receive(_decide(3, "a", "c", admitted_in=3, topology=2))
    assert peer.machine.ledger.enter(0, 3, 0.0) == (0, 0)


# ------------------------------------------------------------------------------------------- reconnects and masters


def test_a_lower_boot_is_refused() -> None:
    peer = Peer().member()
    peer.welcome(boot=3)
    with pytest.raises(ProtocolError, match="replaced"):
        peer.welcome(boot=2)
    assert peer.machine.boot == 3


def test_a_member_comes_back_with_all_that_it_knows() -> None:
    peer = Peer().member("b", "c")
    peer.vote(TOPOLOGY, timeout_s=20.0)
    number, _ = peer.ask(StoreOp.WAIT, keys=("k",), timeout_s=30.0)
    _, [sent] = peer.machine.query(Question.NUM_WAITING, 0.0)
    assert peer.machine.link_broken("c") == [Send(LinkBroken(1, "c"))]
    assert peer.machine.disconnected() == [_event(MembershipChange.MASTER_LOST, 1, "a", "b", "c")]
    peer.now = 5.0
    vote = OpenVote(TOPOLOGY, 1, 15.0)
    assert peer.welcome(boot=2) == [
        Register("a", "g", "h", 1, _of("a", "b", "c"), False, (vote,), ("c",), False, None, dial=2),
        StoreRequest(number, 0, StoreOp.WAIT, ("k",), timeout_s=25.0),
        sent.message,
    ]


def test_a_frozen_member_says_so_when_it_comes_back() -> None:
    peer = Peer().member()
    peer.receive(Ask((1, 1)))
    (register,) = peer.welcome(boot=2)
    assert isinstance(register, Register) and register.frozen


def test_a_member_that_is_back_tells_callbacks_and_settles_votes_served_meanwhile() -> None:
    peer = Peer().member()
    peer.vote(PENDING)
    peer.welcome(boot=2)
    counts = {"update_topology": VoteCount(1, True), "are_peers_pending": VoteCount(1, True)}
    assert peer.receive(Registered(counts)) == [
        _event(MembershipChange.MASTER_BACK, 1, "a", "b"),
        Settle(PENDING, True),
    ]


def test_broken_links_are_forgotten_with_their_epoch() -> None:
    peer = Peer().member("b", "c")
    peer.machine.link_broken("b")
    peer.receive(_decide(2, "a", "b", "c"))
    (register,) = peer.welcome(boot=2)
    assert isinstance(register, Register) and register.broken_links == ()


# ---------------------------------------------------------------------------------------------------------- leases


def test_a_peer_that_has_not_heard_the_master_for_its_lease_freezes() -> None:
    peer = Peer().member()
    peer.at(10.0)
    assert peer.at(69.9, heard=False) == []
    assert not peer.machine.ledger.frozen
    peer.at(70.0, heard=False)
    assert peer.machine.ledger.frozen


def test_a_peer_that_is_heard_again_after_its_lease_registers_as_frozen_once() -> None:
    peer = Peer().member()
    peer.at(60.0, heard=False)
    (effect,) = peer.at(61.0)
    assert isinstance(effect, Send) and isinstance(effect.message, Register) and effect.message.frozen
    assert peer.at(62.0) == []
    assert peer.machine.ledger.frozen


def test_a_peer_that_reconnects_after_its_lease_registers_as_frozen() -> None:
    peer = Peer().member()
    peer.now = 60.0  # its timers did not run: it was stopped
    (register,) = peer.welcome(boot=1)
    assert isinstance(register, Register) and register.frozen


def test_the_lease_runs_from_when_the_echoed_beat_was_sent() -> None:
    peer = Peer().member()
    peer.machine.heard(30.0)
    peer.machine.heard(20.0)  # an older echo, later
    peer.at(89.9, heard=False)
    assert not peer.machine.ledger.frozen
    peer.at(90.0, heard=False)
    assert peer.machine.ledger.frozen


def test_a_lease_that_ended_thaws_only_with_a_decision() -> None:
    peer = Peer().member()
    peer.at(60.0, heard=False)
    peer.at(61.0)
    peer.receive(Ask((1, 1)))
    peer.receive(_decide(2, "a", "b"))
    assert not peer.machine.ledger.frozen
    assert peer.at(62.0) == []


# ----------------------------------------------------------------------------------------------------------- votes


def test_a_vote_names_how_many_were_served_before_it() -> None:
    peer = Peer().member()
    assert peer.vote(TOPOLOGY, 20.0) == [Send(Vote(OpenVote(TOPOLOGY, 1, 20.0)))]
    assert peer.receive(VoteServed(TOPOLOGY, VoteCount(2, False))) == [Settle(TOPOLOGY, False)]
    assert peer.vote(TOPOLOGY, 20.0) == [Send(Vote(OpenVote(TOPOLOGY, 2, 20.0)))]


def test_a_served_vote_that_comes_twice_settles_one_call() -> None:
    peer = Peer().member()
    peer.vote(PENDING)
    served = VoteServed(PENDING, VoteCount(1, True))
    assert peer.receive(served) == [Settle(PENDING, True)]
    peer.vote(PENDING)
    assert peer.receive(served) == []
    assert peer.receive(VoteServed(PENDING, VoteCount(2, False))) == [Settle(PENDING, False)]


def test_an_admitting_epoch_settles_the_vote_that_asked_for_it() -> None:
    peer = Peer().member()
    peer.vote(TOPOLOGY)
    effects = peer.receive(_decide(2, "a", "b", "c", admitted_in=2, topology=2))
    assert effects[-1] == Settle(TOPOLOGY, True)


def test_a_recovery_epoch_leaves_votes_open() -> None:
    peer = Peer().member()
    peer.vote(TOPOLOGY)
    assert Settle(TOPOLOGY, True) not in peer.receive(_decide(2, "a", min_world_size=1))
    assert peer.receive(VoteServed(TOPOLOGY, VoteCount(2, False))) == [Settle(TOPOLOGY, False)]


def test_the_wait_for_the_minimum_ends_with_the_epoch_that_has_it() -> None:
    peer = Peer().member()
    peer.receive(_decide(2, "a"))
    peer.vote(MINIMUM)
    assert Settle(MINIMUM, True) not in peer.receive(_decide(3, "a"))
    assert peer.receive(_decide(4, "a", "c"))[-1] == Settle(MINIMUM, True)
    peer.vote(MINIMUM)
    assert peer.receive(VoteServed(MINIMUM, VoteCount())) == [Settle(MINIMUM, True)]


def test_the_same_call_in_two_threads_is_refused() -> None:
    peer = Peer().member()
    peer.vote(TOPOLOGY)
    with pytest.raises(UsageError, match="update_topology"):
        peer.vote(TOPOLOGY)


def test_a_vote_that_failed_raises_what_the_master_said() -> None:
    peer = Peer().member()
    peer.vote(TOPOLOGY)
    calls = {"a": "update_topology", "b": "are_peers_pending"}
    failed = VoteFailed(TOPOLOGY, Failure("OperationTimeoutError", "not all came", {"calls": calls}))
    (effect,) = peer.receive(failed)
    assert isinstance(effect, Fail) and isinstance(effect.error, OperationTimeoutError) and effect.error.calls == calls
    assert peer.receive(failed) == []


def test_a_vote_that_the_master_never_settles_ends_by_itself() -> None:
    peer = Peer().member()
    peer.vote(TOPOLOGY, timeout_s=20.0)
    assert peer.at(21.9) == []
    effects = peer.at(22.0)
    assert effects[0] == Send(Withdraw(TOPOLOGY)) and _failures(effects) == {TOPOLOGY: OperationTimeoutError}


def test_a_vote_that_nobody_waits_for_any_more_is_withdrawn() -> None:
    peer = Peer().member()
    peer.vote(TOPOLOGY)
    assert peer.machine.abandon(TOPOLOGY) == [Send(Withdraw(TOPOLOGY))]
    assert peer.machine.abandon(TOPOLOGY) == []
    assert peer.receive(VoteServed(TOPOLOGY, VoteCount(2, False))) == []


# -------------------------------------------------------------------------------------------------------- requests


def test_requests_are_numbered_and_acknowledge_what_was_answered() -> None:
    peer = Peer().member()
    numbers = [peer.ask(StoreOp.SET, keys=("k",), values=(b"v",)) for _ in range(3)]
    messages = [effects[0].message for _, effects in numbers]
    assert [(message.number, message.acknowledged) for message in messages] == [(0, 0), (1, 0), (2, 0)]
    peer.receive(Reply(0))
    peer.receive(Reply(2))
    _, [sent] = peer.ask()
    assert (sent.message.number, sent.message.acknowledged) == (3, 1)
    peer.receive(Reply(1))
    peer.receive(Reply(3))
    _, [sent] = peer.ask()
    assert (sent.message.number, sent.message.acknowledged) == (4, 4)


def test_a_reply_settles_its_request_once() -> None:
    peer = Peer().member()
    number, _ = peer.ask(StoreOp.ADD, keys=("k",), amount=1)
    reply = Reply(number, amount=7)
    assert peer.receive(reply) == [Settle(number, reply)]
    assert peer.receive(reply) == []


def test_a_reply_may_be_an_error() -> None:
    peer = Peer().member()
    number, _ = peer.ask(StoreOp.GET, keys=("k",), timeout_s=1.0)
    effects = peer.receive(Reply(number, failure=Failure("StoreTimeoutError", "no k", {"keys": ["k"]})))
    assert _failures(effects) == {number: StoreTimeoutError}


def test_a_query_is_a_request_too() -> None:
    peer = Peer().member()
    number, effects = peer.machine.query(Question.IS_CLOSED, 0.0)
    assert effects == [Send(Query(0, Question.IS_CLOSED))]
    assert peer.receive(Reply(0, flag=True)) == [Settle(number, Reply(0, flag=True))]


def test_a_wait_that_the_master_never_answers_ends_by_itself() -> None:
    peer = Peer().member()
    number, _ = peer.ask(StoreOp.WAIT, keys=("k",), timeout_s=5.0)
    assert peer.at(6.9) == []
    assert _failures(peer.at(7.0)) == {number: MasterUnreachableError}


def test_a_request_that_nobody_waits_for_any_more_is_forgotten() -> None:
    peer = Peer().member()
    number, _ = peer.ask()
    assert peer.machine.abandon(number) == []
    assert peer.receive(Reply(number)) == []
    assert len(peer.welcome(boot=2)) == 1


# ----------------------------------------------------------------------------------------------------- every ending


def _busy() -> Peer:
    """A member with a call of every kind under way."""
    peer = Peer().member()
    for kind in VoteKind:
        peer.vote(kind, timeout_s=1000.0)
    peer.ask(StoreOp.WAIT, keys=("k",), timeout_s=1000.0)
    peer.ask(StoreOp.SET, keys=("k",), values=(b"v",))
    peer.machine.query(Question.NUM_WAITING, 0.0)
    return peer


ALL_CALLS = {*VoteKind, 0, 1, 2}


def test_an_eviction_ends_every_call_with_its_reason_and_is_confirmed() -> None:
    peer = _busy()
    effects = peer.receive(Evicted("too slow"))
    assert effects[0] == Send(Farewell())
    assert effects[1] == _event(MembershipChange.EVICTED, 1, "a", "b", peer="a", reason="too slow")
    assert _failures(effects) == dict.fromkeys(ALL_CALLS, PeerEvictedError)
    assert peer.machine.ledger.frozen and peer.machine.standing is Standing.EVICTED
    with pytest.raises(PeerEvictedError, match="too slow") as caught:
        peer.machine.require_member()
    assert caught.value.reason == "too slow"


def test_the_masters_end_ends_every_call() -> None:
    peer = _busy()
    assert _failures(peer.receive(Stopped("for the night"))) == dict.fromkeys(ALL_CALLS, MasterStoppedError)
    assert peer.machine.ledger.frozen
    with pytest.raises(MasterStoppedError, match="for the night"):
        peer.vote()


def test_a_master_that_was_found_gone_for_good_ends_every_call() -> None:
    peer = _busy()
    error = MasterStoppedError("the actor is dead")
    assert _failures(peer.machine.master_gone(error)) == dict.fromkeys(ALL_CALLS, MasterStoppedError)
    assert peer.machine.master_gone(error) == []


def test_leaving_ends_every_call_and_says_goodbye_once() -> None:
    peer = _busy()
    effects = peer.machine.leave()
    assert effects[0] == Send(Leave())
    assert _failures(effects) == dict.fromkeys(ALL_CALLS, NotConnectedError)
    assert peer.machine.leave() == []


def test_a_master_that_is_silent_for_too_long_ends_every_call_but_not_the_membership() -> None:
    peer = _busy()
    assert _failures(peer.at(89.9, heard=False)) == {}
    assert _failures(peer.at(90.0, heard=False)) == dict.fromkeys(ALL_CALLS, MasterUnreachableError)
    assert peer.machine.standing is Standing.MEMBER


def test_a_peer_that_waits_is_evicted_with_an_error_of_its_join() -> None:
    peer = Peer()
    peer.welcome()
    assert _failures(peer.receive(Evicted("its connection to the master closed"))) == {JOIN: PeerEvictedError}


@pytest.mark.parametrize(
    "message",
    [
        Ask((9, 9)),
        _decide(9, "a"),
        Evicted("again"),
        Stopped("again"),
        VoteServed(TOPOLOGY, VoteCount(9, True)),
        Reply(0),
    ],
)
def test_nothing_happens_after_the_end(message: Message) -> None:
    peer = Peer().member()
    peer.receive(Evicted("too slow"))
    assert peer.receive(message) == []
    assert peer.at(1000.0, heard=False) == []
    assert peer.machine.view.epoch == 1


def test_every_call_raises_before_membership_and_after_its_end() -> None:
    waiting, out = Peer(), Peer().member()
    out.receive(Evicted("too slow"))
    for peer, error in ((waiting, NotConnectedError), (out, PeerEvictedError)):
        for call in (
            peer.vote,
            peer.ask,
            lambda peer=peer: peer.machine.query(Question.NUM_WAITING, 0.0),
            lambda peer=peer: peer.machine.link_broken("b"),
        ):
            with pytest.raises(error):
                call()


# ------------------------------------------------------------------------------------------------- news and passive


def test_news_reaches_callbacks() -> None:
    peer = Peer().member()
    assert peer.receive(News("waiting", "c", "")) == [_event(MembershipChange.WAITING, 1, "a", "b", peer="c")]


def test_beats_and_a_second_welcome_are_no_news() -> None:
    peer = Peer().member()
    assert peer.receive(Beat(1)) == [] == peer.receive(Welcome(1, "master", {}))


def test_a_passive_peer_says_so_and_polls_when_it_has_waited_too_long() -> None:
    peer = Peer(Settings(proactive_recovery=False, passive_timeout_s=3.0))
    (join,) = peer.welcome()
    assert isinstance(join, Join) and join.passive_timeout_s == 3.0
    peer.receive(_decide(1, "a", "b"))
    assert peer.at(2.9) == []
    assert peer.at(3.0) == [Send(Poll())]
    assert peer.at(5.9) == []
    assert peer.at(6.0) == [Send(Poll())]


def test_an_active_peer_never_polls() -> None:
    assert Peer().member().at(1000.0) == []
