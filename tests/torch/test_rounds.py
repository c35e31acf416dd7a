"""When agents have to meet again: the table behind `num_nodes_waiting`."""

from __future__ import annotations

import pytest

from ray_pccl.torch.rounds import Round, Sight, lost_nodes, nodes_waiting

BOTH = Round(epoch=4, meeting=2, rank=0, members=("a", "b"))


@pytest.mark.parametrize(
    ("sight", "max_nodes", "waiting"),
    [
        (Sight(("a", "b")), 4, 0),
        (Sight(("a", "b"), waiting=1), 4, 1),
        (Sight(("a", "b"), waiting=3), 4, 2),  # only so many can come in
        (Sight(("a", "b"), waiting=1), 2, 0),  # full: meeting would change nothing
        (Sight(("a",)), 4, 1),  # a lost node alone
        (Sight(("a",)), 2, 1),
        (Sight(("a",), waiting=3), 2, 1),
        (Sight(("a",), waiting=3), 4, 3),
        (Sight(("a", "b"), asked_again=True), 2, 1),  # a worker of another node failed
        (Sight(None), 2, 1),  # this node itself was put out
        (Sight(("a", "b"), closed=True, waiting=1), 4, 0),
        (Sight(("a",), closed=True, asked_again=True), 4, 0),  # who ends first must not disturb who still works
    ],
)
def test_nodes_waiting(sight: Sight, max_nodes: int, waiting: int) -> None:
    assert nodes_waiting(BOTH, sight, max_nodes) == waiting


def test_the_lost_are_named() -> None:
    assert lost_nodes(BOTH, Sight(("a", "c"))) == ("b",)
    assert lost_nodes(BOTH, Sight(None)) == ("a",)
    assert lost_nodes(BOTH, Sight(("b", "a"))) == ()


def test_rounds_of_one_epoch_and_rounds_of_one_count_have_keys_of_their_own() -> None:
    rounds = [Round(epoch, meeting, 0, ("a",)) for epoch in (1, 2) for meeting in (1, 2)]
    assert len({key for each in rounds for key in (each.prefix, each.again_key)}) == 8
