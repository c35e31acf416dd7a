"""Point to point."""

from __future__ import annotations

import pytest

from ray_pccl.testing import Faults, PeerGroup, PeerStarter, eventually
from tests.collectives import messaging
from tests.collectives.conftest import TRANSPORTS, over, survivable, together


@over(2, 3)
def test_messages_of_all_sizes_and_types_arrive(group: PeerGroup) -> None:
    dtypes = ("float32", "uint8", "bool") if len(group) == 2 else ("int64",)
    assert not any(together(group, messaging.around_the_ring, "numpy", dtypes))


@over(2)
def test_torch_tensors_may_be_sent(group: PeerGroup) -> None:
    assert not any(together(group, messaging.around_the_ring, "torch", ("bfloat16",)))


@over(2)
def test_messages_of_one_tag_come_in_the_order_in_which_they_were_sent(group: PeerGroup) -> None:
    assert not any(together(group, messaging.in_a_row, 50))


@pytest.mark.parametrize("count", [10, 100_000])
@over(2, 3)
def test_many_messages_both_ways_and_collectives_do_not_disturb_each_other(group: PeerGroup, count: int) -> None:
    assert not any(together(group, messaging.all_at_once, 12, count))


@pytest.mark.parametrize("count", [1, 2_000_000])
@over(2)
def test_two_that_send_to_each_other_before_they_receive_do_not_block(group: PeerGroup, count: int) -> None:
    assert not any(together(group, messaging.both_at_once, count))


@pytest.mark.parametrize(("count", "dtype"), [(5, "float32"), (4, "int32"), (0, "float32"), (500_000, "float32")])
@over(2)
def test_a_receiver_that_expects_something_else_is_told_and_the_sender_too(
    group: PeerGroup, count: int, dtype: str
) -> None:
    for sender, receiver in ((0, 1), (1, 0)):
        sent = group[sender].run_async(messaging.message, "send", receiver, 4, "float32", 10.0)
        received = group[receiver].run_async(messaging.message, "recv", sender, count, dtype, 10.0)
        for outcome in (sent.result(15), received.result(15)):
            assert outcome.error == "CollectiveMismatchError", outcome
            assert "4 elements of FLOAT" in outcome.text and f"{count} elements of" in outcome.text
        sent = group[sender].run_async(messaging.message, "send", receiver, 4, "float32", 10.0)
        got = group[receiver].run(messaging.message, "recv", sender, 4, "float32", 10.0)
        assert sent.result(15).error == got.error == "" and got.results == (sender + 1,)


@over(2)
def test_a_message_that_nobody_meets_fails_in_time_and_the_next_one_arrives(group: PeerGroup) -> None:
    for role in ("send", "recv"):
        late = group[0].run(messaging.message, role, 1, 4, "float32", 0.3)
        assert late.error == "OperationTimeoutError" and late.ended - late.entered < 2.0
        assert group[1].peer_id in late.text and group[1].peer_id in late.details["calls"]
    sent = group[0].run_async(messaging.message, "send", 1, 5, "float32", 10.0)
    got = group[1].run(messaging.message, "recv", 0, 5, "float32", 10.0)
    assert sent.result(15).error == got.error == "" and got.results == (1.0,)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_message_to_or_from_the_dead_fails_and_others_go_on(
    peer_group: PeerStarter, faults: Faults, transport: str
) -> None:
    peers = survivable(peer_group, transport)
    to_dead = peers[0].run_async(messaging.message, "send", 2, 1_000_000, "float32", 20.0)
    from_dead = peers[1].run_async(messaging.message, "recv", 2, 4, "float32", 20.0)
    for peer in peers[:2]:
        eventually(lambda peer=peer: peer.run(messaging.is_waiting), 10, "it waits")
    faults.kill(peers[2])
    for outcome in (to_dead.result(15), from_dead.result(15)):
        assert outcome.error == "PeerLostError" and outcome.details["peers"] == (peers[2].peer_id,)
    sent = peers[0].run_async(messaging.message, "send", 1, 4, "float32", 20.0)
    assert peers[1].run(messaging.message, "recv", 0, 4, "float32", 10.0).results == (1.0,)
    assert sent.result(15).error == ""
